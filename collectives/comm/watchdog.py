"""Watchdog: a thread per process that aborts communicators that hang, as NCCL itself does not.

A call costs the binding five assignments (`Comm.issued`); everything else is done here. In each
round the thread reads how many calls a communicator has issued. If the number has not changed since
the last round and some of the calls are not known to have ended, the thread records one event after
the last call, on that call's stream, and queries the event in the following rounds. So nothing is
recorded while calls keep coming, no user's thread waits, and no event is recorded among the calls
of a group that isn't launched yet. No event is recorded on a stream that is being captured. While
calls are pending the thread queries NCCL for errors, the kernel for the peers' processes, and the
store for a failure that another rank has found.

Past the communicator's timeout the thread reads the call numbers that the other ranks have
published, and aborts the communicator. The next wait, operation or `close` on the user's threads
raises the error.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from .._nccl import DTYPES, check, name_of_tag
from ..arrays import ITEMSIZE
from ..cuda_state import set_thread_device
from ..errors import CollectivesError, CollectiveTimeout, RemoteError, TransportError
from ..json_records import parse_json, parse_numbers, parse_text
from ..secret import seal, unseal
from .flight_recorder import complete
from .liveness import exit_reason
from .waiting import call_with_timeout, format_ranks

__all__ = ["ROUND_S", "StatusStore", "status_store_of", "unwatch", "watch", "watch_child"]

ROUND_S = 1.0  # seconds from one round to the next
_PENDING_S = 2.0  # calls that are pending for longer make it check the peers
_READ_S = 5.0  # limit for reading the other ranks' call numbers
_IN_PROGRESS = 7  # ncclInProgress
_NAMES = {code: name for name, code in DTYPES.items()}

_log = logging.getLogger("collectives")


class StatusStore:
    """The ranks' status in a torch store: call numbers, and the failure that aborted a rank."""

    def __init__(self, store: dist.Store | None, prefix: str):
        self._store = store  # None where it is closed
        self._prefix = prefix

    def with_prefix(self, name: str) -> StatusStore:
        """Return a status store with its own prefix, for a communicator made from this one."""
        return StatusStore(self._store, f"{self._prefix}/{name}")

    def set(self, key: str, value) -> None:
        """Set a key; does nothing where the store is closed."""
        if self._store is not None:
            try:
                self._store.set(f"{self._prefix}/{key}", seal(json.dumps(value).encode(), f"status/{key}"))
            except RuntimeError:
                self._store = None

    def get(self, key: str):
        """Return the value of a key; None where it is not set or the store is closed."""
        store = self._store
        try:
            if store is None or not store.check([f"{self._prefix}/{key}"]):
                return None
            return parse_json(unseal(store.get(f"{self._prefix}/{key}"), f"status/{key}"))
        except TransportError:  # a stranger's
            return None
        except RuntimeError:  # its server has ended; torch writes a stack for each further try
            self._store = None
        except ValueError:
            pass
        return None


def read_failure(value) -> tuple[int, str, list[int]] | None:
    """Return (rank, text, peers) of a failure that a rank has set; None for any other value."""
    try:
        (by,) = parse_numbers([value["rank"]])
        return by, parse_text(value["text"]), parse_numbers(value["peers"])
    except (ValueError, KeyError, TypeError):
        return None


def read_position(value) -> tuple[int, str]:
    """Return (number, operation) of the call at which a rank is; (0, "") for any other value."""
    match value:
        case [int(number), str(op)] if not isinstance(number, bool):
            return number, op
    return 0, ""


