"""Trials in which a rank lacks something: file descriptors, or memory.

What must hold: no rank hangs. Each rank ends with success, or with an error that says what is missing, or that names
the rank that lacks it. Then what it lacked is there again, and the ranks open a communicator, whose sums are right.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.faults.trials import SOON, on_machines, open_comm, run_on_ranks, wrong_sum

__all__ = ["make_plan", "run_plan", "run_trial"]

KINDS = ("descriptors", "memory")
LIMIT = 90.0  # of a trial
TIMEOUT, INIT_TIMEOUT = 1.5, 5.0  # of the communicator
# What an error of the rank that lacks something says.
SAYS = {
    "descriptors": r"descriptor|Too many open files|EMFILE|No file descriptors|Errno 24",
    "memory": r"memory|allocat|new thread|mmap|map",
}


def make_plan(seed: int) -> SimpleNamespace:
    """Return the plan of a seed. amount: free descriptors, or KiB of address space beside what is used."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    ranks = draw.choice([2, 2, 3, 4])
    machines = "".join(sorted("ab"[each % 2] for each in range(ranks))) if draw.random() < 0.3 else ""
    victims = tuple(sorted(draw.sample(range(ranks), draw.choice([1, 1, 1, ranks]))))
    if kind == "descriptors":
        action, amount = draw.choice(["init", "split", "empty"]), draw.randint(0, 24)
    else:
        amount = draw.choice([64, 256, 1024, 4096, 16_384, 65_536, 262_144]) * (0.5 + draw.random())
        action = draw.choice(["init", "split", "empty", "all_reduce"])
    return SimpleNamespace(
        seed=seed, kind=kind, ranks=ranks, machines=machines, victims=victims, action=action, amount=amount
    )


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and each rank's outcome."""
    return run_plan(make_plan(seed))


def run_plan(plan: SimpleNamespace) -> dict:
    row, results = run_on_ranks(take_part, plan, timeout=LIMIT, fresh=True)
    row["outcomes"] = [found["error"] or "success" for found in results]
    row["seconds"] = max((found["seconds"] for found in results), default=None)
    return row


def check(plan: SimpleNamespace, error: Exception, seconds: float) -> list[str]:
    """Return what is wrong with a rank's error."""
    from collectives.errors import CollectivesError

    wrong, peers = [], getattr(error, "peers", ())
    what = f"{type(error).__name__} {peers}: {str(error)[:1500]}"
    if not isinstance(error, CollectivesError):
        wrong.append(f"no error of ours: {what}")
    if not re.search(SAYS[plan.kind], str(error)) and not set(peers) & set(plan.victims):
        wrong.append(f"says neither what is missing nor on which rank: {what}")
    limit = INIT_TIMEOUT + 2 if plan.action in ("init", "split") else TIMEOUT
    if seconds > limit + SOON:
        wrong.append(f"came after {seconds:.1f} s: {what}")
    return wrong


@contextlib.contextmanager
def lacking(plan: SimpleNamespace):
    """Take descriptors or memory from this process."""
    if plan.kind == "descriptors":
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        what, amount = resource.RLIMIT_NOFILE, free + int(plan.amount)
    else:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        what, amount = resource.RLIMIT_AS, used + int(plan.amount * 1024)
    before = resource.getrlimit(what)
    resource.setrlimit(what, (min(amount, before[1]) if before[1] >= 0 else amount, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def take_part(ctx, plan: SimpleNamespace) -> dict:
    """One rank's part of a trial."""

    def open_within(seconds: float):
        return open_comm(ctx, plan.machines, seconds, timeout=TIMEOUT)

    def split() -> None:
        child = comm.split(0)
        wrong.extend(wrong_sum(child))
        child.close()

    with on_machines(ctx, plan.machines):
        comm = open_within(30.0)  # what is opened, and imported, once for a process
        wrong = wrong_sum(comm)
        comm.split(0).close()
        comm.close()
        if plan.action != "init":
            comm = open_within(30.0)
            comm.timeout = TIMEOUT
            wrong += wrong_sum(comm)
        x = torch.ones(1 << 22 if plan.kind == "memory" else 1000)
        action = {
            "init": lambda: open_within(INIT_TIMEOUT), "split": split,
            "empty": lambda: comm.all_reduce(comm.empty(1 << 20, dtype=torch.float32).fill_(1.0)) and None,
            "all_reduce": lambda: [comm.all_reduce(x.fill_(1.0)) for _ in range(30)] and None,
        }[plan.action]  # fmt: skip
        ctx.barrier()
        error, made, began = None, None, time.monotonic()
        with lacking(plan) if ctx.rank in plan.victims else contextlib.nullcontext():
            try:
                made = action()
            except Exception as found:
                error = found
            seconds = time.monotonic() - began
        ctx.barrier()
        for each in (made, comm):
            if each is not None and not each.closed:
                each.abort()
        again = open_within(30.0)
        wrong += wrong_sum(again) + (check(plan, error, seconds) if error is not None else [])
        again.close()
    return {"wrong": wrong, "error": type(error).__name__ if error else None, "seconds": seconds}
