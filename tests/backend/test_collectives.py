"""torch.distributed's collectives on the backend "collectives"."""

import datetime
import functools
import os
import time

import pytest
import torch
import torch.distributed as dist

from collectives.errors import CollectivesError, CollectiveTimeout, InvalidArgument, Mismatch, RemoteError
from tests.backend.groups import over
from tests.ranks import Died, run_ranks

SHAPES = {"vector": (6,), "matrix": (4, 6), "empty": (0, 3), "scalar": ()}


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-4, 5, shape, generator=generator)
    if dtype is torch.bool:
        return made > 0
    if dtype.is_complex:
        return torch.complex(made.float(), made.float() + 1).to(dtype)
    return made.to(dtype)


def layouts(tensor):
    """The same values as a contiguous tensor, as a transposed one, and as every second element of a larger one."""
    yield tensor.clone()
    if tensor.dim() == 2:
        yield tensor.t().contiguous().t()
    if tensor.dim():
        wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        yield wide[..., ::2]


def reductions(dtype):
    ops = dist.ReduceOp
    if dtype is torch.bool:
        return [ops.SUM, ops.MAX, ops.PRODUCT, ops.BAND, ops.BOR, ops.BXOR]
    if dtype.is_complex:
        return [ops.SUM]
    if dtype.is_floating_point:
        return [ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, ops.AVG]
    return [ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, ops.BAND, ops.BOR, ops.BXOR]


def expected_reduction(parts, op):
    ops = dist.ReduceOp
    stacked = torch.stack(parts)
    if parts[0].dtype is torch.bool:
        if op == ops.BXOR:
            return functools.reduce(torch.logical_xor, parts)
        return stacked.any(0) if op in (ops.SUM, ops.MAX, ops.BOR) else stacked.all(0)
    if op == ops.AVG:
        return stacked.mean(0)
    if op == ops.SUM:
        return stacked.sum(0).to(parts[0].dtype)
    if op == ops.PRODUCT:
        return stacked.prod(0).to(parts[0].dtype)
    if op in (ops.MIN, ops.MAX):
        return (stacked.amin if op == ops.MIN else stacked.amax)(0)
    function = {ops.BAND: torch.bitwise_and, ops.BOR: torch.bitwise_or, ops.BXOR: torch.bitwise_xor}[op]
    return functools.reduce(function, parts)


def both_ways(call):
    """Make a call blocking and asynchronous."""
    yield lambda *args, **options: call(*args, **options)

    def asynchronous(*args, **options):
        work = call(*args, async_op=True, **options)
        work.wait()
        assert work.is_completed() and work.exception() is None

    yield asynchronous


@over("collectives")
def reduced(ctx, dtype_name):
    dtype, count = getattr(torch, dtype_name), 0
    for shape in SHAPES.values():
        parts = [values(shape, dtype, seed) for seed in range(ctx.size)]
        for op in reductions(dtype):
            want = expected_reduction(parts, op)
            for own in layouts(parts[ctx.rank]):
                for call in both_ways(dist.all_reduce):
                    tensor = own.clone(memory_format=torch.preserve_format)
                    call(tensor, op=op)
                    torch.testing.assert_close(tensor, want)
                for call in both_ways(dist.reduce):
                    tensor = own.clone(memory_format=torch.preserve_format)
                    call(tensor, ctx.size - 1, op=op)
                    if ctx.rank == ctx.size - 1:
                        torch.testing.assert_close(tensor, want)
                count += 1
            lists = [[values(shape, dtype, 10 * r + seed) for r in range(ctx.size)] for seed in range(ctx.size)]
            mine = expected_reduction([each[ctx.rank] for each in lists], op)
            for call in both_ways(dist.reduce_scatter):
                out = torch.empty_like(mine)
                call(out, lists[ctx.rank], op=op)
                torch.testing.assert_close(out, mine)
            for call in both_ways(dist.reduce_scatter_tensor):
                out = torch.empty_like(mine)
                call(out, torch.stack(lists[ctx.rank]), op=op)
                torch.testing.assert_close(out, mine)
    return count


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bool",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("int64", "complex64", "bfloat16")),
    ],
)
def test_reductions_are_the_sums_of_all_ranks(tmp_path, dtype):
    assert min(run_ranks(reduced, 3, tmp_path / "store", dtype)) > 0


