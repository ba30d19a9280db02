"""Rank processes of the bench: starts, watches and ends them together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

__all__ = ["end_with_parent", "run_ranks"]

_GRACE = 2.0  # seconds after a failure, for the others to end by themselves
_PR_SET_PDEATHSIG = 1
_NOT_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def end_with_parent(parent: int) -> None:
    """End this rank when the process that has started it ends; only that one handles Ctrl-C."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_ranks(arguments: list[str], ranks: int, hosts: int) -> int:
    """Run this program on ``ranks`` ranks and return the exit code.

    A rank that fails ends the others; the code is that rank's, or 1 for a signal. Ctrl-C ends all
    ranks; the code is 130. ``hosts``: number of machines that the ranks act on, by
    COLLECTIVES_HOST_ID.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    environment = {
        "OMP_NUM_THREADS": "1",
        **environment,
        "COLLECTIVES_JOB_ID": f"bench-{os.getpid()}-{time.monotonic_ns()}",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-m", "collectives.bench", *arguments, "--started-by", str(os.getpid())]
    running: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        for rank in range(ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if hosts > 1:
                own["COLLECTIVES_HOST_ID"] = str(rank * hosts // ranks)
            running.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL))
        return _watch(running)
    except KeyboardInterrupt:
        print("\ninterrupted: the ranks are ended", file=sys.stderr)
        return 130
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def _raise_exit(number, frame):
    raise SystemExit(128 + number)  # runs `finally`, which ends the ranks


def _watch(running: list[subprocess.Popen]) -> int:
    """Wait, asleep, until all ranks have ended or one has failed; return the exit code."""
    failed, deadline = None, None
    with contextlib.ExitStack() as stack:
        handles = {os.pidfd_open(process.pid): process for process in running}
        for handle in handles:
            stack.callback(os.close, handle)
        while alive := [handle for handle, process in handles.items() if process.poll() is None]:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            wait(alive, remaining)
            if failed is None:
                failed = next((process for process in running if process.poll()), None)
                deadline = failed and time.monotonic() + _GRACE
    for rank, process in enumerate(running):
        if (process.returncode or 0) < 0:
            print(f"rank {rank} was killed by {signal.Signals(-process.returncode).name}", file=sys.stderr)
    return 0 if failed is None else max(failed.returncode, 1)
