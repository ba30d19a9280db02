"""Interrupts of an elastic training."""

from __future__ import annotations

__all__ = ["HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """The set of workers has changed, or is about to: raised by a commit, caught by `run`.

    Args:
        skip_sync: Hosts were only removed, so the state needs no sync.
        joins: Ranks wait to join.
    """

    def __init__(self, skip_sync: bool = False, joins: bool = False):
        super().__init__("the set of workers has changed")
        self.skip_sync = skip_sync
        self.joins = joins
