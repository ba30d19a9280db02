"""Settings from Horovod's environment variables, which `init` reads once."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from ..errors import InvalidArgument

__all__ = ["Settings", "log_hierarchical_variables", "read_number", "read_settings"]

_LOG = logging.getLogger("collectives.horovod")
_MAX_SECONDS = 1e9  # Python can't wait for more than about nine times this
_MAX_BYTES = 1e15


@dataclass(frozen=True)
class Settings:
    """Settings of a job; times in seconds, sizes in bytes.

    ``fusion_threshold``: largest size of a fused allreduce (HOROVOD_FUSION_THRESHOLD, bytes).
    ``cycle_time``: time that the background thread waits for further operations
    (HOROVOD_CYCLE_TIME, milliseconds). ``stall_check``: age at which an operation that some ranks
    haven't submitted is reported (HOROVOD_STALL_CHECK_TIME_SECONDS; 0 or
    HOROVOD_STALL_CHECK_DISABLE=1: never). ``stall_shutdown``: age at which its controller ends
    (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; 0: never). ``timeline``: file of a trace from `init` on
    (HOROVOD_TIMELINE).
    """

    fusion_threshold: int = 64 << 20
    cycle_time: float = 1e-3
    stall_check: float = 60.0
    stall_shutdown: float = 0.0
    timeline: str | None = None


def read_settings() -> Settings:
    """Read the variables; `InvalidArgument` for one that is no number, below 0 or too large."""
    disabled = _read_flag("HOROVOD_STALL_CHECK_DISABLE")
    return Settings(
        fusion_threshold=int(read_number("HOROVOD_FUSION_THRESHOLD", 64 << 20, _MAX_BYTES)),
        cycle_time=read_number("HOROVOD_CYCLE_TIME", 1.0) * 1e-3,
        stall_check=0.0 if disabled else read_number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown=read_number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        timeline=os.environ.get("HOROVOD_TIMELINE") or None,
    )


def read_number(name: str, default: float, largest: float = _MAX_SECONDS) -> float:
    """Read one variable, ``default`` where it isn't set.

    `InvalidArgument` for what is no number from 0 to ``largest``.
    """
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= largest:
        raise InvalidArgument(f"{name}={text}: it must be a number from 0 to {largest:g}", op="hvd.init")
    return value


def log_hierarchical_variables() -> None:
    """Log one line where HOROVOD_HIERARCHICAL_ALLREDUCE or _ALLGATHER is set: the engines decide."""
    names = [name for name in ("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER") if _read_flag(name)]
    if names:
        _LOG.warning(
            "%s: no effect, since NCCL decides by its topology what goes inside of a node first, and CPUs on several "
            "nodes always reduce and gather inside of each first",
            " and ".join(names),
        )  # fmt: skip


def _read_flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false")
