"""mpi4py on Open MPI, MPICH and Intel MPI: an MPI's collectives called from Python, as ours are.

mpi4py's wheels have one extension for MPICH's ABI, which Intel MPI has, too, and one for Open
MPI's. ``MPI4PY_LIBMPI``, the path of a library, chooses both.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from ...comm.communicator import Communicator
from ..cases import Case
from ..implementation import Implementation, PeerMissing, Plan, Unsupported
from .mpi_installation import FLAVOURS, find_mpi, launcher_arguments

__all__ = ["Mpi4pyPeer"]

_NEEDED = "libmpi.so.12"  # what mpi4py's extension for MPICH's ABI is linked with
_CREDENTIALS = struct.Struct("3i")
_START_SECONDS = 60.0
_END_SECONDS = 10.0


class Mpi4pyPeer(Implementation):
    """Job of an MPI whose ranks are Python processes (`mpi4py_rank`) that call mpi4py.

    Our rank 0 starts it and tells its ranks what to do, while our other ranks wait. ``name``:
    "mpi4py-" and the MPI's. Raises `PeerMissing`.
    """

    def __init__(self, name: str, comm: Communicator, bound: bool):
        self.name, self.rank, self.size = name, comm.rank, comm.size
        self._flavour = name.removeprefix("mpi4py-")
        self.title = FLAVOURS[self._flavour].title
        self.fields = {"engine": name}
        self._process: subprocess.Popen | None = None
        self._connections: dict[int, Connection] = {}  # by rank
        if comm.device.type != "cpu":
            raise PeerMissing(f"{self.title} is measured on host memory only: --engine host")
        if comm.local_size != comm.size:
            raise PeerMissing(f"{self.title} is measured on one machine only")
        if self.rank:
            return
        if importlib.util.find_spec("mpi4py") is None:
            raise PeerMissing("not installed (pip install mpi4py)")
        launcher, library, environment = find_mpi(self._flavour)
        self._folder = tempfile.TemporaryDirectory(prefix="collectives-bench-")
        try:
            self._start(launcher, library, environment, bound)
        except BaseException:
            self.close()
            raise

    def _start(self, launcher: str, library: str, environment: dict[str, str], bound: bool) -> None:
        """Start the job, wait until all of its ranks have connected, and read its versions."""
        environment |= {"MPI4PY_LIBMPI": library, "OMP_NUM_THREADS": "1"}
        environment.pop("MPI4PY_MPIABI", None)  # it follows from the library
        if self._flavour == "intelmpi":
            environment.setdefault("I_MPI_PIN", "on" if bound else "off")
        if Path(library).name == "libmpich.so.12":  # Debian's name of the same library
            Path(self._folder.name, _NEEDED).symlink_to(library)
            environment["LD_LIBRARY_PATH"] = f"{self._folder.name}:{environment.get('LD_LIBRARY_PATH', '')}"
        address = f"collectives-bench-{os.getpid()}-{secrets.token_hex(8)}"
        command = [launcher, *launcher_arguments(self._flavour, self.size, bound)]
        command += [sys.executable, "-m", "collectives.bench.peers.mpi4py_rank", address]
        self._output = tempfile.TemporaryFile()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + address)
            listener.listen(self.size)
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            size, version = self._accept_ranks(listener, " ".join(command))
        if size != self.size:
            belong = f"{launcher} and {library} don't belong together"
            raise PeerMissing(f"{self.title}: its job has {size} ranks, not {self.size}: {belong}")
        if FLAVOURS[self._flavour].library_says not in version:
            raise PeerMissing(f"{library} is not {self.title}, it says {version.splitlines()[0]!r}")
        short = " ".join(version.split(",")[0].split("\n")[0].split())
        versions = {"mpi4py": importlib.metadata.version("mpi4py"), self._flavour: short}
        self.fields = {"engine": self.name, "versions": versions}

    def _accept_ranks(self, listener: socket.socket, command: str) -> tuple[int, str]:
        """Wait for the connections of all ranks; return the job's size and the MPI's version."""
        deadline = time.monotonic() + _START_SECONDS
        size, version = 0, ""
        while len(self._connections) < self.size:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PeerMissing(f"{self.title} could not be started: {self._read_output()} ({command})")
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                continue
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                accepted.close()
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            try:
                rank, size, version = connection.recv()
            except EOFError:  # the next turn says what the job has written
                continue
            self._connections[rank] = connection
            if size != self.size:
                break
        return size, version

    def _call_all(self, method: str, *arguments) -> list:
        """Call a method of each rank's implementation; return their results, in rank order."""
        answers = []
        try:
            for connection in self._connections.values():
                connection.send((method, arguments))
            for _, connection in sorted(self._connections.items()):
                answers.append(connection.recv())
        except (EOFError, OSError):
            raise ChildProcessError(f"{self.title}'s job has ended: {self._read_output()}") from None
        for result in answers:
            if isinstance(result, Unsupported):
                raise result
        return answers

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        self._call_all("prepare", case, in_place, arrays)

    def time_turn(self, plan: Plan) -> list[list[float]]:
        return [times for (times,) in self._call_all("time_turn", plan)]

    def check(self) -> list[int]:
        return [wrong for (wrong,) in self._call_all("check")]

    def release(self) -> None:
        self._call_all("release")

    def _read_output(self) -> str:
        """Return the start of the job's output."""
        time.sleep(0.2)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        text = " / ".join(line.strip() for line in lines if re.search(r"\w", line))
        return text[:400] or "it said nothing"

    def close(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.send(("stop", ()))
            connection.close()
        self._connections = {}
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
            self._output.close()
        if self.rank == 0:
            self._folder.cleanup()
