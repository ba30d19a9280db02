"""GlooStore: the store by which Gloo connects, whose waits end where a rank has ended."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .error_store import ErrorStore

__all__ = ["PREFIX", "GlooStore"]

PREFIX = "gloo/0/"  # Gloo's keys are "0/RANK"
_REMOTE = re.compile(r"(?:remote=|by peer )\[([0-9a-fA-F.:]+)\]:(\d+)")  # in Gloo's errors


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
        self._addresses: dict[int, bytes] = {}  # of ranks, as Gloo has stored them

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._call(lambda: self._store.set(f"gloo/{key}", value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        peer = int(key.rpartition("/")[2])
        value = self._call(lambda: self._store.get(f"gloo/{key}", self._deadline, peer))
        self._addresses[peer] = value
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        for key in keys:
            self.get(key)

    def find_rank(self, text: str) -> int | None:
        """Return the rank whose address an error of Gloo's names; None if it names none that is known."""
        found = _REMOTE.search(text)
        if found is None:
            return None
        family = socket.AF_INET6 if ":" in found[1] else socket.AF_INET
        flow = b"" if family == socket.AF_INET else bytes(4)
        address = flow + socket.inet_pton(family, found[1])  # as in a sockaddr, after the port
        # Gloo prints a port as it is there.
        places = [struct.pack(order, int(found[2])) + address for order in ("<H", ">H")]
        ranks = [rank for rank, value in self._addresses.items() if any(place in value for place in places)]
        return ranks[0] if len(ranks) == 1 else None

    def _call(self, function):
        try:
            return function()
        except BaseException as error:
            self.error = error
            raise
