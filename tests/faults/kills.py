"""Trials in which ranks die or stop at a random moment of a random program.

What must hold: no rank hangs; every survivor gets an error that names a rank which died, and no
living one, within 5 s of the death, or of the time limit for a rank that is stopped; the survivors
then shrink, and their sums are right.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.faults.trials import OPS, SOON, Arrays, make_call, on_machines, open_comm, run_on_ranks, wrong_sum

__all__ = ["make_plan", "run_trial"]

TIMEOUT = 1.5  # of the communicator where a rank is stopped
INIT_TIMEOUT = 5.0  # a rank that has died before it connected is known by nobody: time limits name it
LIMIT = 60.0  # of a trial
HOWS = ("kill", "exit", "abort", "stop")
KINDS = ("operation", "async", "group", "split", "init", "shrink", "idle", "close")


def make_plan(seed: int) -> SimpleNamespace:
    """Return the plan of a seed.

    machines: a letter for each rank, "" for one node. kind: what the ranks do when it happens. count: float32 elements
    of an operation, per rank. calls: before the moment. delay: seconds after that. shared: arrays in shared memory.
    """
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 3, 4, 4, 5, 6, 8, 16])
    nodes, machines = draw.choice([1, 1, 1, 2, 2, 3, 4]), ""
    if 1 < nodes <= ranks and ranks <= 8:
        letters = sorted("abcd"[each % nodes] for each in range(ranks))
        if draw.random() < 0.3:
            draw.shuffle(letters)
        machines = "".join(letters)
    victims = draw.sample(range(ranks), 1 if draw.random() < 0.7 else draw.randint(1, max(1, ranks // 2)))
    kind = draw.choice(KINDS)
    how = draw.choice(HOWS if kind not in ("init", "close", "shrink") else ("kill", "exit"))
    op = draw.choice(OPS)
    count = draw.choice([2, 256, 4096, 65536, 1 << 18, 1 << 20] if ranks < 16 else [2, 4096, 65536])
    calls, delay = draw.randint(0, 12), draw.choice([0.0, 0.0, 0.001, 0.005, 0.02]) * draw.random()
    return SimpleNamespace(
        seed=seed, ranks=ranks, machines=machines, victims=tuple(sorted(victims)), how=how, kind=kind, op=op,
        count=count, calls=calls, delay=delay, shared=draw.random() < 0.3,
    )  # fmt: skip


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and the seconds until the last error."""
    plan = make_plan(seed)
    with tempfile.TemporaryDirectory() as folder:
        row, results = run_on_ranks(take_part, plan, f"{folder}/death", timeout=LIMIT, deaths=plan.victims)
    survivors = [found for found in results if isinstance(found, dict)]
    row["seconds"] = max((found["seconds"] for found in survivors if found["seconds"] is not None), default=None)
    row["errors"] = sorted({found["error"] for found in survivors})
    return row


def take_part(ctx, plan: SimpleNamespace, death: str) -> dict:
    """One rank's part of a trial. `death`: a file that is made at the moment of the first death."""
    with on_machines(ctx, plan.machines):
        return _Rank(ctx, plan, Path(death)).run()


