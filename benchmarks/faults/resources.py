"""Trials in which a rank lacks something: file descriptors, memory, room on a disk or in /dev/shm, or
time, since its clock jumps or its process is stopped for a while.

What must hold: no rank hangs. Each rank ends with success, or with an error that says what is
missing, or that names the rank that lacks it. Then what it lacked is there again, and the ranks open
a communicator, whose sums are right.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import asdict, dataclass

from benchmarks.faults import resource_programs
from tests.ranks import RankFailure, run_ranks

__all__ = ["KINDS", "Plan", "make_plan", "run_trial"]

KINDS = ("descriptors", "memory", "disk", "shm", "clock", "pause")
LIMIT = 90.0  # of a trial
SOON = 5.0  # seconds after a time limit in which its error has come
# What an error of the rank that lacks something says.
SAYS = {
    "descriptors": r"descriptor|Too many open files|EMFILE|No file descriptors|Errno 24",
    "memory": r"memory|allocat|new thread|mmap|map",
    "disk": r"No space left|Errno 28|File too large|Errno 27|full",
}


@dataclass(frozen=True)
class Plan:
    """One trial: all that its seed determines.

    ``amount``: free descriptors; KiB of address space beside what is used; KiB of the disk; seconds
    of the clock's jump or of the pause.
    """

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
    action, amount = "", 0.0
    if kind == "descriptors":
        action, amount = draw.choice(["init", "split", "empty", "register"]), draw.randint(0, 24)
    elif kind == "memory":
        action = draw.choice(["init", "split", "empty", "register", "all_reduce"])
        amount = draw.choice([64, 256, 1024, 4096, 16_384, 65_536, 262_144]) * (0.5 + draw.random())
    elif kind == "disk":
        action = draw.choice(["checkpointer", "save", "flight", "dump"])
        amount = draw.choice([0, 4, 40, 300, 600, 4096])
        machines = ""
    elif kind == "shm":
        action, amount = draw.choice(["init", "split", "empty", "all_reduce"]), 1024
    elif kind == "clock":
        action = draw.choice(["init", "all_reduce", "timeout", "split"])
        amount = draw.choice([-1, 1]) * draw.choice([0.5, 3, 60, 3600, 86_400 * 400])
    else:
        action, amount = draw.choice(["all_reduce", "split", "async", "barrier", "send"]), draw.choice([0.3, 0.6, 3.0])
        victims = victims[:1]
    return Plan(seed, kind, ranks, machines, victims, action, amount)


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and each rank's outcome."""
    plan, began = make_plan(seed), time.monotonic()
    row = {"trial": "resources", **asdict(plan), "wrong": []}
    try:
        options = {"start_env": resource_programs.preload()} if plan.kind == "clock" else {}
        fresh = plan.kind not in ("clock", "pause")
        results = run_ranks(
            resource_programs.take_part, plan.ranks, asdict(plan), timeout=LIMIT, fresh=fresh, **options
        )
    except RankFailure as failure:
        row["wrong"].append(f"a rank failed or hung: {str(failure)[-9000:]}")
        return row
    for rank, found in enumerate(results):
        row["wrong"] += [f"rank {rank}: {text}" for text in [*found["wrong"], *_check(plan, rank, found)]]
    row["outcomes"] = [found["error"] or "success" for found in results]
    row["seconds"] = max((found["seconds"] for found in results if found["seconds"]), default=None)
    row["spent_s"] = round(time.monotonic() - began, 1)
    return row


def _check(plan: Plan, rank: int, found: dict) -> list[str]:
    """Return what is wrong with a rank's outcome."""
    error, text, peers = found["error"], found["text"], found["peers"]
    if error is None:
        return []
    wrong = []
    allowed = {"CollectivesError", "OSError"} if plan.kind == "disk" else {"CollectivesError"}
    if not allowed & set(found["kinds"]):
        wrong.append(f"no error of ours: {error}: {text}")
    if plan.kind in SAYS:
        says = re.search(SAYS[plan.kind], text) is not None
        if rank in plan.victims and not says and not set(peers) & set(plan.victims):
            wrong.append(f"doesn't say what is missing: {error} {peers}: {text}")
        if rank not in plan.victims and not says and not set(peers) & set(plan.victims):
            wrong.append(f"names no rank that lacks something: {error} {peers}: {text}")
    elif plan.kind == "shm":
        wrong.append(f"nothing needs /dev/shm: {error}: {text}")
    elif plan.kind == "clock" and plan.action != "timeout":
        wrong.append(f"the clock's jump has an effect: {error}: {text}")
    elif plan.kind == "pause" and plan.amount < resource_programs.TIMEOUT:
        wrong.append(f"a pause of {plan.amount} s has an effect: {error}: {text}")
    elif plan.kind == "pause" and rank not in plan.victims and set(peers) != set(plan.victims):
        wrong.append(f"another rank than the one that was stopped is named: {error} {peers}: {text}")
    if found["seconds"] > found["limit"] + SOON:
        wrong.append(f"came after {found['seconds']:.1f} s: {error}: {text}")
    return wrong
