"""`Work`, the handle of an asynchronous operation, and `PendingOp`, a submission in flight.

A `PendingOp` is one submission to an `AsyncQueue`. It holds the arrays of its operations until the
engine has finished with them, whether or not the caller keeps the `Work`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ..errors import Aborted, CollectivesError, InvalidArgument, InvalidUsage

__all__ = ["PendingOp", "Work"]


@dataclass(slots=True, eq=False)
class PendingOp:
    """One submission to a queue: its completion mark, the arrays that it uses, and its error.

    `completion`: the native queue's ticket on the host, (event, stream) on CUDA. `capture_id`: the
    CUDA graph capture that the submission is part of, or None; such a submission runs when the
    graph is replayed. `final_error`: for a submission of several steps, whose last step may succeed
    although an earlier one failed: returns the error of the whole submission, or None.
    """

    op: str
    held: tuple
    final_error: Callable[[], CollectivesError | None] | None = None
    completion: Any = None
    capture_id: int | None = None
    ended: bool = False
    error: CollectivesError | None = None
    work_count: int = 0  # Works that refer to this submission
    reported: bool = False  # a caller has received the error

    def end(self, error: CollectivesError | None = None) -> None:
        """Record that the submission has ended, with its error or None; release its arrays."""
        if self.ended:  # by the watchdog's error, which made the operation end
            return
        if self.final_error is not None:
            error = self.final_error() or error
            self.final_error = None
        self.error = error
        self.ended = True
        self.held = ()
        if not self.work_count:
            self.warn_unreported()

    def warn_unreported(self) -> None:
        """Warn of an error that no caller can receive any more.

        A local abort is no reason for a warning.
        """
        if self.error is not None and not self.reported and not isinstance(self.error, Aborted):
            self.reported = True
            warnings.warn(f"{self.op} failed and nobody waited for it: {self.error}", RuntimeWarning, stacklevel=2)


class Work:
    """Handle of an operation that was started with ``async_op=True``.

    The arrays stay alive until the engine has finished with them, even if the Work is dropped.
    """

    __slots__ = ("__weakref__", "_future", "_pending_op", "_queue", "_result", "nbytes", "op")

    def __init__(self, op: str, nbytes: int, result):
        self.op = op
        self.nbytes = nbytes
        self._result = result
        self._queue = None
        self._pending_op: PendingOp | None = None
        self._future = None

    def _attach(self, queue, pending_op: PendingOp) -> None:
        """Bind this Work to the submission that carries its operation."""
        self._queue = queue
        pending_op.work_count += 1
        self._pending_op = pending_op

    def _issued(self) -> PendingOp:
        """Return the submission.

        Raises `InvalidUsage` while the operation's group is not issued.
        """
        if self._pending_op is None:
            raise InvalidUsage(
                "the group that this operation belongs to hasn't been issued: leave its `with` block first "
                "(an exception inside it drops all its operations)",
                op=self.op,
            )
        return self._pending_op

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the operation.

        On the host the call blocks. On CUDA, without a timeout, it makes torch's current stream
        wait for the operation and returns at once, as torch's own Work does; with a timeout it
        blocks.

        For an operation that was captured in a CUDA graph: inside the capture, `wait` orders the
        current stream after the operation. Later there is nothing to wait for, since the stream
        that replays the graph has the order. A timeout, `done` and `exception` raise
        `InvalidUsage`.

        Args:
            timeout: The longest wait, in seconds or as a timedelta. None: no limit.

        Returns:
            True; where the operation has failed, its error is raised.

        Raises:
            CollectiveTimeout: When the time runs out. The operation stays in flight and can be
                waited for again.
        """
        pending_op = self._issued()
        if timeout is None:
            pass
        elif isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        elif isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise InvalidArgument(f"timeout must be in seconds, or None for no limit, not {timeout!r}", op=self.op)
        if not pending_op.ended and not self._queue.wait(pending_op, timeout):
            raise self._queue.timeout_error(self, timeout)
        if pending_op.error is not None:
            pending_op.reported = True
            raise pending_op.error
        return True

    def release(self) -> None:
        """Release the arrays before the end of the operation; a local call, after `wait()`.

        On CUDA: for arrays that were allocated on the stream that has waited, which reuses their
        memory in its own order. Otherwise they are held until the host observes that the operation
        has ended, and a host that runs ahead of the GPU needs the memory of all of them. On the
        host `wait()` has released them.
        """
        self._issued().held = ()

    def done(self) -> bool:
        """Return whether the operation has ended, with or without an error; never blocks."""
        pending_op = self._issued()
        if not pending_op.ended:
            self._queue.poll(pending_op)
        return pending_op.ended

    is_completed = done

    def exception(self) -> CollectivesError | None:
        """Return the error with which the operation ended, or None; never blocks."""
        if not self.done():
            return None
        self._pending_op.reported = True
        return self._pending_op.error

    def result(self):
        """Wait as `wait()` does and return the output array."""
        self.wait()
        return self._result

    def future(self, result=None) -> torch.futures.Future:
        """Return a future of the output array, or of `result` in its place.

        On the host the future's callbacks run in the communicator's queue: they must not wait for
        operations of this communicator. On CUDA the future is complete at once and carries the
        stream's event.

        Args:
            result: The value of the future, on CUDA a torch tensor. None: the output array.
        """
        pending_op = self._issued()
        if self._future is None:
            self._future = self._queue.create_future(pending_op, self._result if result is None else result)
        return self._future

    def __repr__(self):
        pending_op = self._pending_op
        state = (
            "not issued" if pending_op is None
            else "in a CUDA graph" if pending_op.capture_id is not None
            else "in flight" if not pending_op.ended
            else "done" if pending_op.error is None
            else f"failed: {pending_op.error}"
        )  # fmt: skip
        return f"<Work {self.op} of {self.nbytes} bytes, {state}>"

    def __del__(self):
        pending_op = getattr(self, "_pending_op", None)  # torch.compile makes objects without __init__
        if pending_op is not None:
            pending_op.work_count -= 1
            if pending_op.ended and not pending_op.work_count:
                pending_op.warn_unreported()
