"""Queue of asynchronous operations on CUDA: a side stream with events."""

from __future__ import annotations

import contextlib
import time

import torch

from .._nccl import check
from ..cuda_state import capture_id, current_stream, has_completed, is_capturing, new_comm_stream, stream_from_address
from ..errors import CollectivesError, CollectiveTimeout, CudaError, InvalidUsage
from .async_queue import AsyncQueue, fulfil_future
from .work import PendingOp, Work

__all__ = ["CudaQueue"]


class CudaQueue(AsyncQueue):
    """A communicator's side stream on CUDA.

    It is there before the first operation: torch creates its streams under the GIL, and CUDA can
    block that while a collective waits on the GPU for a rank that has died. The watchdog, which
    would abort the collective, needs the GIL.
    """

    def __init__(self, comm):
        super().__init__(comm)
        self._side_stream = new_comm_stream(comm.device)
        self.external_streams: set[int] = set()  # that others created, and may have destroyed
        self._stream = None  # of the submission that is open: the side stream, or the caller's

    def _open_stream(self, op, stream):
        device, side_stream = self._comm.device, self._side_stream
        if side_stream is None:  # `close` frees it after the communicator has been marked as closed
            self._comm._check_open(op)
        if stream is not None:
            self._stream = stream_from_address(stream, device)
            return stream
        self._stream = side_stream
        self._stream.wait_stream(current_stream(device))
        return self._stream.cuda_stream

    def _record_end(self):
        return (self._stream.record_event(), self._stream), capture_id(self._stream)

    def set_abort_error(self, error: CollectivesError) -> None:
        """Set the error that operations in flight get when they have left the GPU.

        Operations that have ended by now have succeeded, and are recorded first.
        """
        for pending_op in tuple(self._pending):
            if not pending_op.ended:
                self.poll(pending_op)
        super().set_abort_error(error)

    def wait(self, pending_op: PendingOp, timeout: float | None) -> bool:
        """Make torch's current stream wait for a submission; with a timeout, block."""
        if timeout is not None:
            return self.wait_blocking(pending_op, timeout)
        with self._comm._device_guard():
            capture = capture_id(None)
            if pending_op.capture_id is None and capture is not None:
                self._query(pending_op)  # a capture needs no order after an operation that has ended
                if not pending_op.ended:
                    raise InvalidUsage(
                        "wait() inside of a CUDA graph's capture for an operation that was started before it: wait for "
                        "it before the capture",
                        op=pending_op.op, rank=self._comm.rank,
                    )  # fmt: skip
            elif self._abort_error is not None:
                pending_op.reported = True
                raise self._abort_error
            else:
                event, stream = pending_op.completion
                captured = pending_op.capture_id
                if captured == capture or (stream is not None and captured == capture_id(stream)):
                    torch.cuda.current_stream().wait_event(event)  # and joins the capture that goes on, if there is one
        return True

    def wait_blocking(self, pending_op: PendingOp, timeout: float | None) -> bool:
        self._refuse_captured(pending_op)
        with self._comm._device_guard():
            if is_capturing(None):
                raise InvalidUsage(
                    "the host would wait for a GPU while a CUDA graph is captured, in which nothing runs yet",
                    op=pending_op.op, rank=self._comm.rank,
                )  # fmt: skip
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 10e-6
        while True:
            self.poll(pending_op)
            if pending_op.ended:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    def poll(self, pending_op: PendingOp) -> None:
        """Update a submission's state without waiting; inside a capture no event is queried."""
        self._refuse_captured(pending_op)
        with self._comm._device_guard():
            if not is_capturing(None):
                self._query(pending_op)

    def _refuse_captured(self, pending_op: PendingOp) -> None:
        if pending_op.capture_id is not None:
            raise InvalidUsage(
                "the operation was captured in a CUDA graph, so it runs when the graph is replayed, and nobody can say "
                "whether it has ended: wait() without a timeout orders the stream inside of the capture; after a "
                "replay, synchronize the stream that replays it",
                op=pending_op.op, rank=self._comm.rank,
            )  # fmt: skip

    def _query(self, pending_op: PendingOp) -> None:
        event, _ = pending_op.completion
        comm = self._comm
        try:
            ended = has_completed(event)
        except RuntimeError as error:
            pending_op.end(CudaError(str(error), op=pending_op.op, rank=comm.rank))
            return
        if ended:
            pending_op.end(self._abort_error)
        if ended or self._abort_error is not None:  # its kernels may use the arrays until they have ended
            return
        try:
            code = comm._native.async_error()
            if code not in (0, 7):  # 7: ncclInProgress
                check(code, comm.engine.library, comm._native)
        except CollectivesError as error:
            self._held_until_close.append(pending_op.held)  # its kernels run on until the communicator is aborted
            pending_op.end(error)

    def timeout_error(self, work: Work, timeout: float) -> CollectiveTimeout:
        """Build the error of a wait that timed out.

        NCCL does not report which ranks are missing.
        """
        return CollectiveTimeout(
            f"not done after {timeout} s ({work.nbytes} bytes); it stays in flight and can be waited for again. NCCL "
            "does not tell which ranks have not arrived: NCCL_DEBUG=INFO shows what each one did",
            op=work.op, rank=self._comm.rank, nbytes=work.nbytes,
        )  # fmt: skip

    def create_future(self, pending_op: PendingOp, result) -> torch.futures.Future:
        """Return a future that is complete and carries the stream's event."""
        _, stream = pending_op.completion
        future = torch.futures.Future(devices=[self._comm.device])
        # The future records its own event on the current stream. Without the guard, leaving the
        # `stream` block would open a CUDA context on the device that was current before.
        with self._comm._device_guard(), torch.cuda.stream(stream):
            fulfil_future(future, pending_op, result)
        return future

    def drain_all(self, timeout: float) -> bool:
        """Block until torch's current stream is idle, too; return False when the time ran out."""
        with self._lock, self._comm._device_guard():
            if is_capturing(None):
                return False
            pending_op = PendingOp("exit", (), reported=True)  # no caller waits for it
            with contextlib.suppress(RuntimeError):  # an error that CUDA keeps: nothing runs any more
                pending_op.completion = (torch.cuda.current_stream().record_event(), None)
                self._pending.append(pending_op)
        return self.drain(timeout)

    def record_completion(self, stream: int):
        """Record an event on a stream, and return a function that returns whether it has completed.

        For the watchdog. Returns None where an event can't be recorded now: the stream is being
        captured, or it is an external stream, which its owner may have destroyed.
        """
        comm = self._comm
        if stream in self.external_streams:
            return None
        with comm._device_guard():
            recorded = stream_from_address(stream, comm.device)
            if is_capturing(recorded):
                return None
            event = torch.cuda.Event()
            event.record(recorded)
            if is_capturing(recorded):  # since just now: the event may be part of it, and must not be queried
                return None

        def completed() -> bool:
            with comm._device_guard():
                try:
                    return has_completed(event)
                except RuntimeError as error:
                    if "captur" in str(error).lower():  # a capture has begun and ended just then
                        return True
                    raise CudaError(f"{error}", op="watchdog", rank=comm.rank) from error

        return completed

    def close(self) -> None:
        """Release the side stream, and the arrays that CUDA graphs were captured with."""
        with self._lock:  # no other thread is between `begin` and `end`
            self._side_stream = self._stream = None
            self._held_until_close.clear()