def check(call, make, want):
    """Make a call, blocking and asynchronous; its outputs, the tensors of the first argument, are to be `want`."""
    for way in both_ways(call):
        args = make()
        way(*args)
        outs = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
        assert len(outs or ()) == len(want)
        for got, expected in zip(outs or (), want, strict=True):
            assert torch.equal(got, expected), (call.__name__, got, expected)


def moved(ctx, dtype):
    size, rank = ctx.size, ctx.rank

    def zeros(*shape):
        return torch.zeros(shape, dtype=dtype)

    for shape in SHAPES.values():
        parts = [values(shape, dtype, seed) for seed in range(size)]
        for own in layouts(parts[rank]):
            other = own.clone(memory_format=torch.preserve_format)

            def fresh(other=other):
                return torch.empty_like(other)

            check(dist.broadcast, lambda own=own, fresh=fresh: (own if rank == 1 else fresh(), 1), [parts[1]])
            check(dist.all_gather, lambda own=own: ([zeros(*shape) for _ in parts], own), parts)  # noqa: B023
            scattered = lambda fresh=fresh: (fresh(), parts if rank == 0 else None, 0)  # noqa: B023, E731
            check(dist.scatter, scattered, [parts[rank]])
            outs = [zeros(*shape) for _ in parts] if rank == 1 else None
            for way in both_ways(dist.gather):
                way(own, outs, 1)
                assert outs is None or all(torch.equal(a, b) for a, b in zip(outs, parts, strict=True))
        rows = [values((size * 2, *shape), dtype, 5 + r) for r in range(size)]
        gathered = lambda: (zeros(size, *rows[0].shape), rows[rank])  # noqa: B023, E731
        check(dist.all_gather_into_tensor, gathered, [torch.stack(rows)])
        exchanged = lambda: (zeros(*rows[0].shape), rows[rank])  # noqa: B023, E731
        want = torch.cat([each.chunk(size)[rank] for each in rows])
        check(dist.all_to_all_single, exchanged, [want])
    sends = [values((r + 1, 2), dtype, 7) for r in range(size)]
    check(dist.all_to_all, lambda: ([zeros(rank + 1, 2) for _ in range(size)], sends), [sends[rank]] * size)
    splits, total = [r + 1 for r in range(size)], sum(r + 1 for r in range(size))
    whole, begin = values((total, 2), dtype, 9), sum(splits[:rank])
    check(
        dist.all_to_all_single,
        lambda: (zeros(size * (rank + 1), 2), whole, [rank + 1] * size, splits),
        [torch.cat([whole[begin : begin + rank + 1]] * size)],
    )
    uneven = [values((r + 1,), dtype, 3) for r in range(size)]
    check(dist.all_gather, lambda: ([zeros(r + 1) for r in range(size)], uneven[rank]), uneven)
    views = zeros(size * 3)
    dist.all_gather(list(views.chunk(size)), values((3,), dtype, rank))
    assert torch.equal(views, torch.cat([values((3,), dtype, r) for r in range(size)]))
    if dtype.is_floating_point:
        parts = [values((r + 1,), dtype, 4) for r in range(size)]
        check(dist.reduce_scatter, lambda: (zeros(rank + 1), parts), [parts[rank] * size])


