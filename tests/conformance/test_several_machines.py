"""The communicator over several machines: every operation gives what the one machine's gives, whoever is where."""

from __future__ import annotations

import gc
import os
import signal
import time
from zlib import crc32

import pytest
import torch

from collectives import errors
from collectives.arrays import TORCH_CODES
from collectives.comm.algorithms.schedule import shard_bounds
from collectives.comm.multinode.inter_node import ScheduledInterNode
from collectives.comm.multinode.topology import Topology, group_ranks_by_node, identify_node
from tests.hosts import joined
from tests.ranks import Died, run_ranks

EVEN, MIXED = "aabb", "abbab"
_OPS = ("sum", "prod", "max", "min", "avg", "factor")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def numbers(count: int, dtype: torch.dtype, seed: int, op: str) -> torch.Tensor:
    """Small whole numbers, of which any type holds the sums exactly, so that their order doesn't matter."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (1, 3) if op == "prod" else (0 if "uint" in str(dtype) else -2, 3)
    return torch.randint(low, high, (count,), generator=generator).to(dtype)


def as_op(op: str, dtype: torch.dtype, rank: int):
    return op if op != "factor" else (0.5 * (rank % 3) if dtype.is_floating_point else rank % 3)


def reductions(ctx, machines, dtypes):
    flat = ctx.communicator()
    wrong = []
    with joined(ctx, machines) as comm:
        for dtype in (each for each in TORCH_CODES if dtypes is None or str(each) in dtypes):
            for op in _OPS:
                given = as_op(op, dtype, ctx.rank)
                sizes = (0, 1, ctx.size + 1, 2048, 4099, 40_009) if dtype == torch.float32 else (ctx.size - 1, 4099)
                for count in sizes:
                    mine = numbers(count * ctx.size, dtype, 100 * ctx.rank + count, op)
                    pairs = [(mine[:count].clone(), mine[:count].clone())]
                    flat.all_reduce(pairs[0][0], given)
                    comm.all_reduce(pairs[0][1], given)
                    pairs.append((torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)))
                    flat.reduce_scatter(pairs[1][0], mine, given)
                    comm.reduce_scatter(pairs[1][1], mine.clone(), given)
                    if count in (2048, 4099) and dtype in (torch.float32, torch.bfloat16):
                        pairs.append((mine[:count].clone(), mine[:count].clone()))
                        flat.reduce(pairs[2][0], ctx.size - 1, given)
                        comm.reduce(pairs[2][1], ctx.size - 1, given)
                    wrong += [(dtype, op, count, i) for i, pair in enumerate(pairs) if not same(*pair)]
    return [str(each) for each in wrong]


@pytest.mark.parametrize(
    ("machines", "dtypes"),
    [
        (EVEN, None),
        (MIXED, ("torch.float32", "torch.bfloat16", "torch.int32")),
        ("abc", ("torch.float32",)),
        ("aabbc", ("torch.bfloat16", "torch.int64")),
    ],
)
def test_reductions(machines, dtypes):
    assert run_ranks(reductions, len(machines), machines, dtypes, timeout=120) == [[]] * len(machines)


def rounding(ctx, machines):
    """Sums that are rounded: near the true ones, the same on all ranks and each time; 16 bits don't overflow."""
    flat = ctx.communicator()
    found = []
    with joined(ctx, machines, deterministic=True) as comm:
        torch.manual_seed(ctx.rank)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            mine = torch.randn(30_011, dtype=torch.float64).to(dtype)
            once, twice, one = mine.clone(), mine.clone(), mine.clone()
            comm.all_reduce(once)
            comm.all_reduce(twice, async_op=True).wait()
            flat.all_reduce(one)
            assert same(once, twice)
            eps = torch.finfo(dtype).eps
            assert torch.allclose(once.double(), one.double(), rtol=2 * eps, atol=8 * torch.finfo(torch.float32).eps)
            found.append(crc32(once.view(torch.uint8).numpy()))
        big = torch.full((9000,), 60_000.0, dtype=torch.float16)
        comm.all_reduce(big, "avg")  # the sum of one machine's is above what fp16 holds
        assert (big == 60_000).all()
        ordered = torch.randn(5000)
        one = ordered.clone()
        comm.all_reduce(ordered, algorithm="direct")
        flat.all_reduce(one)
        assert same(ordered, one), "direct reduces in rank order wherever the ranks are"
        shares = torch.zeros(2, dtype=torch.float64)
        comm.all_reduce(one, share=shares)
        part, cut = torch.zeros(2, dtype=torch.float64), torch.empty(1000)
        comm.reduce_scatter(cut, one[: 1000 * ctx.size].repeat(ctx.size)[: 1000 * ctx.size], share=part)
        squares = shares.clone()
        comm.all_reduce(squares)
        assert torch.allclose(squares[0], one.double().square().sum()) and squares[1] == 0
        assert torch.allclose(part[0], cut.double().square().sum())
    return found


