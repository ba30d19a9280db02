"""Ring and direct on real ranks: every dtype, op and odd size, in place and not, blocking and not; what they refuse."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from collectives.comm.algorithms.schedule import shard_bounds
from collectives.errors import InvalidArgument, InvalidUsage
from tests import oracle
from tests.buffers import memory_of
from tests.conformance.cases import (
    REDUCTIONS,
    Case,
    PreMulOps,
    Prepared,
    describe,
    is_refused_by_nccl,
    reduced,
    scalar_of,
)
from tests.conformance.worlds import ALGORITHMS, check
from tests.oracle import DTYPES
from tests.ranks import run_ranks

WORLDS = [
    *[pytest.param("host", n, id=f"host-{n}") for n in (1, 2, 3, 4, 5)],
    pytest.param("nccl", 1, id="nccl-1", marks=pytest.mark.gpu),
    pytest.param("nccl", 2, id="nccl-2-on-one-gpu", marks=pytest.mark.gpu),
]
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")  # and reduce by "native"
TORCH_NAMES = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
OPS = (*oracle.OPS, "premul")


def tensor_at(engine: str, address: int, count: int, dtype: str):
    """Memory that somebody else owns, as a tensor."""
    name = getattr(torch, TORCH_NAMES.get(dtype, dtype))
    nbytes = count * DTYPES[dtype].itemsize
    if not count:
        return torch.empty(0, dtype=name, device="cpu" if engine == "host" else "cuda")
    if engine == "host":
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8).view(name)

    class Block:
        __cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Block(), device="cuda").view(name)


class ByAlgorithm(Prepared):
    """A case of the suite, called on a Communicator by an algorithm's name."""

    def __init__(self, case, communicator, memory, algorithm: str, engine: str):
        self.communicator, self.algorithm, self.engine = communicator, algorithm, engine
        in_rank_order = algorithm == "direct" or (algorithm == "native" and engine == "host")
        super().__init__(case, communicator, memory, PreMulOps([]), in_rank_order)

    def issue(self, async_op=False):
        case, name = self.case, self.case.collective
        send, recv = self.addresses()
        out = tensor_at(self.engine, recv, self.recv_count, case.dtype)
        options = {"async_op": async_op} | ({} if name == "reduce" else {"algorithm": self.algorithm})
        if name in REDUCTIONS:
            options["op"] = scalar_of(self.dtype, self.rank) if case.op == "premul" else case.op
            if case.op == "premul" and not self.dtype.is_float:
                options["op"] = int(options["op"])
        if name == "all_reduce":
            work = self.communicator.all_reduce(out, **options)
        elif name == "reduce":
            inp = tensor_at(self.engine, send, self.send_count, case.dtype)
            work = self.communicator.reduce(inp, case.root, **options)
        else:
            inp = tensor_at(self.engine, send, self.send_count, case.dtype)
            work = getattr(self.communicator, name)(out, inp, **options)
        assert (work is not None) == async_op
        if work is not None:
            assert work.wait(60)
            assert work.done() and work.exception() is None

    def wrong_values(self, got):
        case, dtype = self.case, self.dtype
        if self.algorithm != "ring" or case.collective not in REDUCTIONS:
            return super().wrong_values(got)  # of direct and on the host: the very bits of the sum in rank order
        start = self.rank * case.count if case.collective == "reduce_scatter" else 0
        seeds = tuple(self.seed(r) for r in range(self.n))
        inputs, scalars, _ = reduced(dtype, case.op, self.send_count, seeds, start, start + case.count)
        bounds = (0,) * (self.rank + 1) + (case.count,) * (self.n - self.rank)
        if case.collective == "all_reduce":
            bounds = shard_bounds(case.count, self.n, dtype.itemsize)
        text = []
        for piece in range(self.n):
            # Piece p is summed from rank p + 1 round to p. Partial sums are carried in fp32, so that a ring keeps the
            # bound of one rounding, too.
            begin, end = bounds[piece], bounds[piece + 1]
            order = [(piece + 1 + k) % self.n for k in range(self.n)]
            rows = [inputs[r][begin:end] for r in order]
            factors = scalars and [scalars[r] for r in order]
            good = oracle.within(dtype, got[begin:end], case.op, rows, factors)
            want = oracle.exact(dtype, case.op, rows, factors)
            text += describe(good, got[begin:end], want, rows, f"of piece {piece} are not within the tolerance")
        return text


