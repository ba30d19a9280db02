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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.faults.kills import open_on, shorten
from tests.ranks import RankFailure, run_ranks

__all__ = ["KINDS", "Plan", "make_plan", "run_plan", "run_trial"]

KINDS = ("descriptors", "memory")
LIMIT = 90.0  # of a trial
SOON = 5.0  # seconds after a time limit in which its error has come
TIMEOUT, INIT_TIMEOUT = 1.5, 5.0  # of the communicator
# What an error of the rank that lacks something says.
SAYS = {
    "descriptors": r"descriptor|Too many open files|EMFILE|No file descriptors|Errno 24",
    "memory": r"memory|allocat|new thread|mmap|map",
}


@dataclass(frozen=True)
class Plan:
    """One trial. ``amount``: free descriptors, or KiB of address space beside what is used."""

    seed: int
    kind: str
    ranks: int
    machines: str
    victims: tuple[int, ...]
    action: str
    amount: float


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    ranks = draw.choice([2, 2, 3, 4])
    machines = "".join(sorted("ab"[each % 2] for each in range(ranks))) if draw.random() < 0.3 else ""
    victims = tuple(sorted(draw.sample(range(ranks), draw.choice([1, 1, 1, ranks]))))
    if kind == "descriptors":
        return Plan(seed, kind, ranks, machines, victims, draw.choice(["init", "split", "empty"]), draw.randint(0, 24))
    amount = draw.choice([64, 256, 1024, 4096, 16_384, 65_536, 262_144]) * (0.5 + draw.random())
    return Plan(seed, kind, ranks, machines, victims, draw.choice(["init", "split", "empty", "all_reduce"]), amount)


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and each rank's outcome."""
    return run_plan(make_plan(seed))


def run_plan(plan: Plan) -> dict:
    row = {"trial": "resources", **asdict(plan), "wrong": []}
    try:
        results = run_ranks(take_part, plan.ranks, plan, timeout=LIMIT, fresh=True)
    except RankFailure as failure:
        row["wrong"].append(f"a rank failed or hung: {shorten(failure)}")
        return row
    for rank, found in enumerate(results):
        row["wrong"] += [f"rank {rank}: {text}" for text in [*found["wrong"], *_check(plan, found)]]
    row["outcomes"] = [found["error"] or "success" for found in results]
    row["seconds"] = max(found["seconds"] for found in results)
    return row


def _check(plan: Plan, found: dict) -> list[str]:
    """Return what is wrong with a rank's outcome."""
    if found["error"] is None:
        return []
    wrong, what = [], f"{found['error']} {found['peers']}: {found['text']}"
    if "CollectivesError" not in found["kinds"]:
        wrong.append(f"no error of ours: {what}")
    if not re.search(SAYS[plan.kind], found["text"]) and not set(found["peers"]) & set(plan.victims):
        wrong.append(f"says neither what is missing nor on which rank: {what}")
    limit = INIT_TIMEOUT + 2 if plan.action in ("init", "split") else TIMEOUT
    if found["seconds"] > limit + SOON:
        wrong.append(f"came after {found['seconds']:.1f} s: {what}")
    return wrong


# ---- On each rank.


def take_part(ctx, plan: Plan) -> dict:
    """One rank's part of a trial."""
    from tests.rank_process import bind_submodules

    bind_submodules()
    with open_on(ctx, plan.machines):
        return _Rank(ctx, plan).run()


@contextlib.contextmanager
def _lacking(plan: Plan):
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


class _Rank:
    def __init__(self, ctx, plan: Plan):
        self.ctx, self.plan = ctx, plan
        self.wrong: list[str] = []

    def run(self) -> dict:
        warm = self.open(30.0)  # what is opened, and imported, once for a process
        self.check_sum(warm)
        warm.split(0).close()
        warm.close()
        comm = None
        if self.plan.action != "init":
            comm = self.open(30.0)
            comm.timeout = TIMEOUT
            self.check_sum(comm)
        x = torch.ones(1 << 22 if self.plan.kind == "memory" else 1000)
        lacks = self.ctx.rank in self.plan.victims
        self.ctx.barrier()
        error, made, began = None, None, time.monotonic()
        with _lacking(self.plan) if lacks else contextlib.nullcontext():
            try:
                made = getattr(self, f"do_{self.plan.action}")(comm, x)
            except Exception as found:
                error = found
            seconds = time.monotonic() - began
        self.ctx.barrier()
        for each in (made, comm):
            if each is not None and not each.closed:
                each.abort()
        again = self.open(30.0)
        self.check_sum(again)
        again.close()
        return {
            "wrong": self.wrong, "error": type(error).__name__ if error else None, "text": str(error)[:1500],
            "peers": list(getattr(error, "peers", ())), "kinds": [kind.__name__ for kind in type(error).__mro__],
            "seconds": seconds,
        }  # fmt: skip

    def open(self, seconds: float = INIT_TIMEOUT):
        import collectives

        if self.plan.machines:
            return collectives.init(timeout=seconds)
        self.ctx.library.set_init_timeout(seconds)
        try:
            return self.ctx.new_communicator(timeout=TIMEOUT)
        finally:
            self.ctx.library.set_init_timeout(60.0)

    def check_sum(self, comm) -> None:
        x = torch.full((1000,), float(comm.rank + 1))
        comm.all_reduce(x)
        if set(x.tolist()) != {comm.size * (comm.size + 1) / 2}:
            self.wrong.append(f"a wrong sum: {x[:4]}")

    # ---- What is done meanwhile.

    def do_init(self, comm, x):
        return self.open()

    def do_split(self, comm, x) -> None:
        child = comm.split(0)
        self.check_sum(child)
        child.close()

    def do_empty(self, comm, x) -> None:
        comm.all_reduce(comm.empty(1 << 20, dtype=torch.float32).fill_(1.0))

    def do_all_reduce(self, comm, x) -> None:
        for _ in range(30):
            comm.all_reduce(x.fill_(1.0))
