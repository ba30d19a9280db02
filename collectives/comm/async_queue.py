"""Queue of a communicator's asynchronous operations: the part that both engines share.

`HostQueue` (the host engine's queue and its thread) and `CudaQueue` (a side stream) are its two
implementations.

Operations that are issued while a stream is captured become part of a CUDA graph and run when it is
replayed. Their `PendingOp` has a `capture_id`. Its end is never queried, and its arrays are held
until `Work.release`, or as long as the communicator is open, since torch's graphs do not announce
their end.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from ..errors import CollectivesError, CollectiveTimeout, CudaError
from .work import PendingOp, Work

__all__ = ["AsyncQueue", "fail_future", "fulfil_future"]


class AsyncQueue(ABC):
    """Queue of a communicator's asynchronous operations, which run in submission order.

    A submission is ``begin()``, the calls, ``end()``. The queue is locked between the two, so that
    the completion that `end` records is the submission's own and not that of another thread.
    """

    def __init__(self, comm):
        self._comm = comm
        self._pending: deque[PendingOp] = deque()
        self._held_until_close: list[tuple | PendingOp] = []  # arrays whose last use can't be observed
        self._lock = threading.RLock()
        self._abort_error: CollectivesError | None = None

    # ---- What an engine's queue implements.

    @abstractmethod
    def _open_stream(self, op: str, stream: int | None) -> int:
        """Return the handle of the stream to issue a submission on.

        `stream`: the caller's own on CUDA. Raises the communicator's error where it was closed
        since the caller checked that it is open.
        """

    @abstractmethod
    def _record_end(self) -> tuple:
        """Return (completion, capture id) of what has been issued so far."""

    @abstractmethod
    def wait(self, pending_op: PendingOp, timeout: float | None) -> bool:
        """Wait for a submission as `Work.wait` does; return False when the time ran out."""

    @abstractmethod
    def wait_blocking(self, pending_op: PendingOp, timeout: float | None) -> bool:
        """Block until a submission has ended, at most `timeout` seconds; return whether it has."""

    @abstractmethod
    def poll(self, pending_op: PendingOp) -> None:
        """Update a submission's state without waiting."""

    @abstractmethod
    def timeout_error(self, work: Work, timeout: float) -> CollectiveTimeout:
        """Build the error of a wait that exceeded `timeout` seconds."""

    @abstractmethod
    def create_future(self, pending_op: PendingOp, result) -> torch.futures.Future:
        """Return a future that gets `result` or the submission's error."""

    @abstractmethod
    def record_completion(self, stream: int) -> Callable[[], bool] | None:
        """Record an event after the work that is queued now, for the watchdog.

        Returns a function that returns whether the event has completed, or None where no event can
        be recorded now.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the queue's resources; nothing is in flight."""

    # ---- Submissions.

    def begin(self, op: str, stream: int | None = None) -> int:
        """Begin a submission and return the stream to issue it on.

        `op`: its operation, for errors. `end` or `cancel` must follow.
        """
        self._lock.acquire()
        try:
            return self._open_stream(op, stream)
        except BaseException:
            self._lock.release()
            raise

    def end(self, op: str, held: tuple, works=(), final_error=None) -> PendingOp:
        """End a submission: attach its Works, and hold its arrays until it has ended.

        `final_error`: as in `PendingOp`.
        """
        try:
            pending_op = PendingOp(op, held, final_error)
            for work in works:  # before another thread can observe its end
                work._attach(self, pending_op)
            self._track(pending_op)
            self._remove_ended()
            return pending_op
        finally:
            self._lock.release()

    def cancel(self, op: str, held: tuple) -> None:
        """End a submission that failed.

        Part of it may have been issued, so its arrays are held as well.
        """
        try:
            pending_op = PendingOp(op, held, reported=True)  # the error is being raised
            self._track(pending_op)
        except Exception:
            pass  # the arrays are held; the error that is being raised has the cause
        finally:
            self._lock.release()

    def _track(self, pending_op: PendingOp) -> None:
        """Record the end of what was issued for a submission, and hold its arrays until then."""
        try:
            pending_op.completion, pending_op.capture_id = self._record_end()
        except BaseException as error:  # CUDA's are RuntimeErrors
            self._held_until_close.append(pending_op.held)
            known = isinstance(error, CollectivesError)
            pending_op.end(error if known else CudaError(f"{type(error).__name__}: {error}", op=pending_op.op))
            raise
        if pending_op.capture_id is None:
            self._pending.append(pending_op)
        else:
            self._held_until_close.append(pending_op)

    def _remove_ended(self) -> None:
        pending = self._pending
        while pending:
            pending_op = pending[0]
            if not pending_op.ended:
                self.poll(pending_op)
                if not pending_op.ended:
                    return
            pending.popleft()

    # ---- What is in flight.

    def busy(self) -> bool:
        """Return whether an operation is in flight; never blocks."""
        with self._lock:
            self._remove_ended()
            return bool(self._pending)

    def all_ended(self) -> bool:
        """Return whether every submission was observed to end.

        Changes nothing, so that a finalizer may call it.
        """
        return all(pending_op.ended for pending_op in tuple(self._pending))

    def drain(self, timeout: float | None) -> bool:
        """Block until every submission has ended; return False when the time ran out.

        Errors stay with their submissions.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._remove_ended()
                if not self._pending:
                    return True
                pending_op = self._pending[-1]
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.wait_blocking(pending_op, remaining):
                return False

    def drain_all(self, timeout: float) -> bool:
        """Block until nothing of this rank is in flight on the device.

        Return False when the time ran out.
        """
        return self.drain(timeout)

    # ---- Aborts and forks.

    def set_abort_error(self, error: CollectivesError) -> None:
        """Set the error of what is in flight, since the communicator is about to be aborted.

        Takes no lock.
        """
        self._abort_error = self._abort_error or error

    def abort_with_error(self, error: CollectivesError, abort: Callable[[], None]) -> None:
        """End every submission with an error, by `abort`, after which nothing uses the arrays.

        A thread that hangs inside the engine may hold the lock: `abort` makes it return.
        """
        locked = self._lock.acquire(timeout=1.0)
        try:
            if locked:
                self._remove_ended()
            held = [pending_op.held for pending_op in self._pending]
            for pending_op in tuple(self._pending):
                pending_op.end(error)
            abort()
            del held
        finally:
            if locked:
                self._lock.release()

    def reset_after_fork(self, closed) -> tuple:
        """Drop the parent's submissions in a forked child.

        Return the objects that must not be freed there. `closed`: the communicator's
        `ClosedHandle`, which takes the native queue's place.
        """
        kept = (self._pending, self._held_until_close, self.__dict__.get("_native"))
        self._lock = threading.RLock()
        self._pending, self._held_until_close = deque(), []
        self._native = closed
        return kept


def fulfil_future(future: torch.futures.Future, pending_op: PendingOp, result) -> None:
    """Set a future's result, or the error of a submission that has failed."""
    if pending_op.error is None:
        future.set_result(result)
    else:
        pending_op.reported = True
        fail_future(future, pending_op.error)


class _Failed:
    """Value of a failed future: whoever looks at it gets the error.

    torch's C++ code, such as DDP's reducer, takes the tensors out of a future's Python value by
    pickling it. A future that torch fails stores a value without tensors, and the reducer then reads
    the first one all the same: the process crashes. This one raises the error there, and a CUDA
    future stores it as its own.
    """

    def __init__(self, error: BaseException):
        self.error = error

    def __reduce__(self):
        raise self.error


def fail_future(future: torch.futures.Future, error: BaseException) -> None:
    """End a future with an error, which ``wait``, ``value`` and torch's C++ code raise."""

    def raise_error(value):
        raise error

    future._set_unwrap_func(raise_error)
    future.set_result(_Failed(error))
