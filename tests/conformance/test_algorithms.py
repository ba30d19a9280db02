"""Ring and direct on real ranks: every dtype, op and odd size, in place and not, blocking and not; what they refuse,
and what happens when a rank calls something else, comes late or dies."""

from __future__ import annotations

import collections
import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest

from collectives.comm.algorithms.schedule import shard_bounds
from tests import oracle
from tests.conformance.cases import REDUCTIONS, Case, PreMulOps, Prepared, describe, reduced, scalar_of
from tests.conformance.worlds import check
from tests.oracle import DTYPES
from tests.ranks import Died, run_ranks

WORLDS = [
    *[pytest.param("host", n, id=f"host-{n}") for n in (1, 2, 3, 4, 5)],
    pytest.param("nccl", 1, id="nccl-1", marks=pytest.mark.gpu),
    pytest.param("nccl", 2, id="nccl-2-on-one-gpu", marks=pytest.mark.gpu),
]
ALGORITHMS = ("ring", "direct")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
TORCH_NAMES = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
OPS = (*oracle.OPS, "premul")
KILLED = Died(signal=9, exitcode=0)


def tensor_at(engine: str, address: int, count: int, dtype: str):
    """Memory that somebody else owns, as a tensor."""
    import torch

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
        super().__init__(case, communicator, memory, PreMulOps([]), algorithm == "direct")

    def issue(self, async_op=False):
        case, name = self.case, self.case.collective
        send, recv = self.addresses()
        out = tensor_at(self.engine, recv, self.recv_count, case.dtype)
        options = {"algorithm": self.algorithm, "async_op": async_op}
        if name in REDUCTIONS:
            options["op"] = scalar_of(self.dtype, self.rank) if case.op == "premul" else case.op
            if case.op == "premul" and not self.dtype.is_float:
                options["op"] = int(options["op"])
        if name == "all_reduce":
            work = self.communicator.all_reduce(out, **options)
        else:
            inp = tensor_at(self.engine, send, self.send_count, case.dtype)
            work = getattr(self.communicator, name)(out, inp, **options)
        assert (work is not None) == async_op
        if work is not None:
            assert work.wait(60)
            assert work.done() and work.exception() is None

    def wrong_values(self, got):
        case, dtype = self.case, self.dtype
        if self.algorithm == "direct" or case.collective not in REDUCTIONS:
            return super().wrong_values(got)  # direct: the very bits of the sum in rank order
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
    from tests.buffers import memory_of

    comm, memory = ctx.communicator(), memory_of(ctx.engine)
    n = ctx.size
    found: list[str] = []
    forms = [
        (dtype, collective, op, inplace)
        for dtype in DTYPES
        for collective in OPERATIONS
        for op in (OPS if collective in REDUCTIONS else ("sum",))
        for inplace in ((True,) if collective == "all_reduce" else (False, True))
    ]
    for k, (dtype, collective, op, inplace) in enumerate(forms):
        if k % {1: 3, 4: 3, 5: 2}.get(n, 1):
            continue
        itemsize = DTYPES[dtype].itemsize
        sizes = sorted({0, 1, n - 1, n + 1, 97, 16 * n, 256 // itemsize, 499})
        count, offset = sizes[k % len(sizes)], (0, 1, 3)[k % 3] * itemsize
        case = Case(collective, dtype, count, op=op, inplace=inplace, offset=offset, null=k % 2 == 0)
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
@pytest.mark.parametrize("algorithm", ALGORITHMS)
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
    import torch

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
    import torch

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
    """Rank 0 gets its Work before the others have called anything: also the first call, which opens something."""
    import torch

    found = []
    with ctx.new_communicator() as comm:
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
    import torch

    from collectives.errors import InvalidArgument, InvalidUsage

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
            with pytest.raises(InvalidUsage, match="rank order"):
                inner.all_reduce(x, algorithm="ring")
            inner.all_reduce(x, "max", algorithm="ring")
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


def mismatch(ctx, what, async_op):
    """One rank calls something else: an error on all ranks with a table, nothing written, and the next call is good."""
    import torch

    from collectives.errors import Mismatch

    comm = ctx.communicator()
    odd = ctx.rank == 1
    x = torch.full((1000,), 7.0)
    before = x.clone()
    call = {
        "native": lambda: comm.all_reduce(x, algorithm="native" if odd else "ring", async_op=async_op),
        "direct": lambda: comm.all_reduce(x, algorithm="direct" if odd else "ring", async_op=async_op),
        "count": lambda: comm.all_reduce(x[: 999 if odd else 1000], algorithm="ring", async_op=async_op),
        "op": lambda: comm.all_reduce(x, "max" if odd else "sum", algorithm="direct", async_op=async_op),
        "dtype": lambda: comm.all_reduce(x.int() if odd else x, algorithm="ring", async_op=async_op),
    }[what]
    with pytest.raises(Mismatch) as caught:
        work = call()
        work.wait(30)
    text = str(caught.value)
    found = [f"no rank {r} in {text}" for r in range(ctx.size) if f"rank {r}" not in text]
    words = {
        "native": ["all_reduce (ring)"], "direct": ["direct", "ring"], "count": ["count=999", "count=1000"],
        "op": ["op=max", "op=sum"], "dtype": ["float32", "int32"],
    }[what]  # fmt: skip
    found += [f"no {word} in {text}" for word in words if word not in text]
    wrong = (1,) if not odd else tuple(r for r in range(ctx.size) if r != 1)
    found += [f"peers {caught.value.peers}"] * (caught.value.peers != wrong)
    found += ["something was written"] * (not torch.equal(x, before))
    for algorithm in ("ring", "native", "direct"):
        comm.all_reduce(x, "avg", algorithm=algorithm)
    found += [f"afterwards: {x[:3]}"] * (not torch.equal(x, before))
    return found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("what", ["native", "direct", "count", "op", "dtype"])
def test_mismatch_of(what, async_op):
    check(mismatch, "host", 3, what, async_op)


def dies(ctx, algorithm, async_op, victim):
    """The victim is killed while all ranks go on and on."""
    import torch

    from collectives.errors import RemoteError

    comm = ctx.new_communicator()
    x = torch.ones(1 << 18)
    comm.all_reduce(x, "max", algorithm=algorithm)
    if ctx.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        while time.monotonic() < begun + 30:
            work = comm.all_reduce(x, "max", algorithm=algorithm, async_op=async_op)
            if work is not None:
                work.wait(20)
    error = caught.value
    for again in (algorithm, "native"):  # at once, and not another hang
        with pytest.raises(Exception, match=f"rank {victim}|out of use"):
            comm.all_reduce(x, "max", algorithm=again)
    comm.abort()
    return error.peers, str(error)


@pytest.mark.parametrize(("algorithm", "async_op"), [("ring", False), ("ring", True), ("direct", False)])
def test_a_dead_peer(algorithm, async_op):
    results = run_ranks(dies, 3, algorithm, async_op, 1, deaths={1}, timeout=40)
    assert results[1] == KILLED
    for peers, text in (results[0], results[2]):
        assert peers == (1,) and "rank 1" in text and "all_reduce" in text, text


def killed_between_steps(ctx):
    """The victim meets the others, and is gone before its first step."""
    import torch

    from collectives.comm.algorithms import plan as plans
    from collectives.errors import CollectivesError, RemoteError

    comm = ctx.new_communicator()
    x = torch.ones(5000)
    comm.all_reduce(x, algorithm="ring")
    if ctx.rank == 0:
        plans.ExecutionPlan.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RemoteError) as caught:
        comm.all_reduce(x, algorithm="ring")
    with pytest.raises(CollectivesError):
        comm.all_reduce(x, algorithm="direct")
    comm.abort()
    return caught.value.peers, caught.value.op


def test_a_peer_that_dies_between_steps():
    results = run_ranks(killed_between_steps, 3, deaths={0}, timeout=40, fresh=True)
    assert [r for r in results if r != KILLED] == [((0,), "all_reduce by ring")] * 2


def fails_in_a_step(ctx):
    """A kernel that fails on one rank: the others don't wait for it, and all say so from then on."""
    import torch

    from collectives.comm.algorithms import plan as plans
    from collectives.errors import InvalidUsage, RemoteError

    comm = ctx.new_communicator()
    x = torch.ones(5000)
    comm.all_reduce(x, algorithm="ring")
    real = plans.run_kernel

    def fails(*_):
        raise MemoryError("made up")

    if ctx.rank == 1:
        plans.run_kernel = fails
    try:
        with pytest.raises(MemoryError if ctx.rank == 1 else RemoteError) as caught:
            comm.all_reduce(x, algorithm="ring")
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        with pytest.raises(InvalidUsage, match="out of use since an earlier call failed"):
            work.wait(20)
    finally:
        plans.run_kernel = real
    y = torch.ones(5)
    comm.all_reduce(y)  # the communicator itself goes on
    comm.close()
    return [] if y.tolist() == [ctx.size] * 5 and caught else ["native"]


def test_a_step_that_fails_on_one_rank():
    check(fails_in_a_step, "host", 3)


def times_out(ctx, async_op):
    import torch

    from collectives.errors import CollectivesError, CollectiveTimeout

    comm = ctx.new_communicator(timeout=1.0)
    x = torch.ones(100)
    comm.all_reduce(x, "max", algorithm="ring")
    told = None
    if ctx.rank == 0:
        with pytest.raises(CollectiveTimeout) as caught:
            work = comm.all_reduce(x, algorithm="ring", async_op=async_op)
            work.wait()
        told = caught.value.peers
        with pytest.raises(CollectivesError):
            comm.all_reduce(x, algorithm="ring")
    ctx.barrier()
    comm.abort()
    return told


@pytest.mark.parametrize("async_op", [False, True])
def test_the_time_limit_holds(async_op):
    assert run_ranks(times_out, 2, async_op)[0] == (1,)


def aborted(ctx):
    """An abort ends a step that waits: rank 1 has met rank 0 and does no step."""
    import torch

    from collectives.comm.algorithms import plan as plans
    from collectives.errors import Aborted, CollectivesError

    comm = ctx.new_communicator()
    x = torch.ones(100)
    comm.all_reduce(x, "max", algorithm="ring")
    real = plans.ExecutionPlan.run
    if ctx.rank == 1:
        plans.ExecutionPlan.run = lambda *_: None
    try:
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        if ctx.rank == 0:
            while comm._native.pending() or not comm._algorithms.pending():
                time.sleep(0.01)
            comm.abort()
            with pytest.raises((Aborted, CollectivesError)) as caught:
                work.wait(10)
            assert isinstance(caught.value, Aborted), repr(caught.value)
        ctx.barrier()
        if ctx.rank:
            work.wait(10)
            comm.abort()
    finally:
        plans.ExecutionPlan.run = real
    return []


def test_abort_ends_a_step():
    check(aborted, "host", 2)


class FakeStream:
    """In place of a CUDA stream, without a GPU: what is put on it runs at once; it knows what is ordered before it."""

    cuda_stream = 0  # the host engine's NULL stream

    def __init__(self):
        self.before = collections.Counter()  # stream -> how many of its operations have ended when the next one runs

    def wait_stream(self, other):
        self.before |= other.before

    def wait_event(self, event):
        assert event.recorded is not None, "a wait for what was never recorded"
        self.before |= event.recorded

    def put(self):
        self.before[id(self)] += 1


class FakeEvent:
    recorded = None

    def record(self, stream):
        self.recorded = stream.before.copy()


def on_fake_streams(ctx, algorithm):
    """The CUDA way of running a plan, on host memory: two streams, events, and calls from streams that don't know of
    each other, as an asynchronous call and one on the current stream. Every other call is as in a capture."""
    import contextlib

    import torch

    from collectives.comm.algorithms import plan as plans

    comm, n = ctx.new_communicator(), ctx.size
    grouped, run_kernel = plans.issue_transfers, plans.run_kernel
    transfers, kernels = FakeStream(), FakeStream()
    outers, events, earlier, found = [], [], {}, []

    def run(plan, native, inp, out, factor):
        outer = FakeStream()
        outer.put()
        outers.append(outer)
        graph = len(outers) % 2 == 0  # as in a capture, whose scratch is its own
        before = None if plan._scratch is None else plan._scratch.clone()
        plan.run_on_streams(native, inp, out, factor, outer, transfers, kernels, own_memory=graph)
        if graph and before is not None and not torch.equal(before, plan._scratch):
            found.append("a captured call uses scratch of calls that aren't")
        if outer.before | transfers.before | kernels.before != outer.before:
            found.append("the caller's stream goes on before the call has ended")
        events.append(len(plan._events))
        earlier.update({id(each): each.before[id(each)] for each in (transfers, kernels)})

    def put(own, other, what):
        own.put()
        if own.before[id(other)] < earlier.get(id(other), 0):
            found.append(f"{what} beside {'kernels' if own is transfers else 'transfers'} of the call before it")
        if not own.before[id(outers[-1])]:
            found.append(f"{what} before the caller's stream has come to the call")

    def transfer(*args):
        put(transfers, kernels, "a transfer")
        grouped(*args)

    def kernel(*args):
        put(kernels, transfers, "a kernel")
        run_kernel(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans.ExecutionPlan, "run", run)
        patch.setattr(plans, "issue_transfers", transfer)
        patch.setattr(plans, "run_kernel", kernel)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", FakeEvent)
        for factor in (1, 2):
            x = torch.arange(70_000) * factor * (ctx.rank + 1)
            comm.all_reduce(x, 3, algorithm=algorithm)
            assert torch.equal(x, torch.arange(70_000) * (3 * factor * n * (n + 1) // 2))
        for factor in (1, 2):
            x = torch.full((n * 500,), (ctx.rank + 1.0) * factor)
            part = torch.zeros(500)
            comm.reduce_scatter(part, x, algorithm=algorithm)
            comm.all_reduce(x, algorithm=algorithm)
            whole = torch.empty(n * 500)
            comm.all_gather(whole, part, algorithm=algorithm)
            assert torch.equal(x, whole) and torch.equal(x, torch.full_like(x, factor * n * (n + 1) / 2))
    comm.close()
    return [*found, *([] if events[0] == events[1] > 0 and events[2:5] == events[5:] else [f"events {events}"])]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_cuda_way_on_fake_streams(algorithm):
    check(on_fake_streams, "host", 3, algorithm)


def captured(ctx, algorithm):
    """A CUDA graph of a call gives what the call gives, for whatever the arrays hold when it is replayed."""
    import torch

    from collectives.errors import InvalidUsage

    comm = ctx.communicator()
    found = []
    n, count = ctx.size, 100_003
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((count,), ctx.rank + 1.0, dtype=dtype, device=comm.device)
        large = torch.empty(n * 1000, dtype=dtype, device=comm.device)
        small = torch.full((1000,), ctx.rank + 1.0, dtype=dtype, device=comm.device)
        if dtype is torch.float32:
            with pytest.raises(InvalidUsage, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                comm.all_reduce(x[:7], algorithm=algorithm)
            torch.cuda.synchronize()

        def calls(x=x, large=large, small=small):
            comm.all_reduce(x, "avg", algorithm=algorithm)
            comm.all_gather(large, small, algorithm=algorithm)
            comm.reduce_scatter(small, large, "avg", algorithm=algorithm)

        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for factor in (1.0, 2.0):
            x.fill_((ctx.rank + 1) * factor)
            small.fill_((ctx.rank + 1) * factor)
            graph.replay()
            torch.cuda.synchronize()
            want = (n + 1) / 2 * factor
            for name, got in (("all_reduce", x), ("reduce_scatter", small)):
                if name == "all_reduce" and not torch.all(got == want):
                    found.append(f"{name} {dtype}: {got[:3]}, want {want}")
            whole = torch.arange(1, n + 1, device=comm.device, dtype=dtype).repeat_interleave(1000) * factor
            if not torch.equal(large, whole):
                found.append(f"all_gather {dtype}: {large[:3]}")
            if not torch.all(small == (ctx.rank + 1) * factor):  # its average over ranks that all hold the same
                found.append(f"reduce_scatter {dtype}: {small[:3]}")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [1, 2])
def test_cuda_graph(algorithm, n):
    check(captured, "nccl", n, algorithm)


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
    import torch

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


def error_in_a_child(ctx):
    import torch

    comm = ctx.new_communicator()
    comm.all_reduce(torch.ones(8), algorithm="ring")
    child = os.fork()
    if not child:
        try:
            with comm:
                raise KeyError
        except KeyError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    comm.close()
    return os.waitstatus_to_exitcode(status)


def test_an_error_in_a_forked_child_comes_out_of_the_block():
    assert run_ranks(error_in_a_child, 2) == [0, 0]


def largest_and_smallest(ctx):
    import torch
    import torch.distributed as dist

    from collectives.errors import InvalidUsage

    comm = ctx.new_communicator(deterministic=True)
    for op in ("max", dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        comm.all_reduce(torch.ones(8), op, algorithm="ring")
    for op in ("sum", dist.ReduceOp.SUM, 2.0):
        with pytest.raises(InvalidUsage, match="rank order"):
            comm.all_reduce(torch.ones(8), op, algorithm="ring")
    comm.close()


def test_torchs_max_and_min_have_one_result_in_any_order():
    run_ranks(largest_and_smallest, 2)


def time_of_a_plan(ctx):
    import torch

    os.environ["COLLECTIVES_CHUNK"] = "1024"
    comm = ctx.new_communicator()
    begun = time.monotonic()
    comm.all_reduce(torch.ones(2 << 20), algorithm="ring")
    comm.close()
    return time.monotonic() - begun


def test_a_plan_of_many_chunks_takes_time_in_proportion():
    """12,000 tasks: 2 s; minutes where each one looks through all."""
    assert max(run_ranks(time_of_a_plan, 2, timeout=120, fresh=True)) < 60
