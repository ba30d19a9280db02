"""Provenance of a figure: the fields of every row that name the node and the code."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["where_and_when"]

_ROOT = Path(__file__).resolve().parents[2]


def where_and_when() -> dict:
    """Return the fields of every row: machine, cores, the machine's load now, commit, python, time."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": _machine(),
        "cores": cores,
        "load": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "python": platform.python_version(),
        "time": now,
    }


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # no such file or line on this architecture
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the short hash of the checkout's commit, with a + where files differ.

    Returns None for an installed package.
    """
    if not (_ROOT / "host" / "api.cpp").exists():  # an installed package, perhaps inside of another project's checkout
        return None
    try:
        words = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
