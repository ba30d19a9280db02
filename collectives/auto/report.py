"""The log of ``collectives.auto``: logger "collectives.auto"; on stderr where the program has set
up no logging.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["log_line"]

_log = logging.getLogger("collectives.auto")


def log_line(level: int, text: str) -> None:
    """Log a line with the program's handlers; write it to stderr where the program has none."""
    if _log.hasHandlers():
        _log.log(level, text)
    elif level >= (_log.level or logging.INFO):
        print(f"collectives.auto: {text}", file=sys.stderr, flush=True)
