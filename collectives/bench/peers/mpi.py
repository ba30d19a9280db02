"""Open MPI, MPICH and Intel MPI: a job of mpi_loop.c's processes with command sockets.

The loop is C, so no Python runs between an MPI's calls (``caller: "c"``). Its ranks are bound to
cores as ours are. All other settings are the defaults, except that Open MPI yields where there are
more ranks than cores.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from pathlib import Path

import numpy as np
import torch

from ...comm.communicator import Communicator
from ..buffers import pattern_tensor
from ..cases import PERIOD, Case
from ..implementation import Implementation, PeerMissing, Plan
from .mpi_installation import MpiFlavour, find_mpi, launcher_arguments
from .mpi_protocol import (
    CHECK,
    COMMAND,
    HELLO,
    PREPARE,
    RELEASE,
    STOP,
    TURN,
    encode_command,
    encode_plan,
    mpi_layout,
    receive,
)

__all__ = ["MpiPeer"]

_SOURCE = Path(__file__).with_name("mpi_loop.c")
# In the order of mpi_loop.c's tables.
_OPS = "all_reduce reduce_scatter all_gather broadcast reduce all_to_all gather scatter sendrecv".split()
_TYPES = "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()
_REDUCTIONS = "sum prod max min".split()
_CREDENTIALS = struct.Struct("3i")
_START_SECONDS = 60.0
_END_SECONDS = 10.0


class MpiPeer(Implementation):
    """Job of an MPI, which our rank 0 commands while our other ranks wait. Raises `PeerMissing`.

    The job's ranks run mpi_loop.c; a subclass may have another program.
    """

    caller = "c"
    prefix = ""  # of its name, before the MPI's

    def __init__(self, flavour: MpiFlavour, comm: Communicator, bound: bool):
        self.flavour, self.name = flavour, self.prefix + flavour.name
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
        launcher, library, environment = find_mpi(flavour)
        if flavour.name == "intelmpi":
            environment = {"I_MPI_PIN": "on" if bound else "off", **environment}
        name = f"collectives-bench-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            program = self.program(library, environment)
            command = [launcher, *launcher_arguments(flavour, comm.size, bound), *program, name]
            version = self._start(command, environment, name, library)
        except BaseException:
            self.close()
            raise
        self.fields = {"engine": self.name, "versions": {**self.versions(), flavour.name: version}}

    def program(self, library: str, environment: dict[str, str]) -> list[str]:
        """Return the program that each rank runs, without the socket's name, which comes last.

        ``environment``: the job's, to which variables may be added. Raises `PeerMissing`.
        """
        return [_compiled(self.flavour), library]

    def versions(self) -> dict[str, str]:
        """Return the versions of what is called beside the MPI."""
        return {}

    def case_message(self, case: Case, in_place: bool, rank: int, arrays: int) -> bytes:
        """Return what a rank gets to prepare a case."""
        dtype, layout, segments = case.kind.dtype, mpi_layout(case, rank, in_place), case.expected(rank)
        redop = _REDUCTIONS.index(case.redop) if case.redop else 0
        numbers = (
            PREPARE, _OPS.index(case.op.name), _TYPES.index(case.kind.name), redop, max(case.root, 0), in_place,
            len(segments), case.count, layout.send, layout.recv, layout.total, layout.send_at, layout.recv_at,
            dtype.itemsize, arrays,
        )  # fmt: skip
        parts = [COMMAND.pack(*numbers), struct.pack("@q", PERIOD), _raw(case.inputs()[rank], dtype)]
        for segment in segments:
            parts += [struct.pack("@2q", segment.start, segment.length), _raw(segment.values, dtype)]
        return b"".join(parts)

    def _start(self, command: list[str], environment: dict[str, str], name: str, library: str) -> str:
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
                rank, size, text = HELLO.unpack(self._read(channel, HELLO.size))
                self._channels[rank] = channel
                if size != self.size:
                    belong = f"{command[0]} and {library} don't belong together"
                    raise PeerMissing(f"{self.flavour.title}: its job has {size} ranks, not {self.size}: {belong}")
        version = text.rstrip(b"\0").decode(errors="replace")
        if self.flavour.library_says not in version:
            raise PeerMissing(f"{library} is not {self.flavour.title}, it says {version.splitlines()[0]!r}")
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

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        if self.rank:
            return
        for rank, channel in self._channels.items():
            self._send(channel, self.case_message(case, in_place, rank, arrays))
        self._answers()

    def turn(self, plan: Plan) -> list[list[float]]:
        if self.rank:
            return []
        for channel in self._channels.values():
            self._send(channel, encode_command(TURN) + encode_plan(plan))
        read = [self._read(channel, 8 * plan.batches) for _, channel in sorted(self._channels.items())]
        return [list(struct.unpack(f"@{plan.batches}d", each)) for each in read]

    def check(self) -> list[int]:
        return [] if self.rank else self._command_all(CHECK)

    def release(self) -> None:
        if self.rank == 0:
            self._command_all(RELEASE)

    def _command_all(self, what: int) -> list[int]:
        for channel in self._channels.values():
            self._send(channel, encode_command(what))
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
            return receive(channel, n)
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
                channel.sendall(encode_command(STOP))
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


def _raw(values: np.ndarray, dtype: torch.dtype) -> bytes:
    return pattern_tensor(values, dtype).view(torch.uint8).numpy().tobytes()


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
