"""Rank processes of the bench: starts, watches and ends them together."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

__all__ = ["become_rank", "core_of", "run_ranks"]

_GRACE = 2.0  # seconds after a failure, for the others to end by themselves
_PR_SET_PDEATHSIG = 1
_NOT_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def become_rank(parent: int) -> None:
    """Make this process a rank: it ends with its parent, ignores Ctrl-C, and prints its stacks on
    SIGUSR1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)


def core_of(index: int) -> int:
    """Return a processor for the ``index``-th rank: a core of its own while there are any, then
    second hyper-threads.
    """
    allowed = sorted(os.sched_getaffinity(0))
    cores = sorted(allowed, key=lambda cpu: (_thread_of_core(cpu, allowed), cpu))
    return cores[index % len(cores)]


def _thread_of_core(cpu: int, allowed: list[int]) -> int:
    """Return the index of a processor among its core's allowed hyper-threads."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            text = file.read()
    except OSError:  # no sysfs in this container
        return 0
    bounds = [[int(number) for number in part.split("-")] for part in text.strip().split(",")]
    siblings = [number for low, *high in bounds for number in range(low, (high or [low])[0] + 1)]
    return [number for number in siblings if number in allowed].index(cpu)


def run_ranks(arguments: list[str], ranks: int, timeout: float, hosts: int = 1) -> int:
    """Run this program on ``ranks`` ranks and return the exit code.

    ``timeout``: seconds, after which all ranks are killed and the code is 4. A rank that fails ends
    the others; the code is that rank's, or 1. Ctrl-C ends all ranks; the code is 130. ``hosts``:
    number of nodes that the ranks simulate.
    """
    job = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    environment = {
        "OMP_NUM_THREADS": "1",
        **environment,
        "COLLECTIVES_JOB_ID": job,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-m", "collectives.bench", *arguments, "--started-by", str(os.getpid())]
    running: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, _raise_exit)
    with contextlib.ExitStack() as stack:
        try:
            for rank in range(ranks):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                if hosts > 1:
                    own["COLLECTIVES_HOST_ID"] = str(rank * hosts // ranks)
                running.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL))
            handles = {os.pidfd_open(process.pid): process for process in running}
            for handle in handles:
                stack.callback(os.close, handle)
            return _watch(running, handles, timeout)
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


def _watch(running: list[subprocess.Popen], handles: dict[int, subprocess.Popen], timeout: float) -> int:
    """Wait, asleep, until all ranks have ended or one has failed; return the exit code."""
    deadline = time.monotonic() + timeout
    failed = None
    while alive := [handle for handle, process in handles.items() if process.poll() is None]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        wait(alive, remaining)
        if failed is None:
            failed = next((p for p in running if p.poll()), None)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failed is None and alive:
        print(f"not done after --timeout {timeout:g} s; where the ranks are:", file=sys.stderr, flush=True)
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.3)
        return 4
    code = 0
    for rank, process in enumerate(running):
        if (process.returncode or 0) < 0:
            print(f"rank {rank} was killed by {signal.Signals(-process.returncode).name}", file=sys.stderr)
    if failed is not None:
        code = failed.returncode if failed.returncode > 0 else 1
    return code