def matrix(ctx, algorithm):
    """Types x ops x forms; the sizes, addresses and blocking calls go round as the cases go on."""
    comm, memory = ctx.communicator(), memory_of(ctx.engine)
    n = ctx.size
    found: list[str] = []
    forms = [
        (dtype, collective, op, inplace)
        for dtype in DTYPES
        for collective in (*OPERATIONS, *(["reduce"] if algorithm == "native" else []))
        for op in (OPS if collective in REDUCTIONS else ("sum",))
        for inplace in ((True,) if collective in ("all_reduce", "reduce") else (False, True))
    ]
    for k, (dtype, collective, op, inplace) in enumerate(forms):
        if k % {1: 3, 4: 3, 5: 2}.get(n, 1) or is_refused_by_nccl(ctx.engine, n, DTYPES[dtype], op):
            continue
        itemsize = DTYPES[dtype].itemsize
        sizes = sorted({0, 1, n - 1, n + 1, 97, 16 * n, 256 // itemsize, 499})
        count, offset = sizes[k % len(sizes)], (0, 1, 3)[k % 3] * itemsize
        how = {"op": op, "root": k % n, "inplace": inplace, "offset": offset, "null": k % 2 == 0}
        case = Case(collective, dtype, count, **how)
        prepared = ByAlgorithm(case, comm, memory, algorithm, ctx.engine)
        try:
            prepared.issue(async_op=k % 4 < 2)
        except Exception as error:
            raise AssertionError(f"{case} by {algorithm} on rank {ctx.rank} of {n}: {error!r}") from error
        memory.synchronize()
        found += prepared.problems()
        if len(found) > 5:
            break
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
@pytest.mark.parametrize("algorithm", ("native", *ALGORITHMS))
def test_matrix(algorithm, engine, n):
    check(matrix_of_small_chunks, engine, n, algorithm)


def matrix_of_small_chunks(ctx, algorithm):
    os.environ["COLLECTIVES_CHUNK"] = "256"
    try:
        ctx._key = (*ctx._key, "chunks of 256 bytes")
        return matrix(ctx, algorithm)
    finally:
        del os.environ["COLLECTIVES_CHUNK"]


def bits(ctx, count):
    """Results of all algorithms and several chunk sizes, against native's."""
    found = []
    device = ctx.communicator().device
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        mine = torch.randn(count, generator=torch.Generator().manual_seed(ctx.rank)).to(dtype).to(device)
        for op in ("sum", "avg", 0.1):
            native = mine.clone()
            ctx.communicator().all_reduce(native, op)
            ring = None
            for chunk in ("64", "1000", "65536"):
                os.environ["COLLECTIVES_CHUNK"] = chunk
                with ctx.new_communicator() as comm:
                    direct, other = mine.clone(), mine.clone()
                    comm.all_reduce(direct, op, algorithm="direct")
                    comm.all_reduce(other, op, algorithm="ring")
                    # A bucket of another size: the same elements, with others behind them.
                    longer = torch.cat([mine, mine])
                    comm.all_reduce(longer, op, algorithm="direct")
                del os.environ["COLLECTIVES_CHUNK"]
                results = {"direct": direct, "the longer bucket": longer[:count]}
                if ctx.engine == "host":
                    results["native"] = native
                for name, result in results.items():
                    if not torch.equal(result.view(torch.uint8), direct.view(torch.uint8)):
                        found.append(f"{dtype} {op} chunk {chunk}: {name} has other bits than direct")
                ring = other if ring is None else ring
                if not torch.equal(ring.view(torch.uint8), other.view(torch.uint8)):
                    found.append(f"{dtype} {op} chunk {chunk}: ring's bits depend on it")
    return found


@pytest.mark.parametrize(("engine", "n"), [WORLDS[2], WORLDS[-1]])
def test_bits_depend_on_no_chunk_and_no_bucket(engine, n):
    check(bits, engine, n, 1009)


def mixed_calls(ctx):
    """Native calls, rings and directs, blocking and not: each sees what the one before has left."""
    comm, n = ctx.communicator(), ctx.size
    x = torch.full((3000,), float(ctx.rank + 1), device=comm.device)
    parts = torch.zeros(3000 * n, device=comm.device)
    works = []
    for step in range(24):
        algorithm = ("native", "ring", "direct")[(step * 7 + step // 5) % 3]
        works.append(comm.all_reduce(x, "avg", algorithm=algorithm, async_op=step % 3 != 2))
        works.append(comm.all_gather(parts, x, algorithm=algorithm, async_op=step % 4 != 2))
        works.append(comm.reduce_scatter(x, parts, "avg", algorithm=algorithm, async_op=step % 5 != 2))
        if ctx.engine == "nccl":
            for work in filter(None, works[-3:]):
                work.wait()
    for work in filter(None, works):
        assert work.wait(60)
    want = (n + 1) / 2
    return [] if torch.allclose(x, torch.full_like(x, want)) else [f"rank {ctx.rank}: {x[:3]}, want {want}"]


@pytest.mark.parametrize(("engine", "n"), [WORLDS[1], WORLDS[2], WORLDS[-1]])
def test_calls_take_effect_in_order(engine, n):
    check(mixed_calls, engine, n)


def does_not_block(ctx):
    """Rank 0 gets its Work before the others have called anything, once the ranks have made a first call."""
    found = []
    with ctx.new_communicator() as comm:
        comm.all_reduce(torch.ones(1), algorithm="ring", async_op=True).wait()  # makes the communicator of the steps
        for algorithm in (*ALGORITHMS, "ring"):
            x = torch.full((5000,), float(ctx.rank))
            if ctx.rank:
                ctx.barrier()
            work = comm.all_reduce(x, algorithm=algorithm, async_op=True)
            if not ctx.rank:
                found += [f"{algorithm} was done with nobody there"] * work.done()
                ctx.barrier()
            future = work.future()
            assert future.wait() is x
            found += [f"{algorithm}: {x[0]}"] * (x[0].item() != sum(range(ctx.size)))
    return found


def test_async_calls_do_not_block():
    check(does_not_block, "host", 3)


def refusals(ctx):
    x = torch.ones(100)
    comm = ctx.communicator()
    for name in ("rings", 3, ["ring"]):
        with pytest.raises(InvalidArgument, match="'native', 'ring', 'direct' or None"):
            comm.all_reduce(x, algorithm=name)
    for algorithm in ALGORITHMS:
        with pytest.raises(InvalidUsage, match="group"), comm.group():
            comm.all_reduce(x, algorithm=algorithm)
        with pytest.raises(InvalidArgument, match="can't reduce bool"):
            comm.all_reduce(x > 0, algorithm=algorithm)
        for op in (None, np.ones(2)):
            with pytest.raises(InvalidArgument, match="op must be one of"):
                comm.all_reduce(x, op, algorithm=algorithm)
        with pytest.raises(InvalidArgument, match="async_op"):
            comm.all_reduce(x, algorithm=algorithm, stream=3)
        y = torch.zeros(5 * ctx.size, dtype=torch.complex64)
        comm.all_gather(y, torch.full((5,), 1j), algorithm=algorithm)  # moves anything
        assert y.tolist() == [1j] * y.numel()
    comm.all_reduce(x, algorithm="direct")
    assert x.tolist() == [ctx.size] * 100
    with ctx.new_communicator(deterministic=True) as ordered:
        assert ordered.deterministic and not comm.deterministic
        for inner in (ordered, ordered.split(0)):
            assert inner.deterministic
            for op in ("sum", dist.ReduceOp.SUM, 2.0):
                with pytest.raises(InvalidUsage, match="rank order"):
                    inner.all_reduce(x, op, algorithm="ring")
            for op in ("max", dist.ReduceOp.MAX, dist.ReduceOp.MIN):  # one result in any order
                inner.all_reduce(x, op, algorithm="ring")
            inner.all_gather(y, torch.full((5,), 2j), algorithm="ring")
            for algorithm in ("direct", "native", None):
                inner.all_reduce(x, "avg", algorithm=algorithm)
            if inner is not ordered:
                inner.close()
    closed = ctx.new_communicator()
    closed.all_reduce(x, "max", algorithm="ring")
    closed.close()
    with pytest.raises(InvalidUsage, match="closed"):
        closed.all_reduce(x, algorithm="ring")
    return []


def test_refusals():
    check(refusals, "host", 2)


def misaligned(ctx, algorithm):
    """Arrays between two elements' places, on one rank only."""
    comm = ctx.communicator()
    n = ctx.size

    def array(count, shifted):
        begin = int(shifted and ctx.rank == 1)
        return np.frombuffer(bytearray(4 * count + 8), np.uint8)[begin : 4 * count + begin].view(np.float32)

    values = np.random.default_rng(ctx.rank).standard_normal(97 * n).astype(np.float32)
    for op in ("sum", "avg", "max", 0.5):
        for async_op in (False, True):
            results = []
            for shifted in (False, True):
                whole, large, part = array(97 * n, shifted), array(97 * n, shifted), array(97, shifted)
                whole[:] = large[:] = values
                place = large[97 * ctx.rank : 97 * (ctx.rank + 1)]
                for work in (
                    comm.all_reduce(whole, op, algorithm=algorithm, async_op=async_op),
                    comm.reduce_scatter(part, large, op, algorithm=algorithm, async_op=async_op),
                    comm.reduce_scatter(place, large, op, algorithm=algorithm, async_op=async_op),
                ):
                    assert work is None or work.wait(30)
                results.append((whole, part, place))
            assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_misaligned_arrays_on_one_rank(algorithm):
    run_ranks(misaligned, 3, algorithm)


def calls_of_threads(ctx, algorithm):
    comm = ctx.communicator()
    wrong = []

    def call(value):
        for _ in range(100):
            x = torch.full((1000,), float(value))
            comm.all_reduce(x, 2.0, algorithm=algorithm)
            wrong.extend(x[x != 2 * value].tolist())

    threads = [threading.Thread(target=call, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_threads_do_not_share_scratch(algorithm):
    assert run_ranks(calls_of_threads, 1, algorithm) == [[]]


def time_of_a_plan(ctx):
    os.environ["COLLECTIVES_CHUNK"] = "1024"
    comm = ctx.new_communicator()
    begun = time.monotonic()
    comm.all_reduce(torch.ones(2 << 20), algorithm="ring")
    comm.close()
    return time.monotonic() - begun


def test_a_plan_of_many_chunks_takes_time_in_proportion():
    """12,000 tasks: 2 s; minutes where each one looks through all."""
    assert max(run_ranks(time_of_a_plan, 2, timeout=120, fresh=True)) < 60