class _Rank:
    def __init__(self, ctx, plan: SimpleNamespace, death: Path):
        self.ctx, self.plan, self.death = ctx, plan, death
        self.is_victim = ctx.rank in plan.victims
        self.survivors = [rank for rank in range(plan.ranks) if rank not in plan.victims]
        self.comm, self.wrong = None, []

    def strike(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.death.touch(exist_ok=False)

    def die(self) -> None:
        self.strike()
        if self.plan.how == "abort":
            self.comm.abort()
        if self.plan.how in ("abort", "exit"):
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP if self.plan.how == "stop" else signal.SIGKILL)
        time.sleep(60)

    def die_soon(self) -> None:
        if self.plan.delay:
            threading.Timer(self.plan.delay, self.die).start()
        else:
            self.die()

    def run(self) -> dict:
        from collectives.errors import CollectivesError

        error = None
        try:
            self.program()
        except CollectivesError as found:
            error = found
        if self.is_victim:  # its own end is about to come
            time.sleep(LIMIT)
        spent = time.time() - self.death.stat().st_mtime if self.death.exists() else None
        self.check(error, spent)
        self.ctx.barrier(ranks=self.survivors)  # all have had their errors
        if self.plan.how == "stop" and self.ctx.rank == self.survivors[0]:
            for rank in self.plan.victims:
                os.kill(self.ctx.pids[rank], signal.SIGKILL)
        # On several nodes without a launcher's store, that of rank 0 connects the survivors.
        connected = not self.plan.machines or 0 not in self.plan.victims
        if self.comm is not None and self.plan.kind not in ("init", "close") and connected:
            smaller = self.comm.shrink(self.plan.victims, abort=True)
            self.wrong += wrong_sum(smaller)
            smaller.close()
        if self.comm is not None and not self.comm.closed:
            self.comm.abort()
        return {"wrong": self.wrong, "seconds": spent, "error": type(error).__name__}

    def check(self, error, spent: float | None) -> None:
        if error is None:
            self.wrong.append("no error came")
            return
        peers, victims = set(error.peers), set(self.plan.victims)
        text = f"{type(error).__name__} {error.peers}: {error}"
        # With rank 0 of several nodes goes the store in which causes are posted.
        known = not self.plan.machines or 0 not in victims
        named = "|".join(map(str, victims))
        if known and not peers & victims:
            self.wrong.append(f"names no rank that died: {text}")
        if known and peers - victims:
            self.wrong.append(f"names a rank that lives: {text}")
        if known and (error.rank != self.ctx.rank or not re.search(rf"\b({named})\b", str(error))):
            self.wrong.append(f"says that it came on rank {error.rank}, or doesn't say why: {text}")
        limit = SOON + (TIMEOUT if self.plan.how == "stop" else 0)
        limit += INIT_TIMEOUT if self.plan.kind == "init" else 0
        if spent is None or not 0 <= spent <= limit:
            self.wrong.append(f"came after {spent} s: {text}")

    # ---- The programs.

    def program(self) -> None:
        ctx, plan = self.ctx, self.plan
        if plan.kind == "init":
            unique_id = ctx.unique_id()
            if self.is_victim:
                self.die_soon()
            self.strike()
            self.comm = open_comm(ctx, plan.machines, INIT_TIMEOUT, unique_id)
            repeat(self.comm.barrier)
            return
        comm = self.comm = open_comm(ctx, plan.machines, LIMIT / 2)
        if plan.how == "stop":
            comm.timeout = TIMEOUT
        make = comm.empty if plan.shared else torch.empty
        arrays = Arrays(*(make(plan.count * of, dtype=torch.float32) for of in (1, plan.ranks) * 2))
        arrays.every.fill_(1.0)
        root = comm.size - 1 if plan.op == "broadcast" else 0

        def operation(**options):
            arrays.mine.fill_(1.0)
            return make_call(comm, plan.op, arrays, root, **options)()

        def three_at_once():
            for work in [operation(async_op=True) for _ in range(3)]:
                work.wait()

        def group():
            with comm.group():
                comm.all_reduce(arrays.mine.fill_(1.0))
                comm.all_gather(arrays.every_out, arrays.mine)

        for _ in range(plan.calls):
            operation()
        ctx.barrier()
        if self.is_victim:
            self.die_soon()
        calls = {
            "async": operation if plan.op in ("ring", "barrier") else three_at_once, "group": group,
            "split": lambda: comm.split(0, -comm.rank).close(), "idle": lambda: (time.sleep(0.05), operation()),
        }  # fmt: skip
        repeat(calls.get(plan.kind, operation))


def repeat(call) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        call()
