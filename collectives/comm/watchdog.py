"""A thread per process that ends communicators whose operations hang, which NCCL itself never does.

A call costs the binding five stores (`Comm.issued`); everything else is done here. In each round the thread looks at
how many calls a communicator was given. Where that has stood still for a round and is more than what is known to have
ended, it records one event behind the last call, on the stream that this was given, and asks for the event in the
following rounds. So nothing is recorded while calls keep coming, no user's thread waits, and it can't mark calls of a
group that isn't launched yet. A stream that is being captured is left alone. While calls are pending it asks NCCL for
errors, the kernel for the peers' processes, and the store for a failure that another rank has found.

Past the communicator's timeout it reads the numbers that the other ranks have published, and aborts. The error is
raised by what comes next on the user's threads: waits, operations and `close`.
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

from .._nccl import DTYPES, check
from ..arrays import ITEMSIZE
from ..cuda_state import set_thread_device
from ..errors import CollectivesError, CollectiveTimeout, RemoteError
from .liveness import described, has_ended
from .waiting import call_with_limit, name_ranks

__all__ = ["ROUND_S", "Notes", "notes_of", "unwatch", "watch"]

ROUND_S = 1.0  # seconds from one look to the next
_PENDING_S = 2.0  # calls that are pending for longer make it look at the peers
_READ_S = 5.0  # for the other ranks' numbers
_IN_PROGRESS = 7  # ncclInProgress
_NAMES = {code: name for name, code in DTYPES.items()}

_log = logging.getLogger("collectives")


class Notes:
    """What the ranks of a communicator leave for each other in a store: their numbers, and why one has ended it.

    `store`: torch's own is held weakly, since it closes its port when the process group goes away.
    """

    def __init__(self, store: dist.Store, prefix: str, *, weak: bool = False):
        self._store = weakref.ref(store) if weak else lambda: store
        self._prefix = prefix

    def under(self, name: str) -> Notes:
        """Give a place of its own for a communicator that was made from this one."""
        notes = Notes.__new__(Notes)
        notes._store, notes._prefix = self._store, f"{self._prefix}/{name}"
        return notes

    def put(self, key: str, value) -> None:
        """Leave a note; nothing where the store is gone."""
        store = self._store()
        if store is not None:
            try:
                store.set(f"{self._prefix}/{key}", json.dumps(value))
            except RuntimeError:
                self._store = _gone

    def read(self, key: str):
        """Give a note; None where there is none, or the store is gone."""
        store = self._store()
        try:
            if store is None or not store.check([f"{self._prefix}/{key}"]):
                return None
            return json.loads(store.get(f"{self._prefix}/{key}"))
        except RuntimeError:  # its server has ended; torch writes a stack for each further try
            self._store = _gone
        except ValueError:
            pass
        return None


def _gone() -> None:
    """Stand for a store that is gone."""


class _Watched:
    """One communicator under watch, and what was seen of it in the last round."""

    def __init__(self, comm, notes: Notes | None):
        self.comm = weakref.ref(comm)
        self.notes = notes
        self._seen = 0  # calls in the last round
        self._ended = 0  # calls that are known to have ended
        self._mark: Callable[[], bool] | None = None  # behind the calls up to `_marked`
        self._marked = 0
        self._since = 0.0
        self._published = 0
        self._is_news = True  # what is found here is for the other ranks, too

    def look(self) -> None:
        """Look once; ends the communicator where it has failed, or hangs."""
        comm = self.comm()
        if comm is None or comm.closed:
            unwatch(comm or self)
            return
        native = comm._native
        try:
            error = self._problem(comm, native)
        except CollectivesError as found:
            error = found
        if error is not None and comm._native is native:
            if self.notes is not None and self._is_news:
                self.notes.put("failed", {"text": error.message, "rank": comm.rank, "peers": list(error.peers)})
            _log.error("rank %d ends a communicator: %s", comm.rank, error.message)
            comm._fail(error)

    def _problem(self, comm, native) -> CollectivesError | None:
        number, op, count, dtype, stream = native.issued
        now = time.monotonic()
        state = native.async_error()
        if state not in (0, _IN_PROGRESS):
            check(state, comm.engine.library, native)
        if self._mark is not None and self._mark():
            self._mark, self._ended = None, self._marked
        if self._mark is None and number > self._ended and number == self._seen:
            self._mark = comm._lane.mark(stream)  # None: not now
            self._marked, self._since = number, now
        still, self._seen = number == self._seen, number
        if self.notes is not None and still and number != self._published:
            self._published = number
            self.notes.put(str(comm.rank), [number, op])
        if self._mark is None or now - self._since < min(_PENDING_S, comm.timeout or _PENDING_S):
            return None
        where = {"op": op, "rank": comm.rank, "seq": number, "nbytes": count * ITEMSIZE.get(dtype, 0)}
        what = f"{op}, call {number} of this communicator, {count} elements of {_NAMES.get(dtype, dtype)}"
        found = self._ended_peers(comm)
        if found:
            how = "; ".join(f"rank {rank}: {text}" for rank, text in found.items())
            return RemoteError(f"{what}, can't end: {how}", peers=sorted(found), **where)
        told = self.notes.read("failed") if self.notes is not None else None
        if isinstance(told, dict) and told.get("rank") != comm.rank:
            text = f"{what}: rank {told.get('rank')} has ended the communicator: {told.get('text')}"
            self._is_news = False
            return RemoteError(text, peers=told.get("peers", ()), **where)
        if comm.timeout is None or now - self._since < comm.timeout:
            return None
        peers, text = self._laggards(comm, number)
        return CollectiveTimeout(f"{what}, has not ended within {comm.timeout:g} s: {text}", peers=peers, **where)

    def _ended_peers(self, comm) -> dict[int, str]:
        processes = {peer.rank: peer.process for peer in comm.peers or () if peer.process}
        return {rank: described(process) for rank, process in processes.items() if has_ended(process)}

    def _laggards(self, comm, number: int) -> tuple[list[int], str]:
        """Say which ranks have not come as far as this one, by the numbers that they have published."""
        unknown = "nobody knows here which ranks have not come"
        if self.notes is None:
            return [], unknown
        notes = self.notes
        others = [rank for rank in range(comm.size) if rank != comm.rank]

        def late() -> CollectivesError:
            return CollectiveTimeout("the store doesn't answer")

        try:
            read = call_with_limit(
                lambda _: {rank: notes.read(str(rank)) for rank in others}, time.monotonic() + _READ_S, late
            )
        except CollectivesError:
            return [], f"{unknown}, since the store doesn't answer"
        counts = {rank: said[0] if isinstance(said, list) and said else 0 for rank, said in read.items()}
        behind = [rank for rank in others if counts[rank] < number]
        if not behind:
            return [], "all ranks have issued it"
        at = "; ".join(
            f"rank {rank} is at call {counts[rank]}" + (f" ({read[rank][1]})" if counts[rank] else "")
            for rank in behind[:16]
        )
        return behind, f"{name_ranks(behind)} of {comm.size} did not come ({at})"


# ---- The thread.

_watched: dict[int, _Watched] = {}  # by the communicator's id
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None


def watch(comm, notes: Notes | None = None) -> None:
    """Have a communicator watched until it is closed; again: with these notes."""
    global _thread
    with _lock:
        known = _watched.get(id(comm))
        if known is not None and known.comm() is comm:
            known.notes = notes
            return
        _watched[id(comm)] = _Watched(comm, notes)
        if _thread is None or not _thread.is_alive():
            if _thread is None:
                atexit.register(_at_exit)  # runs before what closes communicators, which was registered at import
            _stop.clear()
            _thread = threading.Thread(target=_run, args=(_stop, comm.device), name="collectives-watchdog", daemon=True)
            _thread.start()


def notes_of(comm) -> Notes | None:
    """Give the notes of a communicator's ranks, where it has any."""
    known = _watched.get(id(comm))
    return known.notes if known is not None and known.comm() is comm else None


def unwatch(comm) -> None:
    """Let a communicator be."""
    with _lock:
        for key, known in list(_watched.items()):
            if known is comm or known.comm() in (comm, None):
                del _watched[key]


def _run(stop: threading.Event, device: torch.device) -> None:
    set_thread_device(device)
    while not stop.wait(ROUND_S):
        for known in list(_watched.values()):
            try:
                known.look()
            except Exception:  # the others are still to be watched
                _log.exception("a communicator could not be watched, and isn't any more")
                unwatch(known)


def _at_exit() -> None:
    _stop.set()
    thread = _thread
    if thread is not None:
        thread.join(2 * _READ_S)


def _after_fork() -> None:
    """A forked child has none: the parent's communicators are out of use there."""
    global _thread, _lock, _stop
    _watched.clear()
    _lock, _stop, _thread = threading.Lock(), threading.Event(), None


os.register_at_fork(after_in_child=_after_fork)
