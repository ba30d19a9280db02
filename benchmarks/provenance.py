"""Where a figure was taken: what every row of results says of the machine and of the code."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def machine() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # no such file or line on this architecture
        return platform.processor() or platform.machine()


def commit() -> str:
    """Return the short hash of the checkout's commit, with a + if files differ; "unknown" outside a checkout."""
    try:
        words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def where_and_when() -> dict:
    """Return the fields that stand in every row."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    cores = len(os.sched_getaffinity(0))
    return {"time": now, "machine": machine(), "cores": cores, "commit": commit(), "python": platform.python_version()}
