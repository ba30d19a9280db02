"""Trials in which one rank's program deviates at one place: another operation, dtype, count or root,
two calls in the other order, one left out, one more.

What must hold: where the ranks' calls are no longer the same, every rank gets an error, by a time
limit at the latest, but for ranks that have nothing to wait for (`excused`); what was called before
has the right results; the receive buffers of the failed call are unchanged; after a `Mismatch` on
all ranks the communicator goes on (on one node).
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace

import torch

from tests.faults.kills import open_on, shorten
from tests.ranks import RankFailure, run_ranks

__all__ = ["Step", "make_plan", "run_trial"]

TIMEOUT = 1.0  # of the communicator
LIMIT = 60.0  # of a trial
OPS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "ring", "barrier")
DTYPES = ("float32", "float64", "int32", "int64", "bfloat16")
DEVIATIONS = ("op", "dtype", "count", "root", "order", "left out", "one more")


@dataclass(frozen=True)
class Step:
    """One call. ``count``: elements of a rank's part."""

    op: str
    dtype: str = "float32"
    count: int = 1
    root: int = 0

    @property
    def call(self) -> tuple:
        """What the ranks must have in common."""
        if self.op == "barrier":
            return ("barrier",)
        return self.op, self.dtype, self.count, self.root if self.op in ("reduce", "broadcast") else None


def make_plan(seed: int) -> dict:
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
        other[at] = replace(usual[at], op=draw.choice([op for op in OPS if op != usual[at].op]))
    elif how == "dtype":
        other[at] = replace(usual[at], dtype=draw.choice([each for each in DTYPES if each != usual[at].dtype]))
    elif how == "count":
        other[at] = replace(usual[at], count=draw.choice([usual[at].count + 1, 2 * usual[at].count + 3, 1]))
    elif how == "root":
        other[at] = replace(usual[at], root=(usual[at].root + 1) % ranks)
    elif how == "order" and at + 1 < len(usual):
        other[at], other[at + 1] = other[at + 1], other[at]
    elif how == "one more":
        other.insert(at, step())
    else:
        how = "left out"
        del other[at]
    return {
        "seed": seed, "ranks": ranks, "machines": machines, "deviant": draw.randrange(ranks), "how": how,
        "usual": usual, "other": other,
    }  # fmt: skip


def first_difference(plan: dict) -> int | None:
    """Return the number of the first call that is not the same, None where all are."""
    usual, other = ([step.call for step in plan[name]] for name in ("usual", "other"))
    if usual == other:
        return None
    shorter = min(len(usual), len(other))
    return next((at for at in range(shorter) if usual[at] != other[at]), shorter)


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row."""
    plan = make_plan(seed)
    row = {"trial": "deviations", **plan, "wrong": []}
    for name in ("usual", "other"):
        row[name] = [asdict(step) for step in plan[name]]
    try:
        results = run_ranks(take_part, plan["ranks"], plan, timeout=LIMIT)
    except RankFailure as failure:
        row["wrong"].append(f"a rank failed or hung: {shorten(failure)}")
        return row
    row["wrong"] += [f"rank {rank}: {text}" for rank, found in enumerate(results) for text in found["wrong"]]
    row["errors"] = [found["error"] for found in results]
    row["legal"] = first_difference(plan) is None
    row["operations"] = sum(found["done"] for found in results)
    row["wrong"] += check_errors(plan, results)
    return row


def check_errors(plan: dict, results: list[dict]) -> list[str]:
    """Return what is wrong with which ranks got errors, and where."""
    at, deviant, wrong = first_difference(plan), plan["deviant"], []
    for rank, found in enumerate(results):
        steps = plan["other" if rank == deviant else "usual"]
        if at is None and found["error"] is not None:
            wrong.append(f"rank {rank} got {found['text']}, and all calls are the same")
        elif at is not None and found["error"] is None:
            if at < len(steps) and not excused(plan, at, steps, found, results):
                wrong.append(f"rank {rank} got no error, and call {at} differs")
        elif found["error"] is not None and found["done"] < at:
            wrong.append(f"rank {rank} got an error in call {found['done']}, and the first that differs is {at}")
    return wrong


def excused(plan: dict, at: int, steps: list[Step], found: dict, results: list[dict]) -> bool:
    """Return whether a rank need not notice: sends and receives concern neighbours alone, a rank whose
    calls come to an end before the others' has nothing more to wait for, nor has one of several
    nodes that has what the roots sent, in its last calls, if others get an error.
    """
    usual, other = plan["usual"], plan["other"]
    calls = {each[at].op for each in (usual, other) if at < len(each)}
    if "ring" in calls or at >= min(len(usual), len(other)):
        return True
    noticed = plan["machines"] and any(each["error"] for each in results)
    return bool(noticed) and {step.op for step in steps[at:]} == {"broadcast"} and found["right"]


# ---- On each rank.


def take_part(ctx, plan: dict) -> dict:
    """One rank's part of a trial."""
    import collectives

    with open_on(ctx, plan["machines"]):
        comm = collectives.init() if plan["machines"] else ctx.new_communicator()
        comm.timeout = TIMEOUT
        return run_program(ctx, plan, comm)


