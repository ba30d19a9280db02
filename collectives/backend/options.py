"""The options of a process group of this backend: ``pg_options`` of torch's functions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta

from ..comm.config import CommConfig, parse_config
from ..errors import InvalidArgument
from ..torch_compat import c10d_backend

__all__ = ["parse_options", "seconds_of"]

_UNSET = (None, -(2**31))  # what NCCL's configs have in a field that was not set


def seconds_of(timeout) -> float | None:
    """Return torch's timeout in seconds; None for none, which torch writes as 0 or below."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return seconds if seconds is not None and seconds > 0 else None


def parse_options(options, parent: CommConfig | None = None) -> CommConfig:
    """Return the config of a group's communicators, for the ``pg_options`` of its creation.

    `options`: a `CommConfig`, a dict of its fields, ``ProcessGroupNCCL.Options`` or a plain
    ``Backend.Options``; None: `parent`, the config of the group that it is split off. Raises
    `InvalidArgument`, a ValueError, for anything else. Warns of settings of ``ProcessGroupNCCL``
    that have no effect here.
    """
    if isinstance(options, CommConfig | Mapping):
        return parse_config(options)
    if options is not None and not isinstance(options, c10d_backend().Options):
        raise InvalidArgument(
            "pg_options of the backend 'collectives' are a collectives.CommConfig, a dict of its fields, or "
            f"ProcessGroupNCCL.Options, not {type(options).__name__}"
        )
    nccl = getattr(options, "config", None)
    if nccl is None:  # torch's split_group passes the parent's plain options
        return parent or CommConfig()
    if getattr(options, "is_high_priority_stream", False):
        warnings.warn(
            "pg_options: is_high_priority_stream has no effect on the backend 'collectives', which has no stream of "
            "its own for blocking calls",
            stacklevel=3,
        )
    names = CommConfig.__match_args__
    given = {name: getattr(nccl, name, None) for name in names}
    ignored = sorted(
        name for name in dir(nccl)
        if not name.startswith("_") and name not in (*names, "blocking") and getattr(nccl, name) not in _UNSET
        and not callable(getattr(nccl, name))
    )  # fmt: skip
    if ignored:
        warnings.warn(f"pg_options: {', '.join(ignored)} of ProcessGroupNCCL.Options.config: no effect", stacklevel=3)
    return parse_config({name: value for name, value in given.items() if value not in _UNSET})
