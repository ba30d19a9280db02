"""A finding: what one check of the doctor says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["ERROR", "OK", "WARNING", "Finding", "worst"]

OK, WARNING, ERROR = "ok", "warning", "error"
_ORDER = (OK, WARNING, ERROR)


@dataclass
class Finding:
    """What a check has found.

    ``name``: "cores", or "cores.load" for something wrong that a check of several things found.
    ``status``: "ok"; "warning": it works, but slowly, or not for every program; "error": it doesn't
    work. ``text``: sentences for a person. ``remedy``: the one line to type that fixes it, "" where
    nothing is wrong. ``values``: what was read, for JSON.
    """

    name: str
    status: str
    text: str
    remedy: str = ""
    values: dict = field(default_factory=dict)


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst status of these findings, "ok" for none."""
    return max((each.status for each in findings), key=_ORDER.index, default=OK)
