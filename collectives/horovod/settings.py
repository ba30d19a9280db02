"""What Horovod's environment variables set, read once by `init`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import InvalidArgument

__all__ = ["Settings", "number_of", "read_settings"]

_LONGEST = 1e9  # seconds; more than about nine times this is no time to wait
_MOST_BYTES = 1e15


@dataclass(frozen=True)
class Settings:
    """Times in seconds, sizes in bytes.

    ``fusion_threshold``: what one fused allreduce doesn't pass (HOROVOD_FUSION_THRESHOLD, bytes); ``cycle_time``: how
    long the background thread waits for more (HOROVOD_CYCLE_TIME, milliseconds); ``stall_check``: after which an
    operation that some ranks haven't submitted is reported (HOROVOD_STALL_CHECK_TIME_SECONDS; 0 or
    HOROVOD_STALL_CHECK_DISABLE=1: never); ``stall_shutdown``: after which all ends
    (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; 0: never); ``timeline``: file of a trace from `init` on (HOROVOD_TIMELINE).
    """

    fusion_threshold: int = 64 << 20
    cycle_time: float = 1e-3
    stall_check: float = 60.0
    stall_shutdown: float = 0.0
    timeline: str | None = None


def read_settings() -> Settings:
    """Read the variables; `InvalidArgument` for one that is no number, below 0 or beyond all measure."""
    disabled = _flag("HOROVOD_STALL_CHECK_DISABLE")
    return Settings(
        fusion_threshold=int(number_of("HOROVOD_FUSION_THRESHOLD", 64 << 20, _MOST_BYTES)),
        cycle_time=number_of("HOROVOD_CYCLE_TIME", 1.0) * 1e-3,
        stall_check=0.0 if disabled else number_of("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
        stall_shutdown=number_of("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        timeline=os.environ.get("HOROVOD_TIMELINE") or None,
    )


def number_of(name: str, default: float, most: float = _LONGEST) -> float:
    """Read one variable, ``default`` where it isn't set; `InvalidArgument` for what is no number from 0 to ``most``."""
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidArgument(f"{name}={text}: it must be a number from 0 to {most:g}", op="hvd.init")
    return value


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false")
