"""Futures of the operations of a process group, whose callbacks may issue other operations."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.futures import Future

from ..comm.async_queue import fail_future
from ..torch_compat import untraced

__all__ = ["CollectiveFuture", "OperationFuture"]


class OperationFuture(Future):
    """A future that runs callbacks of Python in a thread of their own.

    The thread that ends operations completes it. A callback may issue another operation and wait for
    it, and in that thread it would wait for itself. Without such callbacks it is completed there,
    which is faster.
    """

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._has_callbacks = False

    def then(self, callback):
        """As torch's: return the future of ``callback(self)``, called when this one is complete."""
        with self._lock:
            self._has_callbacks = True
            if not self.done():
                return super().then(callback)
        return super().then(callback)

    def add_done_callback(self, callback) -> None:
        """As torch's: call ``callback(self)`` when this one is complete."""
        with self._lock:
            self._has_callbacks = True
            if not self.done():
                return super().add_done_callback(callback)
        return super().add_done_callback(callback)

    def complete(self, value: Callable) -> None:
        """Complete it with what a function returns, or with the error that it raises."""
        with self._lock:
            if not self._has_callbacks:
                self._set(value)
                return
        name = "collectives-future-callbacks"
        threading.Thread(target=self._set, args=(value,), name=name, daemon=True).start()

    def _set(self, value: Callable) -> None:
        try:
            result = value()
        except Exception as error:
            fail_future(self, error)
        else:
            self.set_result(result)


@untraced
class CollectiveFuture(OperationFuture):
    """The future of a collective: callbacks run where they are registered, once the collective has ended.

    `then` and `add_done_callback` wait for that. A callback may issue collectives, as torch's
    ``powerSGD_hook`` does, and all ranks must issue the collectives of a group in one order: that of
    the program, since the callback runs at the same place of it on each rank. In a thread of its own
    it would run at another moment on each. Callbacks that torch registers in C++, as
    ``torch.futures.collect_all`` does, run when the collective ends and must not issue any.
    `work`: the collective's Work, which is held until the collective has ended.
    """

    def __init__(self, work):
        super().__init__()
        self._work = work

    def _set(self, value) -> None:
        super()._set(value)
        self._work = None  # they refer to each other, and would keep the tensors until a garbage collection

    def then(self, callback):
        """As torch's: return the future of ``callback(self)``. Blocks until the collective has ended."""
        self._wait_for_end()
        return super().then(callback)

    def add_done_callback(self, callback) -> None:
        """As torch's: call ``callback(self)``. Blocks until the collective has ended."""
        self._wait_for_end()
        super().add_done_callback(callback)

    def _wait_for_end(self) -> None:
        work = self._work
        if work is None:
            return
        try:
            work.wait()
            self.wait()
        except Exception:
            if not work.is_completed():
                raise  # past the collective's own time limit, or in the thread that ends operations
            # Else the callback gets the future with its error.
