"""Library of communicators over several nodes: groups and queues around the host engine's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

from ..._nccl import DTYPES, FLIGHT_OPS
from ...errors import CollectivesError, InternalError, InvalidUsage

__all__ = ["Call", "CallOrder", "MultiNodeLibrary"]


_INTERNAL_ERROR = 3  # ncclInternalError
_BYTES = DTYPES["uint8"]  # what a call's count is of, in the flight recorder


class MultiNodeLibrary:
    """Library of communicators over several nodes, with the methods of `_nccl.Library`.

    Groups, labels and queues are implemented here; all other methods are the host engine's.
    """

    is_host = True
    _instances: dict = {}

    def __init__(self, library):
        self.library = library
        self._thread_state = threading.local()

    @classmethod
    def of(cls, library) -> MultiNodeLibrary:
        """Return the instance that belongs to a library."""
        return cls._instances.setdefault(id(library), cls(library))

    def __getattr__(self, name: str):
        return getattr(self.library, name)

    def has(self, name: str) -> bool:
        """Return whether a C function has its counterpart here."""
        return self.library.has(name) and name != "collHostAllReduceCast"

    def label(self, op: str | None = None, dtype: str | None = None) -> None:
        """Name this thread's next operation; see `_nccl.Library.label`."""
        self._thread_state.label = (op, dtype) if op or dtype else None

    def get_label(self) -> tuple[str | None, str | None]:
        """Return the (op, dtype) that `label` has set in this thread, or Nones."""
        return getattr(self._thread_state, "label", None) or (None, None)

    def take_label(self) -> tuple[str | None, str | None]:
        """Return what `get_label` returns, and clear it."""
        found = self.get_label()
        self._thread_state.label = None
        return found

    def group_start(self) -> None:
        """Collect this thread's calls up to the matching `group_end`."""
        if getattr(self._thread_state, "depth", 0) == 0:
            self._thread_state.calls = []
        self._thread_state.depth = getattr(self._thread_state, "depth", 0) + 1

    def group_end(self) -> None:
        """End a group. The outermost end issues its calls."""
        self._thread_state.depth -= 1
        if self._thread_state.depth == 0:
            calls, self._thread_state.calls = self._thread_state.calls, []
            if calls:
                _issue_calls(calls, calls[0].stream)

    def group_cancel(self) -> None:
        """Drop this thread's open group."""
        self._thread_state.depth, self._thread_state.calls = 0, []

    def add_call(self, call: Call) -> None:
        """Put a call into this thread's open group, or issue it where none is open."""
        if getattr(self._thread_state, "depth", 0):
            self._thread_state.calls.append(call)
        else:
            _issue_calls([call], call.stream)

    def queue_create(self) -> _Queue:
        """Create a queue for asynchronous operations."""
        return _Queue(self.library.queue_create())

    def comm_init_rank(self, size: int, unique_id: bytes, rank: int, *, config=None):
        """Raise `InternalError`: `comm.open_multinode` opens communicators over several nodes."""
        raise InternalError("communicators over several machines don't come from an id", op="init", rank=rank)


class Call:
    """An operation of one communicator that can be issued.

    ``body``: the function that runs it; ``p2p_op``: its `P2POp` where it is a send or a receive.
    ``previous_done`` and ``done``: events that put the communicator's calls in order.
    """

    __slots__ = (
        "body", "comm", "done", "flight_number", "label", "nbytes", "op", "p2p_op", "previous_done", "stream", "tag",
    )  # fmt: skip

    def __init__(self, comm, op: str, nbytes: int, body, stream: int, p2p_op=None):
        self.comm = comm
        self.op = op
        self.nbytes = nbytes
        self.body = body
        self.stream = stream
        self.p2p_op = p2p_op
        self.tag = comm.tag
        self.label = comm.library.take_label()
        self.previous_done = self.done = None
        ring = comm.flight_ring
        self.flight_number = 0
        if ring is not None:
            peer = -1 if p2p_op is None else p2p_op.peer
            self.flight_number = ring.add(FLIGHT_OPS.index(op), nbytes, _BYTES, stream, peer, p2p_op is None, self.tag)

    def record_start(self) -> None:
        """Record in the flight recorder that the call has started."""
        if self.flight_number and (ring := self.comm.flight_ring) is not None:
            ring.start(self.flight_number)

    def record_end(self, error: CollectivesError | None = None) -> None:
        """Record in the flight recorder that the call has ended, by an error or None."""
        if self.flight_number and (ring := self.comm.flight_ring) is not None:
            ring.end(self.flight_number, 0 if error is None else error.code or _INTERNAL_ERROR)
            if error is not None:
                ring.on_error(error)