def test_rounding():
    results = run_ranks(rounding, 4, EVEN)
    assert all(each == results[0] for each in results)
    results = run_ranks(rounding, 5, MIXED)
    assert all(each == results[0] for each in results)


def moved(comm):
    """Operations that move data, with equal parts and with ragged ones."""
    r, n = comm.rank, comm.size
    for count in (0, 1, n + 1, 4099, 40_009):
        for dtype in (torch.float32, torch.bool, torch.complex64):

            def filled(value, dtype=dtype, count=count):
                return torch.full((count,), value).to(dtype)

            everyone = torch.cat([filled(rank % 2) for rank in range(n)])
            out = torch.empty(count * n, dtype=dtype)
            comm.all_gather(out, filled(r % 2))
            assert torch.equal(out, everyone)
            comm.all_to_all(out, torch.cat([filled((r + rank) % 2) for rank in range(n)]))
            assert torch.equal(out, torch.cat([filled((r + rank) % 2) for rank in range(n)]))
            for root in (0, n - 1):
                one = filled(r % 2)
                comm.broadcast(one, root)
                assert torch.equal(one, filled(root % 2))
                out = torch.empty(count * n, dtype=dtype) if r == root else None
                comm.gather(out, filled(r % 2), root)
                assert out is None or torch.equal(out, everyone)
                comm.scatter(one, everyone if r == root else None, root)
                assert torch.equal(one, filled(r % 2))
    ragged = torch.empty(sum(range(n)) + n * r)
    comm.all_to_all(ragged, torch.cat([torch.full((r + s,), float(r)) for s in range(n)]),
                    [r + s for s in range(n)], [r + s for s in range(n)])  # fmt: skip
    assert torch.equal(ragged, torch.cat([torch.full((r + s,), float(s)) for s in range(n)]))


def in_flight(comm):
    """A ring of messages and a reduction as one; and many in flight at once, in the order of the calls."""
    r, n = comm.rank, comm.size
    got, total = torch.empty(3000), torch.full((10,), float(r))
    with comm.group():
        comm.send(torch.full((3000,), float(r)), (r + 1) % n)
        comm.recv(got, (r - 1) % n)
        comm.all_reduce(total)
    assert (got == (r - 1) % n).all() and (total == sum(range(n))).all()
    flying = [torch.full((size,), 1.0) for size in (5, 5000, 50_000)]
    works = [comm.all_reduce(each, async_op=True) for each in flying]
    last = torch.full((3,), 2.0)
    comm.all_reduce(last)  # after the queued ones
    assert all(work.wait(timeout=30) and work.done() for work in works) and (last == 2.0 * n).all()
    assert all((each == n).all() for each in flying)
    future = comm.broadcast(flying[0], async_op=True).future()
    assert future.wait() is flying[0]
    comm.barrier()


