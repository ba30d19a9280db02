"""Flight recorder: the last operations of every communicator, in memory that outlives the process.

Each communicator has a ring of its last 2,048 operations, which the binding and the host engine
write. With ``COLLECTIVES_FLIGHT_DIR`` a ring is a mapping of a file in that folder, so that it can be
read after SIGKILL; else it is plain memory. `collectives.flight` reads the files.

A process that ends in good order removes its files. They stay where an operation has failed, a
communicator was aborted, or the process ended by an exception or a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

from .._nccl import FLIGHT_BYTES, FLIGHT_LAYOUT, FlightRing
from ..environment import read_switch
from ..errors import Aborted, CollectivesError, InvalidArgument, InvalidUsage
from .liveness import this_process

__all__ = ["Flight", "attach", "attach_child", "dump"]

_DIR, _LINES, _OFF = "COLLECTIVES_FLIGHT_DIR", "COLLECTIVES_FLIGHT_LINES", "COLLECTIVES_NO_FLIGHT"
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_log = logging.getLogger("collectives.flight")

_lock = threading.RLock()
_flights: dict[int, Flight] = {}  # those of open communicators, by their id
_free: list[tuple] = []  # (memory, path) of closed communicators: memory is never unmapped while the process lives
_kept: list[Flight] = []  # of failed communicators
_count = 0  # files of this process
_failed_dirs: set[str] = set()
_signal_installed = False


class Flight:
    """The ring of one communicator, and what its file says beside the operations.

    ``name``: the communicator's name, the same on all its ranks; ``path``: of the file, None for
    plain memory.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None, name: str, meta: dict):
        self.memory, self.path, self.name = memory, path, name
        self.failed = False
        self._error: dict | None = None
        self._is_ended = False  # by an error, or aborted
        self.ring = FlightRing(memory, _find_line if read_switch(_LINES) else None, self.record_error)
        self._write("meta", meta)
        self.record_state("open")

    def record_state(self, state: str, error: BaseException | None = None) -> None:
        """Write the communicator's state, with the error that has led to it or None.

        What has ended the communicator stays. An error after which it can be used, such as `Mismatch`,
        leaves it open; the first one is written until another error ends the communicator.
        """
        if self._is_ended:
            return
        is_usable = isinstance(error, InvalidArgument | InvalidUsage)
        is_consequence = isinstance(error, Aborted) and self._error is not None  # the abort ends operations in flight
        now = time.monotonic_ns()
        if error is not None and not is_consequence and (self._error is None or not is_usable):
            self._error = {
                "kind": type(error).__name__, "text": str(error)[:1000], "at": now,
                "op": getattr(error, "op", None), "peers": list(getattr(error, "peers", ()))[:64],
            }  # fmt: skip
        self._is_ended = state == "aborted" or (error is not None and not is_usable)
        self.failed = self.failed or self._is_ended or error is not None
        outcome = {"state": "open" if is_usable else state, "at": now}
        self._write("outcome", outcome if self._error is None else outcome | {"error": self._error})

    def record_error(self, error: CollectivesError) -> None:
        """Write an error that a call has raised."""
        self.record_state("failed", error)

    def _write(self, part: str, value: dict) -> None:
        offset, room = FLIGHT_LAYOUT[f"{part}_offset"], FLIGHT_LAYOUT[f"{part}_bytes"] - 4
        text = json.dumps(value).encode()
        if len(text) > room:
            text = json.dumps({key: value[key] for key in value if key != "error"}).encode()[:room]
        self.memory[offset : offset + 4] = struct.pack("<I", 0)  # a reader then finds nothing, not a half
        self.memory[offset + 4 : offset + 4 + len(text)] = text
        self.memory[offset : offset + 4] = struct.pack("<I", len(text))


def attach(comm, name: str) -> None:
    """Give a communicator its ring, under a name that is the same on all its ranks.

    Does nothing where COLLECTIVES_NO_FLIGHT is 1.
    """
    if read_switch(_OFF):
        return
    nodes = comm.machines or ()
    meta = {
        "name": name, "rank": comm.rank, "size": comm.size, "pid": os.getpid(), "process": this_process(),
        "host": socket.gethostname(), "device": str(comm.device), "engine": comm.engine.name,
        "node": next((number for number, ranks in enumerate(nodes) if comm.rank in ranks), None),
        "clock": time.time_ns() - time.monotonic_ns(), "opened": time.monotonic_ns(),
        "program": " ".join(sys.argv)[:200],
    }  # fmt: skip
    with _lock:
        memory, path = _take_memory(comm.rank)
        flight = Flight(memory, path, name, meta)
        _flights[id(comm)] = flight
        _install_once()
    comm._flight = flight
    comm._native.attach_flight_ring(flight.ring)