class CallOrder:
    """The order of a communicator's calls.

    They take effect in call order, whatever thread runs them. A signal handler that has interrupted
    a call can't make one or wait for one: the call goes on only when it returns.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._last_done = threading.Event()
        self._last_done.set()
        self._issuing = threading.local()

    def set_issuing(self, now: bool) -> None:
        """Note that this thread issues calls now, or no more."""
        self._issuing.now = now

    def check_handler(self, op: str | None, rank: int) -> None:
        """Raise `InvalidUsage` in a signal handler that has interrupted a call of this thread."""
        if getattr(self._issuing, "now", False):
            raise InvalidUsage(
                "a signal handler that interrupts a call can only abort the communicator or look at its state",
                op=op, rank=rank,
            )  # fmt: skip

    def reserve_turn(self) -> tuple[threading.Event, threading.Event]:
        """Return the events of the end of the previous call and of this one's.

        The caller sets the second one.
        """
        with self._lock:
            previous, self._last_done = self._last_done, threading.Event()
            return previous, self._last_done

    def wait_for_calls(self) -> None:
        """Block until all calls have ended."""
        self._last_done.wait()


def _issue_calls(calls: list[Call], stream: int) -> None:
    """Run calls, or put them into the queue whose handle is ``stream``.

    The sends and receives of one communicator run as one batch.
    """
    batches = []
    p2p_calls: dict[int, list[Call]] = {}  # by communicator
    for call in calls:
        call.comm.check_usable(call.op)
        call.comm.call_order.check_handler(call.op, call.comm.rank)
        if call.p2p_op is None:
            batches.append(call)
        else:
            p2p_calls.setdefault(id(call.comm), []).append(call)
    for some in p2p_calls.values():
        first = some[0]
        if len(some) > 1:
            first.body = partial(first.comm.collectives.send_and_receive, [call.p2p_op for call in some])
            first.nbytes = sum(call.nbytes for call in some)
        batches.append(first)
    batches.sort(key=lambda call: call.comm.uid)  # calls of several communicators in one order on all ranks

    def run() -> None:
        try:
            for call in batches:
                call.previous_done.wait()
                call.comm.run(call)
                call.done.set()
        finally:
            for call in batches:
                call.done.set()

    try:
        for call in batches:
            call.comm.call_order.set_issuing(True)
        for call in batches:
            call.previous_done, call.done = call.comm.call_order.reserve_turn()
        if stream:
            _queues[stream].put(run)
        else:
            run()
    except BaseException:
        for call in batches:
            if call.done is not None:
                call.done.set()
        raise
    finally:
        for call in batches:
            call.comm.call_order.set_issuing(False)


# ---- Queues.

_queues: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # by handle


class _Queue:
    """The engine's queue with Python functions as tasks.

    It keeps the error of a task by its ticket.
    """

    def __init__(self, queue):
        self._queue = queue
        self._lock = threading.Lock()
        self._errors: dict[int, BaseException] = {}
        _queues[queue.handle] = self

    def __getattr__(self, name: str):
        return getattr(self._queue, name)

    def put(self, run: Callable[[], None]) -> None:
        """Queue a function. `wait` and `done` of its ticket raise what it raises."""
        ticket = None

        def work():
            try:
                run()
            except BaseException as error:
                with self._lock:  # so the ticket is known
                    self._errors[ticket] = error

        with self._lock:
            self._queue.call(work)
            ticket = self._queue.record()

    def wait(self, ticket: int, timeout: float | None = None) -> bool:
        """Wait for a task; see `_nccl.Queue.wait`."""
        return self._raise_error_of(ticket, self._queue.wait(ticket, timeout))

    def done(self, ticket: int) -> bool:
        """Return whether a task has ended; see `_nccl.Queue.done`."""
        return self._raise_error_of(ticket, self._queue.done(ticket))

    def _raise_error_of(self, ticket: int, ended: bool) -> bool:
        if ended:
            with self._lock:
                error = self._errors.get(ticket)
            if error is not None:
                raise error
        return ended
