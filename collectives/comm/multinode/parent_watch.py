"""ParentWatch: notices, by the parent's connections, that a rank ends while a child is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ...errors import RemoteError
from .error_store import ErrorStore
from .gloo import WATCH_TAG, ConnectionWatch, GlooConnections, TransferError, wait

__all__ = ["ParentWatch"]

_SEND_S = 5.0  # a byte to a rank whose process is stopped


class ParentWatch:
    """Each rank of a split waits for a byte from the next one, which that sends once it is done.

    A connection that is lost instead says that the next rank's process has ended, or that it has
    given up. ``ranks``: the parent's numbers of the child's ranks; ``rank``: this one's place.
    Gloo's own waits while a child is opened don't notice a rank that ends before it has connected.
    """

    def __init__(self, connections: GlooConnections, ranks: Sequence[int], rank: int):
        self._connections = connections
        self._next, self._before = (rank + 1) % len(ranks), ranks[rank - 1]
        self._watch = ConnectionWatch(connections, ranks[self._next], WATCH_TAG)
        self._sent = torch.ones(1, dtype=torch.uint8)

    def check(self, store: ErrorStore) -> None:
        """Raise the cause, or `RemoteError` with the child's number, where the next rank's connection is lost.

        ``store``: of the child, where a rank that gives up posts why.
        """
        lost = self._watch.lost
        if lost is None:
            return
        error = store.fetch_error()
        if error is None:
            text = f"rank {self._next} died or left: its connection was lost ({lost})"
            error = RemoteError(text, op="init", rank=store.rank, peers=(self._next,), detail=str(lost))
            store.post_error(error)
        raise error

    def finish(self) -> None:
        """End the watch: this rank is done. A rank that ends later is noticed by the child."""
        with contextlib.suppress(TransferError):  # it has ended, which the child notices
            wait(self._connections.start_transfer(True, self._before, self._sent.data_ptr(), 1, WATCH_TAG), _SEND_S)