def split_up(comm, machines):
    """Splits: across machines, inside of one, and none."""
    r, n = comm.rank, comm.size
    across = comm.split(r % 2, -r)
    ones = torch.ones(3)
    across.all_reduce(ones)
    ranks = [rank for rank in reversed(range(n)) if rank % 2 == r % 2]
    assert (ones == len(ranks)).all() and across.rank == ranks.index(r)
    assert across.machines == group_ranks_by_node(machines[rank] for rank in ranks)
    inside = comm.split(ord(machines[r]))
    assert len(inside.machines) == 1 and inside.size == machines.count(machines[r]) == comm.local_size
    inside.all_reduce(ones)
    smaller = comm.split(None if r == 1 else 5)
    assert (smaller is None) == (r == 1)
    if smaller is not None:
        smaller.all_reduce(ones)
        shrunk = smaller.shrink([0]) if smaller.rank else None
        if shrunk is not None:
            again = torch.ones(2)
            shrunk.all_reduce(again)
            assert (again == n - 2).all()
            shrunk.close()
        smaller.close()
    across.close()
    inside.close()


def copies(ctx, machines):
    """Operations that move data, groups, asynchronous calls, other communicators, memory."""
    r, n = ctx.rank, ctx.size
    with joined(ctx, machines) as comm:
        assert len(comm.machines) == len(set(machines))
        moved(comm)
        in_flight(comm)
        split_up(comm, machines)

        memory = comm.empty(5000).fill_(r)
        registered = comm.register(comm.empty(1 << 18).zero_())
        comm.all_reduce(memory)
        comm.all_reduce(registered.array)
        assert (memory == sum(range(n))).all()
        comm.deregister(registered)
        places = comm.machines, comm.local_rank, comm.local_size
        assert [peer.rank for peer in comm.peers] == list(range(n)) and comm.peers[r].pid == os.getpid()
    with joined(ctx, machines) as comm:  # again after close()
        comm.all_reduce(torch.ones(3))
    return places


@pytest.mark.parametrize("machines", [EVEN, MIXED, "aabbc"])
def test_copies(machines):
    places = run_ranks(copies, len(machines), machines, timeout=40)
    layout = group_ranks_by_node(machines)
    for rank, (found, local_rank, local_size) in enumerate(places):
        here = next(ranks for ranks in layout if rank in ranks)
        assert found == layout and (local_rank, local_size) == (here.index(rank), len(here))


def failing(ctx):
    """Calls that don't fit together, a rank that doesn't come, and one that dies."""
    r, told = ctx.rank, []

    def failed(call, seconds=20.0):
        begun = time.monotonic()
        with pytest.raises(errors.CollectivesError) as caught:
            call()
        assert time.monotonic() - begun < seconds
        told.append((type(caught.value).__name__, caught.value.op, caught.value.peers, str(caught.value)))

    def unusable(comm):
        with pytest.raises(errors.InvalidUsage, match="out of use since an earlier call failed"):
            comm.all_reduce(torch.ones(3))
        comm.abort()

    for call in (
        lambda comm: comm.all_reduce(torch.ones(3 if r < 2 else 5000)),  # between machines
        lambda comm: comm.all_reduce(torch.ones(3 if r != 3 else 4)),  # inside of one
        lambda comm: comm.all_reduce(torch.ones(3)) if r < 2 else comm.broadcast(torch.ones(3)),
    ):
        with joined(ctx, EVEN) as comm:
            failed(lambda comm=comm, call=call: call(comm))
            unusable(comm)
        ctx.barrier()
    with joined(ctx, EVEN) as comm:
        comm.timeout = 1.0
        if r != 1:
            failed(lambda: comm.all_reduce(torch.ones(9)))
            ctx.barrier([0, 2, 3])
        else:
            time.sleep(4.0)
        comm.abort()
    ctx.barrier()
    with joined(ctx, EVEN) as comm:  # another thread ends what waits for a machine that doesn't come
        if r < 2:
            work = comm.all_reduce(torch.ones(50_000), async_op=True)
            with pytest.raises(errors.CollectiveTimeout, match="stays in flight.*have not arrived: [23]"):
                work.wait(timeout=0.3)
            comm.abort()
            with pytest.raises(errors.Aborted):
                work.wait(timeout=20)
            ctx.barrier()
        else:
            ctx.barrier()
            failed(lambda: comm.all_reduce(torch.ones(50_000)))
    if r >= 2:
        told.pop()  # whose connection is seen first is chance
    with joined(ctx, EVEN) as comm:
        comm.all_reduce(torch.ones(3))
        if r == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        failed(lambda: comm.all_reduce(torch.ones(5000)))
        left = comm.shrink([3], abort=True)
        ones = torch.ones(5000)
        left.all_reduce(ones)
        assert (ones == 3).all() and left.machines == ((0, 1), (2,))
        left.close()
        comm.abort()
    gc.collect()
    return told


