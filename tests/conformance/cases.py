"""One operation of the conformance suite: its buffers, its call, and everything that must hold afterwards.

A :class:`Case` is the same on every rank. :class:`Prepared` makes this rank's buffers (between guard zones), makes the
call, and compares with the oracle. Inputs are made from a seed and the rank, so every rank can work out what it must
receive.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tests import oracle
from tests.buffers import Guarded
from tests.oracle import DTYPES, DType

__all__ = ["COLLECTIVES", "REDUCTIONS", "Case", "Prepared", "PreMulOps", "run_cases", "run_group", "sizes"]

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
COLLECTIVES = (*REDUCTIONS, "all_gather", "broadcast", "all_to_all", "gather", "scatter")
# Pieces of `count` elements that a rank sends and receives; "n" is one for each rank.
PIECES = {
    "all_reduce": (1, 1),
    "reduce_scatter": ("n", 1),
    "reduce": (1, 1),
    "all_gather": (1, "n"),
    "broadcast": (1, 1),
    "all_to_all": ("n", "n"),
    "gather": (1, "n"),
    "scatter": ("n", 1),
    "transfer": (1, 1),
}
MAX_REPORTED = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """``transfer`` is a send from ``root`` to ``peer``. ``offset``: bytes past a 64-byte boundary. ``null``: addresses
    of buffers that NCCL says are not used on this rank, or of no elements, are NULL. ``comm``: which communicator."""

    collective: str
    dtype: str
    count: int
    op: str = "sum"
    root: int = 0
    peer: int = 0
    inplace: bool = False
    offset: int = 0
    null: bool = False
    comm: int = 0
    seed: int = 1

    def __str__(self):
        fields = dataclasses.fields(self)
        extra = [f"{f.name}={getattr(self, f.name)}" for f in fields[3:] if getattr(self, f.name) != f.default]
        return " ".join([self.collective, self.dtype, f"count={self.count}", *extra])


def sizes(n: int, chunk: int) -> list[int]:
    """The counts that are worth trying with n ranks and staging chunks of ``chunk`` elements."""
    return sorted({0, 1, n - 1, n + 1, 97, chunk - 1, chunk, chunk + 1, 3 * chunk + 5})


@functools.lru_cache(maxsize=4096)
def made(dtype: DType, count: int, seed: int) -> np.ndarray:
    values = oracle.make(dtype, count, seed)
    values.setflags(write=False)
    return values


def scalar_of(dtype: DType, rank: int):
    """The scalar of this rank's pre-multiplied sum, a value that the type holds exactly."""
    if not dtype.is_float:
        return dtype.storage.type(rank + 2)
    value = oracle.decode(dtype, oracle.encode(dtype, np.array([0.75 + rank * 0.5])))[0]
    return value.item()


@functools.lru_cache(maxsize=512)
def reduced(dtype: DType, op: str, count: int, seeds: tuple, start: int, end: int) -> tuple:
    """Inputs and rank-ordered result of elements [start, end) of a reduction, with the scalars of a premul."""
    inputs = [made(dtype, count, seed)[start:end] for seed in seeds]
    scalars = [scalar_of(dtype, r) for r in range(len(seeds))] if op == "premul" else None
    return inputs, scalars, oracle.rank_ordered(dtype, op, inputs, scalars)


class PreMulOps:
    """The pre-multiplied sums of some communicators, one for each type, made when first needed."""

    def __init__(self, comms):
        self.comms = comms
        self.ops: dict = {}

    def code(self, comm_index: int, dtype: DType) -> int:
        key = (comm_index, dtype.code)
        if key not in self.ops:
            comm = self.comms[comm_index]
            self.ops[key] = comm.create_premul_sum(scalar_of(dtype, comm.rank), dtype.code)
        return self.ops[key]

    def destroy(self) -> None:
        for (index, _), op in self.ops.items():
            self.comms[index].destroy_op(op)
        self.ops.clear()