def attach_child(child, parent, name: str) -> None:
    """Give a communicator that was made from another one its ring."""
    if parent._flight is not None:
        attach(child, f"{parent._flight.name}/{name}")


def detach(comm, state: str, error: BaseException | None = None) -> None:
    """End a communicator's recording: it is closed, aborted, or has failed."""
    with _lock:
        flight = _flights.pop(id(comm), None)
        if flight is None:
            return
        flight.record_state(state, error)
        if flight.failed:
            _kept.append(flight)
        else:
            _free.append((flight.memory, flight.path))


def complete(comm, number: int) -> None:
    """Record that all operations of a communicator up to a number are known to have ended."""
    if comm._flight is not None:
        comm._flight.ring.complete(number, time.monotonic_ns())


def dump(folder: str | os.PathLike | None = None) -> list[Path]:
    """Write the rings of this process's communicators into a folder.

    Args:
        folder: The folder. None: COLLECTIVES_FLIGHT_DIR, whose files are there already.

    Returns:
        The files.

    Raises:
        OSError: Where the files can't be written.
        ValueError: Where no folder is known.
    """
    folder = folder if folder is not None else os.environ.get(_DIR)
    if not folder:
        raise ValueError(f"flight.dump(): name a folder, or set {_DIR}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with _lock:
        for number, flight in enumerate([*_kept, *_flights.values()]):
            if flight.path is not None and flight.path.parent.resolve() == folder.resolve():
                paths.append(flight.path)
                continue
            path = folder / f"{socket.gethostname()}-{os.getpid()}-dump{number}.flight"
            partial = path.with_suffix(".partial")
            try:
                partial.write_bytes(bytes(flight.memory))
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            paths.append(path)
    return paths


# ---- Memory.


def _take_memory(rank: int) -> tuple[mmap.mmap, Path | None]:
    """Return a ring's memory, and the path of its file or None."""
    global _count
    folder = os.environ.get(_DIR, "")
    wanted = Path(folder) if folder and folder not in _failed_dirs else None
    for number, (memory, path) in enumerate(_free):
        if wanted == (None if path is None else path.parent):
            del _free[number]
            return memory, path
    if wanted is not None:
        path = Path(folder, f"rank{rank}-{socket.gethostname()}-{os.getpid()}-{_count}.flight")
        _count += 1
        try:
            return _map_file(path), path
        except OSError as error:
            _failed_dirs.add(folder)
            _log.warning("%s=%s: %s; the flight recorder goes on in memory", _DIR, folder, error)
    return mmap.mmap(-1, FLIGHT_BYTES), None


def _map_file(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, FLIGHT_BYTES)  # a full disk is an error here, and no SIGBUS later
        return mmap.mmap(file, FLIGHT_BYTES)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _find_line() -> str:
    """Return the place in the program, outside of this package and torch, that makes a call."""
    frame = sys._getframe(1)
    last = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<")) and f"{os.sep}torch{os.sep}" not in name:
            return f"{name}:{frame.f_lineno}"
        last, frame = frame, frame.f_back
    return f"{last.f_code.co_filename}:{last.f_lineno}"


# ---- Signals, exit and fork.


def _install_once() -> None:
    global _signal_installed
    if _signal_installed:
        return
    _signal_installed = True
    atexit.register(_at_exit)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _on_signal)


def _on_signal(_number, _frame) -> None:
    """Write the rings into COLLECTIVES_FLIGHT_DIR, else a folder of this user's under the temporary one,
    and say on stderr where.
    """
    try:
        folder = Path(os.environ.get(_DIR) or _make_own_folder())
        text = f"{len(dump(folder))} files in {folder}" if _flights or _kept else "no communicator"
    except OSError as error:
        text = f"could not be written: {error}"
    sys.stderr.write(f"collectives: flight recorder of process {os.getpid()}: {text}\n")
    sys.stderr.flush()


def _make_own_folder() -> Path:
    """Make the folder for rings that were asked for by a signal; another user's is refused."""
    folder = Path(tempfile.gettempdir(), f"collectives-flight-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} isn't a folder of this user's")
    return folder


def _at_exit() -> None:
    """Remove the files of a process that ends in good order."""
    if _kept or hasattr(sys, "last_type"):
        return
    with _lock:
        for path in [path for _, path in _free] + [flight.path for flight in _flights.values()]:
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink()


def _after_fork() -> None:
    """Forget the parent's rings in a forked child, which must not write into their files."""
    global _lock, _signal_installed, _count
    _lock = threading.RLock()
    _forked.append((dict(_flights), list(_free), list(_kept)))  # unmapping is the parent's business
    _flights.clear()
    _free.clear()
    _kept.clear()
    _signal_installed, _count = False, 0


_forked: list = []
os.register_at_fork(after_in_child=_after_fork)