class _WatchedComm:
    """One communicator under watch, and its state in the last round."""

    def __init__(self, comm, status: StatusStore | None):
        self.comm = weakref.ref(comm)
        self.status = status
        self._last_number = 0  # calls in the last round
        self._ended_number = 0  # calls that are known to have ended
        self._has_completed: Callable[[], bool] | None = None  # of the event after call `_event_number`
        self._event_number = 0
        self._event_time = 0.0
        self._published_number = 0
        self._publishes_error = True  # false where the error came from another rank

    def check(self) -> None:
        """Check the communicator once; abort it where it has failed or hangs."""
        comm = self.comm()
        if comm is None or comm.closed:
            unwatch(comm or self)
            return
        native = comm._native
        try:
            error = self._find_error(comm, native)
        except CollectivesError as found:
            error = found
        if error is not None and comm._native is native:
            if self.status is not None and self._publishes_error:
                self.status.set("failed", {"text": error.message, "rank": comm.rank, "peers": list(error.peers)})
            _log.error("rank %d ends a communicator: %s", comm.rank, error.message)
            comm._abort_with_error(error)

    def _find_error(self, comm, native) -> CollectivesError | None:
        number, op, count, dtype, stream = native.issued
        tag = name_of_tag(native.last_tag)
        now = time.monotonic()
        state = native.async_error()
        if state not in (0, _IN_PROGRESS):
            check(state, comm.engine.library, native)
        if self._has_completed is not None and self._has_completed():
            self._has_completed, self._ended_number = None, self._event_number
            complete(comm, self._ended_number)
        if self._has_completed is None and number > self._ended_number and number == self._last_number:
            self._has_completed = comm._queue.record_completion(stream)  # None: not now
            self._event_number, self._event_time = number, now
        unchanged, self._last_number = number == self._last_number, number
        if self.status is not None and unchanged and number != self._published_number:
            self._published_number = number
            self.status.set(str(comm.rank), [number, f"{op} of {tag}" if tag else op])
        pending_s = now - self._event_time
        if self._has_completed is None or pending_s < min(_PENDING_S, comm.timeout or _PENDING_S):
            return None
        where = {"op": op, "rank": comm.rank, "seq": number, "nbytes": count * ITEMSIZE.get(dtype, 0), "tag": tag}
        what = f"{op}, call {number} of this communicator, {count} elements of {_NAMES.get(dtype, dtype)}"
        exits = {peer.rank: how for peer in comm.peers or () if (how := exit_reason(peer.process))}
        if exits:
            how = "; ".join(f"rank {rank}: {text}" for rank, text in exits.items())
            return RemoteError(f"{what}, can't end: {how}", peers=sorted(exits), **where)
        failure = read_failure(self.status.get("failed") if self.status is not None else None)
        if failure is not None and failure[0] != comm.rank:
            by, reason, peers = failure
            self._publishes_error = False
            return RemoteError(f"{what}: rank {by} has ended the communicator: {reason}", peers=peers, **where)
        if comm.timeout is None or pending_s < comm.timeout:
            return None
        peers, text = self._find_stragglers(comm, number)
        return CollectiveTimeout(f"{what}, has not ended within {comm.timeout:g} s: {text}", peers=peers, **where)

    def _find_stragglers(self, comm, number: int) -> tuple[list[int], str]:
        """Return the ranks whose published call numbers are below this rank's, and a text."""
        unknown = "nobody knows here which ranks have not come"
        if self.status is None:
            return [], unknown
        status = self.status
        others = [rank for rank in range(comm.size) if rank != comm.rank]

        try:
            values = call_with_timeout(
                lambda _: {rank: status.get(str(rank)) for rank in others}, time.monotonic() + _READ_S,
                lambda: CollectiveTimeout("the store doesn't answer"),
            )  # fmt: skip
        except CollectivesError:
            return [], f"{unknown}, since the store doesn't answer"
        positions = {rank: read_position(value) for rank, value in values.items()}
        behind = [rank for rank in others if positions[rank][0] < number]
        if not behind:
            return [], "all ranks have issued it"
        at = "; ".join(
            f"rank {rank} is at call {positions[rank][0]}" + (f" ({positions[rank][1]})" if positions[rank][0] else "")
            for rank in behind[:16]
        )
        return behind, f"{format_ranks(behind)} of {comm.size} did not come ({at})"


# ---- The thread.

_watched: dict[int, _WatchedComm] = {}  # by the communicator's id
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None


def watch(comm, status: StatusStore | None = None) -> None:
    """Watch a communicator until it is closed; a further call replaces its status store."""
    global _thread
    with _lock:
        watched = _watched.get(id(comm))
        if watched is not None and watched.comm() is comm:
            watched.status = status
            return
        _watched[id(comm)] = _WatchedComm(comm, status)
        if _thread is None or not _thread.is_alive():
            if _thread is None:
                atexit.register(_at_exit)  # runs before the exit function of lifetime.py, which was registered first
            _stop.clear()
            _thread = threading.Thread(target=_run, args=(_stop, comm.device), name="collectives-watchdog", daemon=True)
            _thread.start()


def status_store_of(comm) -> StatusStore | None:
    """Return the status store of a communicator's ranks, or None where it has none."""
    watched = _watched.get(id(comm))
    return watched.status if watched is not None and watched.comm() is comm else None


def watch_child(child, parent, name: str) -> None:
    """Give a communicator that was made from another one its own status in the parent's store.

    Does nothing where the parent has none.
    """
    status = status_store_of(parent)
    if status is not None:
        watch(child, status.with_prefix(name))


def unwatch(comm) -> None:
    """Stop watching a communicator."""
    with _lock:
        for key, watched in list(_watched.items()):
            if watched is comm or watched.comm() in (comm, None):
                del _watched[key]


def _run(stop: threading.Event, device: torch.device) -> None:
    set_thread_device(device)
    while not stop.wait(ROUND_S):
        for watched in list(_watched.values()):
            try:
                watched.check()
            except Exception:  # the others must still be watched
                _log.exception("a communicator could not be watched, and isn't any more")
                unwatch(watched)


def _at_exit() -> None:
    _stop.set()
    thread = _thread
    if thread is not None:
        thread.join(2 * _READ_S)


def _after_fork() -> None:
    """Reset the state in a forked child: no thread runs, and the communicators can't be used."""
    global _thread, _lock, _stop
    _watched.clear()
    _lock, _stop, _thread = threading.Lock(), threading.Event(), None


os.register_at_fork(after_in_child=_after_fork)
