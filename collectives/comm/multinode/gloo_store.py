"""GlooStore: the store by which Gloo connects, whose waits end where a rank has ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .error_store import ErrorStore

__all__ = ["PREFIX", "GlooStore"]

PREFIX = "gloo/0/"  # Gloo's keys are "0/RANK"


class GlooStore(dist.Store):
    """A part of an `ErrorStore` as Gloo uses it, once, while it connects.

    A wait ends at ``deadline``, or early by what `ErrorStore.get` raises. Gloo would wait inside of
    torch's client, whose lock then keeps out every look for the cause. ``error``: what a call has
    raised; Gloo may raise another error instead.
    """

    def __init__(self, error_store: ErrorStore, deadline: float):
        super().__init__()
        self._store, self._deadline = error_store, deadline
        self.error: BaseException | None = None

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._call(lambda: self._store.set(f"gloo/{key}", value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._call(lambda: self._store.get(f"gloo/{key}", self._deadline, int(key.rpartition("/")[2])))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self.get(key)

    def _call(self, function):
        try:
            return function()
        except BaseException as error:
            self.error = error
            raise
