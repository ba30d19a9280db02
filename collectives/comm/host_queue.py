"""Queue of asynchronous operations on the host engine."""

from __future__ import annotations

import threading
import time

import torch

from ..errors import CollectivesError, CollectiveTimeout
from .async_queue import AsyncQueue, fulfil_future
from .work import PendingOp, Work

__all__ = ["HostQueue"]


class HostQueue(AsyncQueue):
    """A communicator's queue on the host engine, which is created at its first use."""

    def __init__(self, comm):
        super().__init__(comm)
        self._native = None  # the binding's queue
        self._waiters: dict[int, int] = {}  # waits in progress, by thread
        self._closing = False

    def _open_stream(self, op, stream):
        if self._native is None:
            self._comm._check_open(op)  # else this queue would outlive the communicator
            self._native = self._comm.engine.library.queue_create()
        return self._native.handle

    def _record_end(self):
        return self._native.record(), None

    def wait_blocking(self, pending_op: PendingOp, timeout: float | None) -> bool:
        with self._lock:
            if pending_op.ended:
                return True
            native = self._native
            thread = threading.get_ident()
            self._waiters[thread] = self._waiters.get(thread, 0) + 1
        try:
            if not native.wait(pending_op.completion, timeout):
                return False
        except CollectivesError as error:
            self._fail(pending_op, error)
        else:
            pending_op.end()
        finally:
            with self._lock:
                count = self._waiters.pop(thread) - 1
                if count:  # this wait is a signal handler's, which interrupted another one of the same thread
                    self._waiters[thread] = count
                self._remove_ended()
                close_now = self._closing and not self._waiters
            if close_now:
                self.close()
        return True

    wait = wait_blocking

    def poll(self, pending_op: PendingOp) -> None:
        try:
            if self._native.done(pending_op.completion):
                pending_op.end()
        except CollectivesError as error:
            self._fail(pending_op, error)

    def _fail(self, pending_op: PendingOp, error: CollectivesError) -> None:
        pending_op.end(error)
        if self._comm._flight is not None:
            self._comm._flight.record_error(error)

    def timeout_error(self, work: Work, timeout: float) -> CollectiveTimeout:
        """Build the error of a wait that timed out, from the operation in progress."""
        comm = self._comm
        info = comm._pending_info()
        text = f"not done after {timeout} s ({work.nbytes} bytes); it stays in flight and can be waited for again"
        if info is None:
            return CollectiveTimeout(
                f"{text}. Nothing is in progress on the communicator: a callback or another communicator's operation "
                "holds up the queue",
                op=work.op, rank=comm.rank, nbytes=work.nbytes,
            )  # fmt: skip
        missing = ", ".join(map(str, info.peers)) or "none"
        return CollectiveTimeout(
            f"{text}. In progress: {info.op} number {info.seq} of {info.nbytes} bytes; ranks that have not arrived: "
            f"{missing}",
            op=work.op, rank=comm.rank, peers=info.peers, seq=info.seq, nbytes=work.nbytes,
        )  # fmt: skip

    def create_future(self, pending_op: PendingOp, result) -> torch.futures.Future:
        """Return a future that the queue's thread fulfils."""
        future = torch.futures.Future()

        def fulfil():
            if not pending_op.ended:
                self.poll(pending_op)
            fulfil_future(future, pending_op, result)

        with self._lock:
            if not pending_op.ended:
                self.poll(pending_op)
            if not pending_op.ended:
                self._native.call(fulfil)
                return future
        fulfil()
        return future

    def record_completion(self, stream: int):
        """Return a function that returns whether all that is queued now has ended."""
        with self._lock:
            native = self._native
            if native is None:
                return lambda: True
            ticket = native.record()
        return lambda: native.done(ticket)

    def close(self) -> None:
        """End the queue's thread after the operations that are queued; call `drain` first."""
        while True:
            with self._lock:
                self._closing = True
                if threading.get_ident() in self._waiters:
                    return  # in a signal handler that interrupted a wait: that wait closes the queue when it returns
                if not self._waiters:
                    native, self._native = self._native, None
                    break
            time.sleep(1e-4)  # all operations have ended: other threads are about to return from their waits
        if native is not None:
            native.close()
        self._held_until_close.clear()
