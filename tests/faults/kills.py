"""Trials in which ranks die or stop at a random moment of a random program.

What must hold: no rank hangs; every survivor gets an error that names a rank which died, and no
living one, within 5 s of the death, or of the time limit for a rank that is stopped; the survivors
then shrink, and their sums are right.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import threading
import time
from dataclasses import asdict, dataclass

import torch

from tests.hosts import apart
from tests.ranks import RankFailure, run_ranks

__all__ = ["Plan", "make_plan", "open_on", "run_trial", "shorten"]

SOON = 5.0  # seconds, promised
TIMEOUT = 1.5  # of the communicator where a rank is stopped
INIT_TIMEOUT = 5.0  # a rank that has died before it connected is known by nobody: time limits name it
LIMIT = 60.0  # of a trial
HOWS = ("kill", "exit", "abort", "stop")
KINDS = ("operation", "async", "group", "split", "init", "shrink", "idle", "close")
OPS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "barrier")


@dataclass(frozen=True)
class Plan:
    """One trial: all that its seed determines."""

    seed: int
    ranks: int
    machines: str  # a letter for each rank; "" for one node
    victims: tuple[int, ...]
    how: str
    kind: str  # what the ranks do when it happens
    op: str
    count: int  # float32 elements of an operation, per rank
    calls: int  # before the moment
    delay: float  # seconds after that
    shared: bool  # arrays in shared memory


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 3, 4, 4, 5, 6, 8, 16])
    nodes = draw.choice([1, 1, 1, 2, 2, 3, 4])
    machines = ""
    if 1 < nodes <= ranks and ranks <= 8:
        machines = "".join(sorted("abcd"[each % nodes] for each in range(ranks)))
        if draw.random() < 0.3:
            letters = list(machines)
            draw.shuffle(letters)
            machines = "".join(letters)
    victims = draw.sample(range(ranks), 1 if draw.random() < 0.7 else draw.randint(1, max(1, ranks // 2)))
    kind = draw.choice(KINDS)
    how = draw.choice(HOWS if kind not in ("init", "close", "shrink") else ("kill", "exit"))
    return Plan(
        seed, ranks, machines, tuple(sorted(victims)), how, kind, draw.choice(OPS),
        draw.choice([2, 256, 4096, 65536, 1 << 18, 1 << 20]) if ranks < 16 else draw.choice([2, 4096, 65536]),
        draw.randint(0, 12), draw.choice([0.0, 0.0, 0.001, 0.005, 0.02]) * draw.random(), draw.random() < 0.3,
    )  # fmt: skip


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and the seconds until the last error."""
    plan = make_plan(seed)
    row = {"trial": "kills", **asdict(plan), "wrong": []}
    try:
        results = run_ranks(take_part, plan.ranks, plan, timeout=LIMIT, deaths=plan.victims)
    except RankFailure as failure:
        row["wrong"].append(f"a rank failed or hung: {shorten(failure)}")
        return row
    survivors = [rank for rank in range(plan.ranks) if rank not in plan.victims]
    seconds = []
    for rank in survivors:
        found = results[rank]
        row["wrong"] += [f"rank {rank}: {text}" for text in found["wrong"]]
        if found["seconds"] is not None:
            seconds.append(found["seconds"])
    row["seconds"] = max(seconds, default=None)
    row["errors"] = sorted({results[rank]["error"] for rank in survivors})
    return row


def shorten(failure: RankFailure) -> str:
    """Return the beginning and the end of what a trial's ranks wrote."""
    text = str(failure)
    return text if len(text) < 8000 else f"{text[:5000]}\n...\n{text[-3000:]}"


# ---- On each rank.


@contextlib.contextmanager
def open_on(ctx, machines: str):
    """Let the ranks open communicators on such machines, "" for one, in processes that have opened others before."""
    import collectives.rendezvous.world as world

    world._generation, world._world = 0, None
    with apart(ctx, machines) if machines else contextlib.nullcontext():
        yield


def take_part(ctx, plan: Plan) -> dict:
    """One rank's part of a trial."""
    clock = _Clock(ctx)
    with open_on(ctx, plan.machines):
        return _Rank(ctx, plan, clock).run()


class _Clock:
    """The moment of the first death, in a page that the ranks share by rank 0's file descriptor."""

    def __init__(self, ctx):
        ends = os.memfd_create("moment") if ctx.rank == 0 else None
        if ends is not None:
            os.ftruncate(ends, 8)
        path = ctx.exchange(f"/proc/{os.getpid()}/fd/{ends}" if ctx.rank == 0 else None)[0]
        file = os.open(path, os.O_RDWR)
        self._page = mmap.mmap(file, 8)
        os.close(file)
        ctx.barrier()
        if ends is not None:
            os.close(ends)

    def strike(self) -> None:
        if self.read() == 0:
            self._page[:] = struct.pack("<q", time.monotonic_ns())

    def read(self) -> int:
        return struct.unpack("<q", self._page[:])[0]