OP_CODES = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class Prepared:
    """One rank's part of a case: allocate, :meth:`issue`, then :meth:`problems`."""

    def __init__(self, case: Case, comm, memory, premul: PreMulOps, exact_bits: bool):
        self.case, self.comm, self.premul, self.exact_bits = case, comm, premul, exact_bits
        self.dtype = DTYPES[case.dtype]
        self.n, self.rank = comm.size, comm.rank
        send_pieces, recv_pieces = (self.n if p == "n" else p for p in PIECES[case.collective])
        self.send_count, self.recv_count = send_pieces * case.count, recv_pieces * case.count
        self.sends, self.receives = self.roles()
        alike = (self.sends and self.receives) or case.collective in ("reduce", "broadcast")
        self.inplace = case.inplace and alike and case.collective != "transfer"
        self.prepare(memory)

    def roles(self) -> tuple[bool, bool]:
        """Does this rank's send buffer count, and its receive buffer?"""
        case = self.case
        at_root = self.rank == case.root
        return {
            "reduce": (True, at_root),
            "gather": (True, at_root),
            "broadcast": (at_root, True),
            "scatter": (at_root, True),
            "transfer": (at_root, self.rank == case.peer),
        }.get(case.collective, (True, True))

    def seed(self, rank: int) -> int:
        return self.case.seed * 1000 + rank

    def sent_by(self, rank: int) -> np.ndarray:
        return made(self.dtype, self.send_count, self.seed(rank))

    def prepare(self, memory) -> None:
        case, size = self.case, self.dtype.itemsize
        mine = self.sent_by(self.rank)
        self.at_send = self.at_recv = 0  # bytes into the buffers
        if self.inplace:
            self.send = self.recv = Guarded(memory, max(self.send_count, self.recv_count) * size, case.offset)
            if self.send_count < self.recv_count:
                self.at_send = self.rank * case.count * size
            elif self.recv_count < self.send_count:
                self.at_recv = self.rank * case.count * size
            if self.sends:
                self.send.write(mine, self.at_send)
        else:
            self.send = Guarded(memory, self.send_count * size, case.offset)
            self.recv = Guarded(memory, self.recv_count * size, case.offset)
            self.send.write(mine)
        self.before = self.send.bytes().copy()

    def addresses(self) -> tuple[int, int]:
        unused_send = self.case.null and (not self.sends or self.send_count == 0)
        unused_recv = self.case.null and (not self.receives or self.recv_count == 0)
        send = 0 if unused_send else self.send.address + self.at_send
        return send, 0 if unused_recv else self.recv.address + self.at_recv

    def issue(self, stream: int = 0) -> None:
        case, comm, code = self.case, self.comm, self.dtype.code
        send, recv = self.addresses()
        name = case.collective
        if name == "transfer":
            if self.sends:
                comm.send(send, case.count, code, case.peer, stream)
            if self.receives:
                comm.recv(recv, case.count, code, case.root, stream)
        elif name in REDUCTIONS:
            op = self.premul.code(case.comm, self.dtype) if case.op == "premul" else OP_CODES[case.op]
            root = (case.root,) if name == "reduce" else ()
            getattr(comm, name)(send, recv, case.count, code, op, *root, stream)
        elif name in ROOTED:
            getattr(comm, name)(send, recv, case.count, code, case.root, stream)
        else:
            getattr(comm, name)(send, recv, case.count, code, stream)

    def moved(self) -> np.ndarray:
        """What a collective that only moves data must leave in this rank's receive buffer."""
        case = self.case
        if case.collective in ("all_gather", "gather"):
            return np.concatenate([self.sent_by(r) for r in range(self.n)])
        piece = slice(self.rank * case.count, (self.rank + 1) * case.count)
        if case.collective == "all_to_all":
            return np.concatenate([self.sent_by(r)[piece] for r in range(self.n)])
        if case.collective == "scatter":
            return self.sent_by(case.root)[piece]
        return self.sent_by(case.root)

    def problems(self) -> list[str]:
        found = []
        if not self.send.guards_intact():
            found.append("wrote outside of the send buffer")
        if self.recv is not self.send and not self.recv.guards_intact():
            found.append("wrote outside of the receive buffer")
        if self.recv is not self.send or not self.receives:
            if not np.array_equal(self.send.bytes(), self.before):
                found.append("changed the send buffer")
        if not self.receives:
            if self.recv is not self.send and not self.recv.still_poisoned():
                found.append("wrote into a receive buffer that isn't used")
            return [f"{self.case} on rank {self.rank}: {text}" for text in found]
        got = self.recv.values(self.dtype.storage, self.at_recv, self.recv_count)
        found += self.wrong_values(got)
        return [f"{self.case} on rank {self.rank} of {self.n}: {text}" for text in found]

    def wrong_values(self, got: np.ndarray) -> list[str]:
        case, dtype = self.case, self.dtype
        if case.collective not in REDUCTIONS:
            want = self.moved()
            good = got.view(np.uint8) == want.view(np.uint8)
            return [] if good.all() else [f"{(~good).sum()} of {good.size} bytes differ, first at {np.argmin(good)}"]
        start = self.rank * case.count if case.collective == "reduce_scatter" else 0
        seeds = tuple(self.seed(r) for r in range(self.n))
        inputs, scalars, want = reduced(dtype, case.op, self.send_count, seeds, start, start + case.count)
        if self.exact_bits:  # those of the sum in rank order, which is within the tolerance (tests/harness)
            good = oracle.same(dtype, got, want, zeros_alike=case.op in ("max", "min"))
            return describe(good, got, want, inputs, "differ")
        good = oracle.within(dtype, got, case.op, inputs, scalars, narrow_sums=True)
        want = oracle.exact(dtype, case.op, inputs, scalars) if not good.all() else got
        return describe(good, got, want, inputs, "are not within the tolerance")


