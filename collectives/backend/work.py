"""`BackendWork`: torch.distributed's handle of an operation of this backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import Work

from ..errors import InvalidUsage
from ..torch_compat import untraced
from .futures import CollectiveFuture, OperationFuture
from .options import seconds_of

__all__ = ["BackendWork", "completed_work"]

_SHORTEST_S = 1e-3  # of a wait for an operation whose time is up


@untraced
class BackendWork(Work):
    """Handle of an operation that was started with ``async_op=True``.

    `works`: what it consists of, the communicator's Works or posted transfers, all of which end;
    `outputs`: the tensors of `result` and of the future; `finish`: called once, before the first
    wait returns or the future is complete, in any thread: it stores what came into the caller's
    tensors, which may be inference tensors, and so runs in the inference mode of the call; `limit`:
    the operation's own timeout in seconds, from now on; `is_collective`: not a send or a receive.
    """

    def __init__(
        self, works: Sequence, outputs, finish: Callable[[], None] | None = None, limit: float | None = None,
        is_collective: bool = True,
    ):  # fmt: skip
        super().__init__()
        self._works = works
        self._outputs = outputs
        self._finish = finish
        self._deadline = None if limit is None else time.monotonic() + limit
        self._lock = threading.Lock() if finish is not None else None
        self._in_inference = torch.is_inference_mode_enabled()
        self._is_collective = is_collective
        self._future: torch.futures.Future | None = None

    def _store(self) -> None:
        """Store the outputs, once; all works have ended without an error."""
        if self._finish is None:
            return
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                with torch.inference_mode(self._in_inference):
                    finish()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the operation; on CUDA only the current stream waits, unless there is a timeout.

        `timeout`: a timedelta, or seconds; None or 0: the operation's own if it has one, else the
        group's. Raises the operation's error, and `CollectiveTimeout` past the time: the operation
        stays in flight and can be waited for again.
        """
        timeout = seconds_of(timeout)
        if timeout is None and self._deadline is not None:
            timeout = max(self._deadline - time.monotonic(), _SHORTEST_S)
        for work in self._works:
            work.wait(timeout)
        self._store()
        return True

    def synchronize(self) -> None:
        """Make torch's current stream wait for the operation; on the host the same as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make torch's current stream wait for the operation; on the host the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error; never blocks."""
        if not all([work.is_completed() for work in self._works]):
            return False
        if all(work.exception() is None for work in self._works):
            self._store()
        return True

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error with which the operation ended, or None; never blocks."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Wait as `wait` does and return the output tensors."""
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Return a future of the output tensors, which is complete when the operation has ended.

        On CUDA it is complete at once and carries the stream's event.
        """
        if self._future is None:
            self._future = self._create_future()
        return self._future

    def _create_future(self) -> torch.futures.Future:
        if not self._works:
            future = torch.futures.Future()
            future.set_result(self._outputs)
            return future
        if len(self._works) == 1:
            ended = self._works[0].future(self._outputs)
        else:
            ended = torch.futures.collect_all([work.future() for work in self._works])
        if ended.done():  # on CUDA at once: its value carries the stream's event
            return ended if self._finish is None and len(self._works) == 1 else ended.then(self._read_outputs)
        future = CollectiveFuture(self) if self._is_collective else OperationFuture()
        ended.add_done_callback(lambda ended: future.complete(lambda: self._read_outputs(ended)))
        return future

    def _read_outputs(self, ended):
        """Return the outputs, stored, from the future of the works; raises the operation's error."""
        if len(self._works) == 1:
            ended.value()
        else:
            for each in ended.value():
                each.value()
        self._store()
        return self._outputs

    def get_future_result(self) -> torch.futures.Future:
        """Refuse: only NCCL's own process group has results of the kind that it returns."""
        raise InvalidUsage("get_future_result is of torch's own NCCL backend: use exception()")

    def source_rank(self) -> int:
        """Return the rank in the group from which a receive got its message; waits for it."""
        self.wait()
        source = getattr(self._works[0], "source_rank", None) if self._works else None
        if source is None:
            raise InvalidUsage("only a receive has a source rank")
        return source

    _source_rank = source_rank


def completed_work(outputs=()) -> BackendWork:
    """Return the handle of an operation that has ended, or is ordered on the current stream."""
    return BackendWork((), outputs)
