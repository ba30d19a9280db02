"""Log of ``collectives.auto``: the logger "collectives.auto", or stderr where no logging is set
up.
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
