"""Horovod's exception classes, which programs catch by these names."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """An operation failed; ``__cause__`` is the `CollectivesError`, where there is one.

    `elastic.run` catches it.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The set of workers has changed.

    ``skip_sync``: hosts were only removed, so the state needs no sync.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__("the set of workers has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Kept for programs that name it: nothing is compiled for one version here, so it is never
    raised.
    """
