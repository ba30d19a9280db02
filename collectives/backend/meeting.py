"""Where two ranks of a process group meet, before they open the communicator of a channel."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ..comm.liveness import RankExits
from ..comm.waiting import format_ranks
from ..errors import Aborted, RemoteError

__all__ = ["Meeting"]

_PAUSE_S = (0.001, 0.05)  # first and longest
_GRACE_S = 1.0
_LOOK_S = 0.5  # between looks whether the other rank's process has ended


class _Exits:
    """How some ranks of a group have ended, as `RankExits`; at the group's end none of them comes any more."""

    def __init__(self, exits: RankExits, ranks: Sequence[int], is_over: threading.Event):
        self._exits, self._ranks, self._is_over = exits, ranks, is_over
        self._until = None  # when a rank that has come to the meeting would have come here, too

    def reason(self, rank: int) -> str:
        if self._is_over.is_set():
            self._until = self._until or time.monotonic() + _GRACE_S
            if time.monotonic() >= self._until:
                return "the process group was destroyed"
        return self._exits.reason(self._ranks[rank])

    def reasons_without_store(self) -> dict[int, str]:
        found = self._exits.reasons_without_store()
        return {number: found[rank] for number, rank in enumerate(self._ranks) if rank in found}


class Meeting:
    """The ranks of a process group that have come to open channels.

    `store`: the group's, with a prefix of this life of the group; `exits`: how its ranks have
    ended. A wait has no time limit: a receive may be begun long before its send.
    """

    def __init__(self, store, rank: int, exits: RankExits):
        self._store, self._rank, self._exits = store, rank, exits
        self._is_over = threading.Event()

    def has_come(self, rank: int, name: str) -> bool:
        """Return whether a rank has come to open the channel of a name."""
        return self._store.check([f"come/{name}/{rank}"])

    def wait(self, peer: int, name: str) -> None:
        """Come to open a channel, and block until the other rank has come too.

        Raises `RemoteError` where that rank's process has ended, `Aborted` at the group's end.
        """
        self._store.set(f"come/{name}/{self._rank}", "")
        pause, look_at = _PAUSE_S[0], time.monotonic() + _LOOK_S
        while not self.has_come(peer, name):
            if self._is_over.wait(pause):
                raise Aborted("the process group was destroyed", rank=self._rank)
            pause = min(2 * pause, _PAUSE_S[1])
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_S
                if (error := self.find_ended([peer])) is not None:
                    raise error

    def exits_of(self, ranks: Sequence[int]) -> _Exits:
        """Return how ranks have ended, for the wait for them once they have come here."""
        return _Exits(self._exits, ranks, self._is_over)

    def find_ended(self, peers: list[int]) -> RemoteError | None:
        """Return the error of a wait for ranks whose processes have all ended, else None."""
        found = []
        for peer in peers:
            how = self._exits.reason(peer)
            if not how:
                return None
            found.append(f"rank {peer}: {how}")
        text = f"{format_ranks(peers)} will not come: {'; '.join(found[:8])}"
        return RemoteError(text, rank=self._rank, peers=peers)

    def end(self) -> None:
        """End all waits."""
        self._is_over.set()
