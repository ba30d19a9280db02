"""Trials in which one rank's program deviates at one place: another operation, dtype, count or root,
two calls in the other order, one left out, one more.

What must hold: where the ranks' calls are no longer the same, every rank gets an error, by a time
limit at the latest, but for ranks that have nothing to wait for (`excused`); what was called before
has the right results; the receive buffers of the failed call are unchanged; after a `Mismatch` on
all ranks the communicator goes on (on one node).
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tests.faults.trials import OPS, Arrays, make_call, on_machines, open_comm, run_on_ranks, wrong_sum

__all__ = ["make_plan", "run_trial"]

TIMEOUT = 1.0  # of the communicator
LIMIT = 60.0  # of a trial
DTYPES = ("float32", "float64", "int32", "int64", "bfloat16")
DEVIATIONS = ("op", "dtype", "count", "root", "order", "left out", "one more")


class Step(NamedTuple):
    """One call. ``count``: elements of a rank's part."""

    op: str
    dtype: str
    count: int
    root: int

    @property
    def call(self) -> tuple:
        """What the ranks must have in common."""
        if self.op == "barrier":
            return ("barrier",)
        return self if self.op in ("reduce", "broadcast") else self[:3]


def make_plan(seed: int) -> SimpleNamespace:
    """Return the plan of a seed: ranks, who deviates, how, and each rank's steps."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 4])
    machines = "".join("ab"[each % 2] for each in range(ranks)) if draw.random() < 0.15 else ""

    def step() -> Step:
        return Step(
            draw.choice(OPS), draw.choice(DTYPES), draw.choice([1, 3, 64, 1000, 20000, 200000]), draw.randrange(ranks)
        )

    usual = [step() for _ in range(draw.randint(1, 6))]
    other, at, how = list(usual), draw.randrange(len(usual)), draw.choice(DEVIATIONS)
    if how == "op":
        other[at] = usual[at]._replace(op=draw.choice([op for op in OPS if op != usual[at].op]))
    elif how == "dtype":
        other[at] = usual[at]._replace(dtype=draw.choice([each for each in DTYPES if each != usual[at].dtype]))
    elif how == "count":
        other[at] = usual[at]._replace(count=draw.choice([usual[at].count + 1, 2 * usual[at].count + 3, 1]))
    elif how == "root":
        other[at] = usual[at]._replace(root=(usual[at].root + 1) % ranks)
    elif how == "order" and at + 1 < len(usual):
        other[at], other[at + 1] = other[at + 1], other[at]
    elif how == "one more":
        other.insert(at, step())
    else:
        how = "left out"
        del other[at]
    deviant, calls = draw.randrange(ranks), [[step.call for step in steps] for steps in (usual, other)]
    shorter = min(map(len, calls))
    differ = [at for at in range(shorter) if calls[0][at] != calls[1][at]]
    first = differ[0] if differ else shorter if len(usual) != len(other) else None  # the first call that differs
    return SimpleNamespace(
        seed=seed, ranks=ranks, machines=machines, deviant=deviant, how=how, usual=usual, other=other, first=first
    )


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row."""
    plan = make_plan(seed)
    row, results = run_on_ranks(take_part, plan, timeout=LIMIT)
    row["wrong"] += [f"rank {rank} {text}" for rank in range(len(results)) for text in check_error(plan, results, rank)]
    row["errors"] = [found["error"] for found in results]
    return row


def check_error(plan: SimpleNamespace, results: list[dict], rank: int) -> list[str]:
    """Return what is wrong with whether a rank got an error, and where."""
    found, first = results[rank], plan.first
    if found["error"] is not None:
        if first is None:
            return [f"got {found['text']}, and all calls are the same"]
        early = found["done"] < first
        return [f"got an error in call {found['done']}, and the first that differs is {first}"] if early else []
    steps = plan.other if rank == plan.deviant else plan.usual
    if first is None or first >= len(steps) or excused(plan, steps[first:], found, results):
        return []
    return [f"got no error, and call {first} differs"]


def excused(plan: SimpleNamespace, steps: list[Step], found: dict, results: list[dict]) -> bool:
    """Return whether a rank need not notice: sends and receives concern neighbours alone, a rank whose
    calls come to an end before the others' has nothing more to wait for, nor has one of several
    nodes that has what the roots sent, in its last calls, if others get an error.
    """
    calls = [each[plan.first].op for each in (plan.usual, plan.other) if plan.first < len(each)]
    if len(calls) < 2 or "ring" in calls:
        return True
    noticed = plan.machines and any(each["error"] for each in results)
    return bool(noticed) and {step.op for step in steps} == {"broadcast"} and found["right"]


