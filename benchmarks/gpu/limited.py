"""Command under a time limit, past which it and all that it has started are killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "adopt_orphans", "run_limited"]

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 10.0  # a process in an uninterruptible call of the driver may outlive SIGKILL for a while
POLL_SECONDS = 0.05


class Ended(NamedTuple):
    """How a command ended: its exit status (negative: the signal), seconds, and whether its time
    was over.
    """

    status: int
    seconds: float
    timed_out: bool
    left: tuple[int, ...]  # processes that could not be ended


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends, so that `run_limited` finds
    those, too.
    """
    return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _processes() -> dict[int, list[tuple[int, str]]]:
    """Return the children of every process, each with its state."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path("/proc", name, "stat").read_text()
            except OSError:  # it has ended meanwhile
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            found.setdefault(int(parent), []).append((int(name), state))
    return found


def _children() -> set[int]:
    return {pid for pid, _ in _processes().get(os.getpid(), [])}


def _descendants(before: set[int]) -> dict[int, str]:
    """Return all descendants of this process and their states, without those under earlier
    children.
    """
    children, found = _processes(), {}
    waiting = [each for each in children.get(os.getpid(), []) if each[0] not in before]
    while waiting:
        pid, state = waiting.pop()
        found[pid] = state
        waiting += children.get(pid, [])
    return found


def _end_all(process: subprocess.Popen, before: set[int]) -> tuple[int, ...]:
    """Kill and reap all that a command has started and left; return what is still there."""
    limit = time.monotonic() + KILL_SECONDS
    while True:
        process.poll()  # reaps it, if it has ended
        living = []
        for pid, state in _descendants(before).items():
            if state != "Z":
                living.append(pid)
                _kill(pid)
            elif pid != process.pid:
                _reap(pid)
        if not living or time.monotonic() > limit:
            return tuple(sorted(living))
        time.sleep(POLL_SECONDS)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _reap(pid: int) -> None:
    """Wait for an adopted child: nobody else does.

    One that another process is the parent of is left to that.
    """
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def run_limited(command: list[str], seconds: float, log: Path, environment: dict[str, str], cwd: Path) -> Ended:
    """Run a command with its output in a file; past `seconds` it and all that it has started are
    killed.

    Processes that it leaves behind are ended, too. `adopt_orphans` must have been called.
    """
    before = _children()
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        timed_out = False
        try:
            process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            left = _end_all(process, before)
    status = process.poll()
    return Ended(-signal.SIGKILL if status is None else status, time.monotonic() - start, timed_out, left)