class _Rank:
    def __init__(self, ctx, plan: Plan, clock: _Clock):
        self.ctx, self.plan, self.clock = ctx, plan, clock
        self.is_victim = ctx.rank in plan.victims
        self.survivors = [rank for rank in range(plan.ranks) if rank not in plan.victims]
        self.comm = self.unique_id = None
        self.wrong: list[str] = []

    def die(self) -> None:
        self.clock.strike()
        how = self.plan.how
        if how == "abort" and self.comm is not None:
            self.comm.abort()
            os._exit(3)
        if how == "exit":
            os._exit(3)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
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
            self.wrong.append("no error came")
        except CollectivesError as found:
            error = found
        if self.is_victim:  # its own end is about to come
            time.sleep(LIMIT)
        spent = (time.monotonic_ns() - self.clock.read()) / 1e9 if self.clock.read() else None
        if error is not None:
            self.check(error, spent)
        self.end_stopped()
        # On several nodes without a launcher's store, that of rank 0 connects the survivors.
        connected = not self.plan.machines or 0 not in self.plan.victims
        if self.comm is not None and self.plan.kind not in ("init", "close") and connected:
            self.go_on()
        if self.comm is not None and not self.comm.closed:
            self.comm.abort()
        return {"wrong": self.wrong, "seconds": spent, "error": type(error).__name__}

    def check(self, error, spent: float | None) -> None:
        peers, victims = set(error.peers), set(self.plan.victims)
        text = f"{type(error).__name__} {error.peers}: {error}"
        # With rank 0 of several nodes goes the store in which causes are posted.
        known = not self.plan.machines or 0 not in victims
        if not peers & victims and known:
            self.wrong.append(f"names no rank that died: {text}")
        if peers - victims and known:
            self.wrong.append(f"names a rank that lives: {text}")
        limit = SOON + (TIMEOUT if self.plan.how == "stop" else 0)
        limit += INIT_TIMEOUT if self.plan.kind == "init" else 0
        if spent is None or not 0 <= spent <= limit:
            self.wrong.append(f"came after {spent} s: {text}")

    def end_stopped(self) -> None:
        """Kill the ranks that are stopped, once all survivors have had their errors."""
        self.ctx.barrier(ranks=self.survivors)
        if self.plan.how == "stop" and self.ctx.rank == self.survivors[0]:
            for rank in self.plan.victims:
                os.kill(self.ctx.pids[rank], signal.SIGKILL)

    def go_on(self) -> None:
        smaller = self.comm.shrink(self.plan.victims, abort=True)
        x = torch.full((1000,), float(smaller.rank + 1))
        smaller.all_reduce(x)
        if set(x.tolist()) != {smaller.size * (smaller.size + 1) / 2}:
            self.wrong.append(f"a wrong sum after shrink: {x[:4]}")
        smaller.close()

    # ---- The programs.

    def program(self) -> None:
        plan = self.plan
        if plan.kind == "init":
            self.unique_id = self.ctx.unique_id()
            if self.is_victim and not plan.delay:
                self.die()
            if self.is_victim:
                self.die_soon()
            else:
                self.clock.strike()
            self.open()
            self.loop(lambda: self.comm.barrier())
        self.open()
        if plan.how == "stop":
            self.comm.timeout = TIMEOUT
        arrays = self.arrays()
        for _ in range(plan.calls):
            self.operation(arrays)
        self.ctx.barrier()
        if self.is_victim:
            self.die_soon()
        ways = {
            "operation": lambda: self.operation(arrays), "idle": lambda: (time.sleep(0.05), self.operation(arrays)),
            "async": lambda: self.asynchronous(arrays), "group": lambda: self.group(arrays), "split": self.split,
            "shrink": lambda: self.operation(arrays), "close": lambda: self.operation(arrays),
        }  # fmt: skip
        self.loop(ways[plan.kind])

    def open(self) -> None:
        import collectives

        if self.comm is None and self.plan.machines:
            self.comm = collectives.init(timeout=INIT_TIMEOUT if self.plan.kind == "init" else LIMIT / 2)
        elif self.comm is None and self.unique_id is not None:
            self.open_by_id()
        elif self.comm is None:
            self.comm = self.ctx.new_communicator()

    def open_by_id(self) -> None:
        from collectives.comm.communicator import Communicator
        from collectives.comm.engine import get_engine

        ctx, engine = self.ctx, get_engine("host")
        engine.library.set_init_timeout(INIT_TIMEOUT)
        try:
            self.comm = Communicator(engine, self.unique_id, ctx.rank, ctx.size, device="cpu", local_rank=ctx.rank)
        finally:
            engine.library.set_init_timeout(60.0)

    def loop(self, call) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            call()

    def arrays(self):
        n, size = self.plan.count, self.plan.ranks
        make = self.comm.empty if self.plan.shared else torch.empty
        return make(n, dtype=torch.float32).fill_(1.0), make(n * size, dtype=torch.float32).fill_(1.0)

    def operation(self, arrays, **options):
        comm, (x, whole), op = self.comm, arrays, self.plan.op
        x.fill_(1.0)
        if op == "all_reduce":
            return comm.all_reduce(x, **options)
        if op == "reduce":
            return comm.reduce(x, 0, **options)
        if op == "reduce_scatter":
            return comm.reduce_scatter(x, whole, **options)
        if op == "all_gather":
            return comm.all_gather(whole, x, **options)
        if op == "broadcast":
            return comm.broadcast(x, comm.size - 1, **options)
        if op == "all_to_all":
            return comm.all_to_all(torch.empty_like(whole), whole, **options)
        if op == "send":
            return self.ring(x)
        return comm.barrier()

    def ring(self, x) -> None:
        comm = self.comm
        with comm.group():
            comm.send(x, (comm.rank + 1) % comm.size)
            comm.recv(torch.empty_like(x), (comm.rank - 1) % comm.size)

    def asynchronous(self, arrays) -> None:
        if self.plan.op in ("send", "barrier"):
            return self.operation(arrays)
        works = [self.operation(arrays, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        return None

    def group(self, arrays) -> None:
        x, whole = arrays
        with self.comm.group():
            self.comm.all_reduce(x.fill_(1.0))
            self.comm.all_gather(whole, x)

    def split(self) -> None:
        child = self.comm.split(0, -self.comm.rank)
        child.close()
