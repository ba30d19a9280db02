"""Horovod's exception classes, which programs catch by these names."""

from __future__ import annotations

from ..elastic import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """An operation failed; ``__cause__`` is the `CollectivesError`, where there is one.

    `elastic.run` catches it.
    """


class HorovodVersionMismatchError(ImportError):
    """Kept for programs that name it: nothing is compiled for one version here, so it is never
    raised.
    """
