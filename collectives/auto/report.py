"""The log of ``collectives.auto``: logger "collectives.auto"; on stderr where the program has set up no logging."""

from __future__ import annotations

import logging
import sys

__all__ = ["say"]

_log = logging.getLogger("collectives.auto")


def say(level: int, text: str) -> None:
    """Log a line. A program with handlers decides what it sees of it; without any it is written to stderr."""
    if _log.hasHandlers():
        _log.log(level, text)
    elif level >= (_log.level or logging.INFO):
        print(f"collectives.auto: {text}", file=sys.stderr, flush=True)