def describe(good, got, want, inputs, what) -> list[str]:
    if good.all():
        return []
    i = int(np.argmin(good))
    return [
        f"{(~good).sum()} of {good.size} elements {what}; the first at {i}: got {got[i]!r}, want {want[i]!r}, "
        f"stored inputs {[x[i].item() for x in inputs]}"
    ]


def is_refused_by_nccl(engine: str, ranks: int, dtype: DType, op: str) -> bool:
    """Is it a reduction that NCCL has not, and the binding refuses: a factor on float8 over one rank?"""
    return engine == "nccl" and ranks == 1 and op == "premul" and dtype.name.startswith("float8")


def run_cases(ctx, cases, comm=None, *, queue=None) -> list[str]:
    """Run the cases one after the other on this rank; return what is wrong. ``queue``: put them all in, then wait."""
    from tests.buffers import memory_of

    comm = comm or ctx.comm()
    memory = memory_of(ctx.engine)
    premul = PreMulOps([comm])
    exact_bits = ctx.engine == "host"
    found: list[str] = []
    waiting: list[Prepared] = []
    for case in cases:
        if is_refused_by_nccl(ctx.engine, comm.size, DTYPES[case.dtype], case.op):
            continue
        prepared = Prepared(case, comm, memory, premul, exact_bits)
        grouped = case.collective == "transfer" and case.root == case.peer
        try:
            if grouped:
                ctx.library.group_start()
            prepared.issue(queue.handle if queue else 0)
            if grouped:
                ctx.library.group_end()
        except Exception as error:
            raise AssertionError(f"{case} on rank {comm.rank} of {comm.size}: {error!r}") from error
        if queue:
            waiting.append(prepared)
        else:
            memory.synchronize()
            found += prepared.problems()
        if len(found) > MAX_REPORTED:
            return [*found[:MAX_REPORTED], "and more"]
    if queue:
        queue.wait(queue.record(), 60)
        for prepared in waiting:
            found += prepared.problems()
    premul.destroy()
    return found[:MAX_REPORTED]


def run_group(ctx, comms, cases, order=None) -> list[str]:
    """Run the cases in one group over ``comms`` (``case.comm`` says which), posted in ``order`` (their indices)."""
    from tests.buffers import memory_of

    memory, premul = memory_of(ctx.engine), PreMulOps(comms)
    prepared = [Prepared(case, comms[case.comm], memory, premul, ctx.engine == "host") for case in cases]
    ctx.library.group_start()
    for i in order or range(len(prepared)):
        prepared[i].issue()
    ctx.library.group_end()
    memory.synchronize()
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    return found