def coalesced(ctx):
    tensors = [torch.full((n,), float(ctx.rank + 1)) for n in (1, 5, 0, 1000)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    total = sum(range(1, ctx.size + 1))
    assert all((tensor == total).all() for tensor in tensors)
    outs = [torch.zeros(ctx.size * n) for n in (2, 3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for out, n in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, torch.full((n,), float(ctx.rank)))
    manager.wait()
    assert [out.tolist() for out in outs] == [[float(r) for r in range(ctx.size) for _ in range(n)] for n in (2, 3)]
    outs = [torch.zeros(n) for n in (2, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for out, n in zip(outs, (2, 3), strict=True):
            dist.reduce_scatter_tensor(out, torch.ones(ctx.size * n))
    assert [out.tolist() for out in outs] == [[ctx.size] * 2, [ctx.size] * 3]
    mixed = torch.ones(4), torch.zeros(4 * ctx.size)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.group.WORLD.allreduce([mixed[0]])
        dist.group.WORLD._allgather_base(mixed[1], torch.full((4,), 2.0))
    manager.wait()
    assert mixed[0].tolist() == [ctx.size] * 4 and mixed[1].tolist() == [2.0] * 4 * ctx.size
    gathered = [[torch.zeros(2), torch.zeros(3)] for _ in range(ctx.size)]
    dist.all_gather_coalesced(gathered, [torch.full((2,), float(ctx.rank)), torch.ones(3)])
    assert [each[0].tolist() for each in gathered] == [[float(r)] * 2 for r in range(ctx.size)]


def objects_and_names(ctx):
    found = [None] * ctx.size
    dist.all_gather_object(found, {"rank": ctx.rank})
    assert found == [{"rank": r} for r in range(ctx.size)]
    received = [ctx.rank, "x"] if ctx.rank == 0 else [None, None]
    dist.broadcast_object_list(received, 0)
    assert received == [0, "x"]
    out = [None]
    dist.scatter_object_list(out, list("abc")[: ctx.size] if ctx.rank == 0 else None, 0)
    assert out == ["abc"[ctx.rank]]
    gathered = [None] * ctx.size if ctx.rank == 1 else None
    dist.gather_object(ctx.rank, gathered, 1)
    assert gathered in (None, list(range(ctx.size)))
    world = dist.group.WORLD
    assert dist.get_backend() == "collectives" == world.name() and world.rank() == ctx.rank
    before = world._get_sequence_number_for_group()
    dist.barrier()
    assert world._get_sequence_number_for_group() == before + 1
    pair = dist.new_group([0, 1], group_desc="a pair")
    if ctx.rank < 2:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2.0, 2.0] and pair.group_desc == "a pair"
        dist.destroy_process_group(pair)
        with pytest.raises(CollectivesError, match="destroyed|closed"):
            pair.allreduce([tensor])
    work = dist.all_reduce(torch.full((3,), 1.0), async_op=True)
    assert work.get_future().wait()[0].tolist() == [ctx.size] * 3 == work.result()[0].tolist()
    premul = torch.ones(3)
    dist.all_reduce(premul, op=dist._make_nccl_premul_sum(0.5))
    assert premul.tolist() == [0.5 * ctx.size] * 3
    sparse = torch.sparse_coo_tensor([[ctx.rank, 3]], [1.0, 2.0], (5,))
    dist.all_reduce(sparse)
    want = torch.zeros(5)
    want[: ctx.size] += 1
    want[3] += 2 * ctx.size
    assert torch.equal(sparse.to_dense(), want)


def refused(ctx):
    for call, error in (
        (lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND), InvalidArgument),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG), InvalidArgument),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.cfloat), op=dist.ReduceOp.MAX), ValueError),
        (lambda: dist.all_reduce(torch.ones(2, device="meta")), InvalidArgument),
        (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), ValueError),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)), ValueError),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)), ValueError),
        (lambda: dist.all_reduce(torch.ones(4).to_sparse(), op=dist.ReduceOp.MAX), ValueError),
        (lambda: dist.recv(torch.ones(1), 7), Exception),
    ):
        with pytest.raises(error):
            call()
    with pytest.raises(Mismatch, match="rank 1"):
        dist.all_reduce(torch.ones(2 + ctx.rank))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # goes on
    assert tensor.tolist() == [ctx.size] * 2


def late(ctx):
    """A late rank is named."""
    store, second = dist.group.WORLD.get_group_store(), datetime.timedelta(seconds=1)
    if ctx.rank != 1:
        with pytest.raises(CollectiveTimeout, match="Rank 1 failed to pass monitoredBarrier in 1000 ms") as caught:
            dist.monitored_barrier(timeout=second, wait_all_ranks=True)
        assert ctx.rank or caught.value.peers == (1,)
        with pytest.raises(CollectiveTimeout, match="1"):
            dist.barrier(async_op=True).wait(second)
    store.add("seen", 1)
    while store.add("seen", 0) < ctx.size:
        time.sleep(0.01)
    if ctx.rank == 1:
        dist.barrier()


@over("collectives")
def in_one_group(ctx):
    for dtype in (torch.float32, torch.bool, torch.complex64):
        moved(ctx, dtype)
    for program in (coalesced, objects_and_names, refused, late):
        program(ctx)


def test_data_objects_and_errors(tmp_path):
    run_ranks(in_one_group, 3, tmp_path / "store")


def killed(ctx, path):
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    if ctx.rank == 1:
        os._exit(7)
    with pytest.raises(RemoteError) as caught:
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    return caught.value.peers, caught.value.op


def test_a_dead_rank_is_named(tmp_path):
    first, dead, last = run_ranks(killed, 3, tmp_path / "store", deaths=[1])
    assert isinstance(dead, Died)
    assert first == last == ((1,), "all_reduce")
