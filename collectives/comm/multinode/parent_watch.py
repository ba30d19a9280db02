"""ParentWatch: notices, by the parent's connections, that a rank ends while a child is opened."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import RemoteError
from .connections import NodeConnections
from .error_store import ErrorStore

__all__ = ["ParentWatch"]


class ParentWatch:
    """A rank of a child that has closed its connection to the parent, and has not opened the child.

    Its process has ended then, or it has given up. ``connections``, ``store``: the parent's;
    ``uid``: the child's name; ``ranks``: the parent's numbers of the child's ranks; ``rank``: this
    one's place.
    """

    def __init__(self, connections: NodeConnections, store: ErrorStore, uid: str, ranks: Sequence[int], rank: int):
        self._connections, self._store, self._ranks, self._rank = connections, store, ranks, rank
        self._keys = [f"opened/{uid}/{place}" for place in range(len(ranks))]

    def check(self, store: ErrorStore) -> None:
        """Raise the cause, or `RemoteError` with the child's number, where a rank's connection is lost.

        ``store``: of the child, where a rank that gives up posts why.
        """
        others = [place for place in range(len(self._ranks)) if place != self._rank]
        lost = [place for place in others if self._connections.is_lost(self._ranks[place])]
        if not lost:
            return
        here = f"listens/{self._ranks[self._rank]}"  # set when the parent was opened: missing with a store that is gone
        missing = self._store.find_missing([*(self._keys[place] for place in lost), here])
        lost = [lost[at] for at in missing if at < len(lost)]
        if not lost or len(lost) < len(missing):
            return
        error = store.fetch_error()
        if error is None:
            text = f"rank {lost[0]} died or left: its connection was lost"
            error = RemoteError(text, op="init", rank=store.rank, peers=(lost[0],), detail="its connection was lost")
            store.post_error(error)
        raise error

    def finish(self) -> None:
        """End the watch: this rank is done. A rank that ends later is noticed by the child."""
        key = self._keys[self._rank]
        self._store.set(key, b"1")
        self._store.find_missing([key])  # `set` does not wait for the server