# ---- On each rank.


def take_part(ctx, plan: SimpleNamespace) -> dict:
    """One rank's part of a trial."""
    from collectives.errors import CollectivesError

    with on_machines(ctx, plan.machines):
        comm = open_comm(ctx, plan.machines, timeout=TIMEOUT)
        comm.timeout = TIMEOUT
    wrong, kind, done, text, right = [], None, 0, "", True
    for step in plan.other if ctx.rank == plan.deviant else plan.usual:
        call = Call(step, done, comm)
        try:
            call.run()
        except CollectivesError as error:
            kind, text = type(error).__name__, f"{type(error).__name__} {error.peers}: {error}"
            # Of a group another receive may have ended well; on several nodes nothing is promised.
            if not torch.equal(call.out, call.before) and step.op != "ring" and not plan.machines:
                wrong.append(f"call {done} ({step}) failed, and has changed its receive buffer: {text}")
            if kind == "Mismatch" and not plan.machines and step.op != "ring":
                wrong += wrong_table(ctx, plan, error)
            break
        is_right = torch.equal(call.out, call.want)
        right = right and is_right
        if not is_right and (plan.first is None or done < plan.first):
            wrong.append(f"call {done} ({step}) has a wrong result")
        done += 1
    ends = set(ctx.exchange((kind, done)))
    if not plan.machines and len(ends) == 1 and kind == "Mismatch":
        try:
            wrong += wrong_sum(comm)
        except CollectivesError as error:
            wrong.append(f"can't be used after a Mismatch: {type(error).__name__}: {error}")
    ctx.barrier()
    comm.abort()
    return {"wrong": wrong, "error": kind, "done": done, "text": text, "right": right}


def wrong_table(ctx, plan: SimpleNamespace, error) -> list[str]:
    """Return what is wrong with an error that says who made which call: the ranks, and in what the calls differ."""
    others = [rank for rank in range(plan.ranks) if rank != plan.deviant]
    peers = others if ctx.rank == plan.deviant else [plan.deviant]
    words = [f"rank {rank}" for rank in range(plan.ranks)]
    if plan.first < min(len(plan.usual), len(plan.other)):
        pairs = zip(plan.usual[plan.first].call, plan.other[plan.first].call, strict=False)
        words += [str(value) for pair in pairs if pair[0] != pair[1] for value in pair]
    text = error.message.lower().replace("_", "")
    missing = [word for word in words if word.replace("_", "") not in text]
    if list(error.peers) == peers and error.rank == ctx.rank and not missing:
        return []
    return [f"names {error.peers} on rank {error.rank}, and not {peers}, and lacks {missing}: {error.message}"]


class Call:
    """One call, its receive buffer, and what it must give. Values are small whole numbers: sums are exact."""

    def __init__(self, step: Step, number: int, comm):
        rank, ranks, dtype = comm.rank, range(comm.size), getattr(torch, step.dtype)

        def values(rank: int, part: int = 0) -> torch.Tensor:
            first = (rank * 3 + part * 5 + number) % 7
            return ((torch.arange(step.count) + first) % 5).to(dtype)

        mine, every = values(rank), torch.cat([values(rank, part) for part in ranks])
        arrays = Arrays(mine, every, torch.full_like(mine, 7), torch.full_like(every, 7))
        total = sum(values(each) for each in ranks)
        self.out, self.want = {
            "all_reduce": (mine, total),
            "reduce": (mine, total if rank == step.root else mine.clone()),
            "reduce_scatter": (arrays.part_out, sum(values(each, rank) for each in ranks)),
            "all_gather": (arrays.every_out, torch.cat([values(each) for each in ranks])),
            "broadcast": (mine, values(step.root)),
            "all_to_all": (arrays.every_out, torch.cat([values(each, rank) for each in ranks])),
            "ring": (arrays.part_out, values((rank - 1) % comm.size)),
            "barrier": (arrays.part_out, arrays.part_out.clone()),
        }[step.op]
        self.before, self.run = self.out.clone(), make_call(comm, step.op, arrays, step.root)