def test_errors():
    *results, died = run_ranks(failing, 4, deaths=[3], fresh=True, timeout=90)
    assert isinstance(died, Died)
    for rank, told in enumerate(results):
        unlike = "rank 2: all_reduce float32 count=5000", "rank 3: all_reduce count=4", ": broadcast float32 count"
        for (kind, op, _, text), expected in zip(told[:3], unlike, strict=True):
            assert kind == "Mismatch" and op in ("all_reduce", "broadcast") and f"[rank {rank}]" in text
            assert expected in text or expected.replace("rank 2", "rank 3") in text, text
        if rank != 1:
            kind, op, peers, text = told[3]
            assert (kind, op, peers) == ("CollectiveTimeout", "all_reduce", (1,)), text
        kind, op, peers, text = told[-1]
        assert (kind, op) == ("RemoteError", "all_reduce") and peers == (3,) and "rank 3" in text, text


def late_at_a_barrier(ctx, machines):
    """Return when this rank entered and left a barrier; the last one comes late."""
    with joined(ctx, machines) as comm:
        comm.barrier()
        ctx.barrier()
        if ctx.rank == ctx.size - 1:
            time.sleep(0.3)
        entered = time.monotonic()
        comm.barrier()
        left = time.monotonic()
        comm.close()
        return entered, left


@pytest.mark.parametrize("machines", ["aab", EVEN, MIXED])
def test_a_barrier_waits_for_the_other_nodes(machines):
    found = run_ranks(late_at_a_barrier, len(machines), machines)
    assert min(left for _, left in found) >= found[-1][0], found


def unlike_in_a_node(ctx, machines, ours, theirs):
    """The last rank makes another call, which is made of the same calls inside of its node."""
    x = torch.ones(20_000)
    with joined(ctx, machines) as comm:
        with pytest.raises(errors.Mismatch) as caught:
            call = theirs if ctx.rank == ctx.size - 1 else ours
            getattr(comm, call[0])(x.to(call[1]), *call[2:])
        comm.abort()
        return str(caught.value)


def test_every_node_is_part_of_a_broadcasts_first_step():
    """One with an empty shard would take the others' second step for the first one."""
    for nodes in range(3, 40):
        inter_node = ScheduledInterNode(None, Topology(tuple((rank,) for rank in range(nodes)), 0))
        for nbytes in range(1, 60_000, 61):
            each = shard_bounds(nbytes, nodes, 1)
            assert inter_node._choose_algorithm(nbytes) == "one-shot" or each[-2] < each[-1]


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (("all_reduce", torch.float32, "sum"), ("all_reduce", torch.float32, "avg"), "rank 2: all_reduce avg count="),
        (("reduce", torch.float32, 0), ("reduce", torch.float32, 1), "rank 2: reduce root=1 count=20000 dtype=float32"),
        (("broadcast", torch.float32, 0), ("broadcast", torch.int32, 0), "count=80000 dtype=int32 (sent as uint8)"),
        (("all_reduce", torch.float16, "sum"), ("all_reduce", torch.float16, 0.5), "rank 2: all_reduce scaled count="),
        (("all_reduce", torch.float16), ("all_reduce", torch.bfloat16), "dtype=bfloat16 (sent as float32)"),
    ],
)  # fmt: skip
def test_unlike_calls_of_a_rank_that_is_no_leader(ours, theirs, text):
    """Only the first ranks of a node compare their calls with the other nodes'."""
    for told in run_ranks(unlike_in_a_node, 3, "aba", ours, theirs):
        assert text in told, told


def test_a_host_id_stands_for_a_machine(monkeypatch):
    here = identify_node()
    monkeypatch.setenv("COLLECTIVES_HOST_ID", "one")
    one = identify_node()
    monkeypatch.setenv("COLLECTIVES_HOST_ID", "two")
    assert len({here, one, identify_node()}) == 3