def run_program(ctx, plan: dict, comm) -> dict:
    from collectives.errors import CollectivesError, Mismatch

    wrong, error, done, text, right = [], None, 0, "", True
    for step in plan["other" if ctx.rank == plan["deviant"] else "usual"]:
        call = Call(step, done, comm)
        try:
            call.run()
        except CollectivesError as found:
            error, text = found, f"{type(found).__name__} {found.peers}: {found}"
            # Of a group another receive may have ended well; on several nodes nothing is promised.
            if not call.is_unchanged() and step.op != "ring" and not plan["machines"]:
                wrong.append(f"call {done} ({step}) failed, and has changed its receive buffer: {text}")
            break
        is_right = call.is_right()
        right = right and is_right
        if not is_right and (first_difference(plan) is None or done < first_difference(plan)):
            wrong.append(f"call {done} ({step}) has a wrong result")
        done += 1
    kinds = ctx.exchange(type(error).__name__ if error is not None else None)
    places = ctx.exchange(done)
    if not plan["machines"] and set(kinds) == {Mismatch.__name__} and len(set(places)) == 1:
        wrong += go_on(comm)
    ctx.barrier()
    comm.abort()
    return {"wrong": wrong, "error": kinds[ctx.rank], "done": done, "text": text, "right": right}


def go_on(comm) -> list[str]:
    """Use the communicator again after a mismatch on all ranks."""
    x = torch.full((5000,), float(comm.rank + 1))
    try:
        comm.all_reduce(x)
    except Exception as error:
        return [f"can't be used after a Mismatch: {type(error).__name__}: {error}"]
    total = comm.size * (comm.size + 1) / 2
    return [] if set(x.tolist()) == {total} else [f"a wrong sum after a Mismatch: {x[:4]}, not {total}"]


class Call:
    """One call, its arrays, and what it must give. Values are small whole numbers: sums are exact."""

    def __init__(self, step: Step, number: int, comm):
        self.step, self.comm, self.number = step, comm, number
        self.dtype = getattr(torch, step.dtype)
        n, size, rank = step.count, comm.size, comm.rank
        mine = self.values(rank)
        whole = torch.cat([self.values(rank, part) for part in range(size)])
        blank = torch.full((n,), 7, dtype=self.dtype)
        blanks = torch.full((n * size,), 7, dtype=self.dtype)
        total = sum(self.values(each) for each in range(size))
        every = torch.cat([self.values(each) for each in range(size)])
        left, right = (rank - 1) % size, (rank + 1) % size
        root = step.root
        # The receive buffer, what it must hold, the call.
        self.out, self.want, self.make = {
            "all_reduce": lambda: (mine, total, lambda: comm.all_reduce(mine)),
            "reduce": lambda: (mine, total if rank == root else mine.clone(), lambda: comm.reduce(mine, root)),
            "reduce_scatter": lambda: (
                blank, sum(self.values(each, rank) for each in range(size)),
                lambda: comm.reduce_scatter(blank, whole),
            ),
            "all_gather": lambda: (blanks, every, lambda: comm.all_gather(blanks, mine)),
            "broadcast": lambda: (mine, self.values(root), lambda: comm.broadcast(mine, root)),
            "all_to_all": lambda: (
                blanks, torch.cat([self.values(each, rank) for each in range(size)]),
                lambda: comm.all_to_all(blanks, whole),
            ),
            "ring": lambda: (blank, self.values(left), lambda: self.ring(mine, blank, left, right)),
            "barrier": lambda: (blank[:1], blank[:1].clone(), comm.barrier),
        }[step.op]()  # fmt: skip
        self.before = self.out.clone()

    def values(self, rank: int, part: int = 0) -> torch.Tensor:
        first = (rank * 3 + part * 5 + self.number) % 7
        return ((torch.arange(self.step.count) + first) % 5).to(self.dtype)

    def ring(self, mine, out, left, right) -> None:
        with self.comm.group():
            self.comm.send(mine, right)
            self.comm.recv(out, left)

    def run(self) -> None:
        self.make()

    def is_right(self) -> bool:
        return torch.equal(self.out, self.want)

    def is_unchanged(self) -> bool:
        return torch.equal(self.out, self.before)
