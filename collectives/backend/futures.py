"""Futures of the operations of a process group, whose callbacks may wait for other operations."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.futures import Future

from ..comm.async_queue import fail_future

__all__ = ["OperationFuture"]


class OperationFuture(Future):
    """A future that runs callbacks of Python in a thread of their own.

    The thread that ends operations completes it. A callback may issue another operation and wait for
    it, as torch's ``powerSGD_hook`` does, and in that thread it would wait for itself. Without such
    callbacks it is completed there, which is faster.
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
