"""Every operation of the Horovod API, in each of its forms, on 1 to 3 ranks, beside NumPy."""

from __future__ import annotations

import numpy
import pytest
import torch

from tests.ranks import run_ranks

from .started import started

DTYPES = "float32 float64 float16 bfloat16 int8 uint8 int32 int64 int16".split()


def values(rank, shape, dtype):
    """Small whole numbers, so that every dtype sums them exactly, other ones for each rank."""
    count = int(numpy.prod(shape))
    return (torch.arange(count).reshape(shape) % 5 + 1 + rank).to(dtype)


def reductions(ctx):
    failures = []

    def same(what, found, wanted):
        if found.shape != wanted.shape or found.dtype != wanted.dtype or not torch.equal(found, wanted):
            failures.append((what, found.tolist()[:8], wanted.tolist()[:8]))

    with started(ctx) as hvd:
        found = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
        assert found == (ctx.rank, ctx.size, ctx.rank, ctx.size, 0, 1) and hvd.is_homogeneous(), found
        for name in DTYPES:
            dtype = getattr(torch, name)
            for shape in ((), (0,), (1,), (7, 3), (4097,)):
                everyone = torch.stack([values(rank, shape, torch.float64) for rank in range(ctx.size)])
                mine = values(ctx.rank, shape, dtype)
                wanted = {
                    hvd.Sum: everyone.sum(0), hvd.Min: everyone.amin(0), hvd.Max: everyone.amax(0),
                    hvd.Product: everyone.prod(0),
                }  # fmt: skip
                wanted = {op: value.to(dtype) for op, value in wanted.items()}
                if dtype.is_floating_point:
                    wanted[hvd.Average] = everyone.sum(0).to(torch.float32 if dtype != torch.float64 else dtype)
                    wanted[hvd.Average] = (wanted[hvd.Average] / ctx.size).to(dtype)
                for op, value in wanted.items():
                    what = f"{op.name} {name} {shape}"
                    same(what, hvd.allreduce(mine, op=op, name=what), value)
                    same(f"{what} of a view", hvd.allreduce(torch.stack([mine, mine], -1)[..., 0], op=op), value)
                    own = mine.clone()
                    assert hvd.allreduce_(own, op=op) is own
                    same(f"{what} in place", own, value)
                    own = mine.clone()
                    handle = hvd.allreduce_async_(own, op=op)
                    assert hvd.synchronize(handle) is own and hvd.synchronize(handle) is None
                    same(f"{what} async in place", own, value)
                    pair = hvd.grouped_allreduce([mine, mine.flatten()], op=op)
                    same(f"{what} grouped", pair[0], value)
                    same(f"{what} grouped, second", pair[1], value.flatten())
                    if shape:
                        parts = value.tensor_split(ctx.size) if ctx.size > 1 else [value]
                        if name != "int16":
                            same(f"{what} reducescatter", hvd.reducescatter(mine, op=op), parts[ctx.rank])
            mixed = [values(ctx.rank, (5,), dtype), values(ctx.rank, (300,), torch.float32)]
            hvd.grouped_allreduce_(mixed, op=hvd.Max)
            same(f"{name} in a group", mixed[0], values(ctx.size - 1, (5,), dtype))
            same(f"{name}'s neighbour", mixed[1], values(ctx.size - 1, (300,), torch.float32))
        truth = torch.tensor([ctx.rank == 0, False, True])
        same("bool", hvd.allreduce(truth, op=hvd.Sum), torch.tensor([True, False, True]))
        same("bool", hvd.allreduce(truth, op=hvd.Product), torch.tensor([ctx.size == 1, False, True]))
        ones = torch.ones(3)
        scaled = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        same("scaled", scaled, 2.0 * ctx.size * ones)
        assert ones.tolist() == [1, 1, 1]
        same("scaled", hvd.reducescatter(torch.ones(6), prescale_factor=3.0), torch.full((6 // ctx.size,), 3.0))
        same("compressed", hvd.allreduce(ones * 1.5, compression=hvd.Compression.fp16), ones * 1.5)
        same(
            "compressed", hvd.allreduce(ones.int(), op=hvd.Sum, compression=hvd.Compression.bf16), ones.int() * ctx.size
        )
        noise = torch.randn(3000, generator=torch.Generator().manual_seed(ctx.rank))
        everyone = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(ctx.size)]
        mean, eighth = torch.stack(everyone).mean(0), hvd.allreduce(noise, compression=hvd.Compression.int8)
        assert (eighth - mean).abs().max() < 0.1 and (ctx.size == 1 or not torch.equal(eighth, mean))
    return failures


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions(size):
    assert run_ranks(reductions, size, timeout=120) == [[]] * size


def copies(ctx):
    rank, size = ctx.rank, ctx.size
    with started(ctx) as hvd:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.int16):
            even = hvd.allgather(torch.full((2, 3), rank).to(dtype))
            assert torch.equal(even, torch.arange(size).repeat_interleave(2)[:, None].expand(-1, 3).to(dtype))
            uneven = hvd.allgather(torch.full((rank, 2), rank).to(dtype), name=f"uneven {dtype}")
            wanted = torch.cat([torch.full((each, 2), each) for each in range(size)]).to(dtype)
            assert torch.equal(uneven, wanted)
            for root in range(size):
                mine = torch.full((3,), rank + 1).to(dtype)
                assert torch.equal(hvd.broadcast(mine, root), torch.full((3,), root + 1).to(dtype))
                assert torch.equal(mine, torch.full((3,), rank + 1).to(dtype))
                assert hvd.broadcast_(mine, root) is mine
                assert torch.equal(mine, torch.full((3,), root + 1).to(dtype))
        one, two = hvd.grouped_allgather([torch.tensor([rank]), torch.full((rank + 1,), 2.0)])
        assert one.tolist() == list(range(size)) and len(two) == size * (size + 1) // 2
        sent = torch.arange(size * 2).view(-1, 1) + 100 * rank
        got = hvd.alltoall(sent)
        assert got.flatten().tolist() == [100 * peer + 2 * rank + i for peer in range(size) for i in range(2)]
        splits = [(rank + peer) % 3 for peer in range(size)]
        rows = torch.arange(sum(splits)) + 100 * rank
        got, received = hvd.alltoall(rows, splits=torch.tensor(splits), name="uneven")
        assert received.tolist() == [(peer + rank) % 3 for peer in range(size)] and received.dtype == torch.int32
        wanted = []
        for peer in range(size):
            theirs = [(peer + each) % 3 for each in range(size)]
            wanted += [100 * peer + sum(theirs[:rank]) + i for i in range(theirs[rank])]
        assert got.tolist() == wanted
        hvd.barrier()
        # Entries of a sparse tensor: each rank has others, and one in common.
        indices = torch.tensor([[0, rank + 1, 0], [1, rank, 1]])
        sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (size + 2, size + 1))
        for op, over in ((hvd.Sum, 1), (hvd.Average, size)):
            got = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name="sparse", op=op))
            wanted = sum(
                torch.sparse_coo_tensor(
                    torch.tensor([[0, each + 1], [1, each]]), torch.tensor([4.0, 2.0]), (size + 2, size + 1)
                ).to_dense()
                for each in range(size)
            )
            assert torch.allclose(got.to_dense(), wanted / over)
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_copies(size):
    assert run_ranks(copies, size) == [True] * size


def gradients(ctx):
    rank, size = ctx.rank, ctx.size
    with started(ctx) as hvd:

        def of(function, *shape):
            leaf = torch.ones(shape, requires_grad=True)
            function(leaf).backward()
            return leaf.grad.tolist()

        weights = torch.arange(3.0) + rank
        mean = (torch.arange(3.0) + (size - 1) / 2).tolist()
        assert of(lambda x: (hvd.allreduce(x) * weights).sum(), 3) == mean
        assert of(lambda x: (hvd.allreduce(x, op=hvd.Sum) * weights).sum(), 3) == [size * each for each in mean]
        factor = hvd.allreduce(torch.ones(()), op=hvd.Sum).item()
        got = of(lambda x: (hvd.allreduce(x, prescale_factor=2.0, compression=hvd.Compression.fp16) * factor).sum(), 3)
        assert got == [2.0 * size] * 3
        got = of(lambda x: sum(each.sum() for each in hvd.grouped_allreduce([x, 2 * x], op=hvd.Average)), 2)
        assert got == [3.0, 3.0]
        rows = torch.arange(float(size * (size + 1) // 2))
        begin = rank * (rank + 1) // 2
        got = of(lambda x: (hvd.allgather(x) * rows).sum(), rank + 1)
        assert got == rows[begin : begin + rank + 1].tolist()
        got = of(lambda x: hvd.broadcast(x * 3, root_rank=size - 1).sum(), 2)
        assert got == ([3.0, 3.0] if rank == size - 1 else [0.0, 0.0])
        got = of(lambda x: (hvd.alltoall(x) * (rank + 1)).sum(), size)
        assert got == [peer + 1.0 for peer in range(size)]
        splits = [1] * size
        got = of(lambda x: (hvd.alltoall(x, splits=splits)[0] * (rank + 1)).sum(), size + 2)
        assert got == [peer + 1.0 for peer in range(size)] + [0.0, 0.0]
        got = of(lambda x: (hvd.reducescatter(x) * (rank + 1)).sum(), 2 * size)
        assert got == [peer + 1.0 for peer in range(size) for _ in range(2)]
        for function in (lambda x: hvd.allreduce(x, op=hvd.Sum), hvd.alltoall, hvd.allgather):
            # The gradient of a gradient, as a penalty on one wants it.
            leaf = torch.ones(2 * size, requires_grad=True)
            out = function(leaf)
            weight = torch.ones_like(out, requires_grad=True)
            (first,) = torch.autograd.grad(out, leaf, weight, create_graph=True)
            (first * (rank + 1)).sum().backward()
            wanted = function(torch.full((2 * size,), rank + 1.0)) / (size if function is hvd.allgather else 1)
            assert torch.equal(weight.grad, wanted), (weight.grad, wanted)
        assert of(lambda x: hvd.allreduce(x, op=1).sum(), 2) == [2.0] * 2
        try:
            of(lambda x: hvd.allreduce(x, op=4).sum(), 2)
        except NotImplementedError as error:
            return str(error)


def test_gradients():
    for answer in run_ranks(gradients, 2):
        assert answer == "allreduce by Max has no gradient here: Sum and Average have"


def adasum(ctx):
    """Adasum of the ranks' vectors beside its definition, pair by pair."""
    with started(ctx) as hvd:
        vectors = [torch.randn(101, generator=torch.Generator().manual_seed(rank)).double() for rank in range(ctx.size)]
        got = [hvd.allreduce(vectors[ctx.rank], op=hvd.Adasum)]
        small = [vector[:7] * 1e-3 for vector in vectors]
        pair = hvd.grouped_allreduce([vectors[ctx.rank].float(), small[ctx.rank].float()], op=hvd.Adasum)
        zeros = hvd.allreduce(torch.zeros(4) if ctx.rank else torch.ones(4), op=hvd.Adasum)

        def both(a, b):
            return (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b

        def of(parts):
            if ctx.size == 3:  # the third is added to the first before
                return both(both(parts[0], parts[2]), parts[1])
            return both(parts[0], parts[1]) if ctx.size == 2 else both(both(*parts[:2]), both(*parts[2:]))

        assert torch.allclose(got[0], of(vectors), rtol=1e-12)
        assert torch.allclose(pair[0].double(), of(vectors), rtol=1e-4, atol=1e-5)
        assert torch.allclose(pair[1].double(), of(small), rtol=1e-4, atol=1e-8)
        assert zeros.tolist() == [1.0] * 4
        return [each.tolist() for each in (*got, *pair)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_adasum(size):
    answers = run_ranks(adasum, size)
    assert all(answer == answers[0] for answer in answers)  # the same bits


def hostile(ctx):
    import re

    with started(ctx) as hvd:
        flat = torch.ones(4)

        def refused(pattern, call, kind=ValueError):
            try:
                call()
            except kind as error:
                assert re.search(pattern, str(error)), f"{error} isn't {pattern}"
            else:
                raise AssertionError(f"{pattern}: nothing was raised")

        refused("takes a torch.Tensor, not list", lambda: hvd.allreduce([1.0]))
        refused("takes a list of tensors, not Tensor", lambda: hvd.grouped_allreduce(flat))
        refused("takes plain tensors.*meta", lambda: hvd.allreduce(flat.to("meta")))
        refused("sparse_allreduce_async takes it", lambda: hvd.allreduce(flat.to_sparse()))
        refused("takes a sparse tensor", lambda: hvd.sparse_allreduce_async(flat, "x", hvd.Sum))
        refused("must be contiguous.*strides", lambda: hvd.allreduce_(torch.ones(4, 4).t()[1:]))
        refused("is a lazy view", lambda: hvd.allreduce_(torch._neg_view(flat)))
        assert hvd.allreduce(torch._neg_view(flat)).tolist() == [-1.0] * 4
        refused("op must be hvd.Average", lambda: hvd.allreduce(flat, op="sum"))
        for op, equal in ((0, False), (hvd.Sum, 1.0), (hvd.Sum, True)):  # one that is kept, and what is equal to it
            hvd.allreduce(flat, op=op)
            refused("op must be hvd.Average", lambda op=equal: hvd.allreduce(flat, op=op))
        refused("isn't a process set of this job", lambda: hvd.allreduce(flat, process_set=0))
        assert hvd.broadcast(flat, numpy.int64(1)).tolist() == [1.0] * 4
        assert hvd.add_process_set(numpy.array([1])).ranks == [1]
        refused("op must be hvd.Average", lambda: hvd.allreduce(flat, op=[]))
        refused("supersedes average", lambda: hvd.allreduce(flat, average=True, op=hvd.Sum))
        refused("finite number", lambda: hvd.allreduce(flat, prescale_factor=float("nan")))
        refused("can't be reduced", lambda: hvd.allreduce(flat.to(torch.complex64)))
        refused("no average of torch.bool", lambda: hvd.allreduce(flat.bool()))
        refused("Adasum takes floating", lambda: hvd.allreduce(flat.int(), op=hvd.Adasum))
        refused("name must be a str", lambda: hvd.allreduce(flat, name=3))
        refused("a scalar has none", lambda: hvd.allgather(torch.tensor(1.0)))
        refused("one of the ranks", lambda: hvd.broadcast(flat, 7))
        refused("pass splits", lambda: hvd.alltoall(torch.ones(3)))
        refused("splits add up", lambda: hvd.alltoall(flat, splits=[4, 4]))
        refused("unknown, or was synchronized", lambda: hvd.poll(10**9))
        refused("between 0 and 1", lambda: hvd.add_process_set([0, 5]))
        refused("was added before", lambda: hvd.add_process_set([0, 1]))
        first = hvd.allreduce_async(flat, name="twice")
        refused("'allreduce.twice' is under way", lambda: hvd.allreduce_async(flat, name="twice"))
        hvd.synchronize(first)
        hvd.synchronize(hvd.allreduce_async(flat, name="twice"))
        # An operation that differs between the ranks fails on all of them, and the next operation
        # works.
        differing = {
            "shape": lambda: hvd.allreduce(torch.ones(3 + ctx.rank), name="shape"),
            "data type": lambda: hvd.allreduce(flat.double() if ctx.rank else flat, name="dtype"),
            "reduction": lambda: hvd.allreduce(flat, op=hvd.Sum if ctx.rank else hvd.Min, name="op"),
            "prescale and postscale factor": lambda: hvd.allreduce(flat, postscale_factor=1.0 + ctx.rank, name="scale"),
            "root rank": lambda: hvd.broadcast(flat, ctx.rank, name="root"),
            "shape behind the first dimension": lambda: hvd.allgather(torch.ones(2, 2 + ctx.rank), name="gather"),
            "number of dimensions": lambda: hvd.allgather(torch.ones((2,) * (1 + ctx.rank)), name="dims"),
            "number of tensors": lambda: hvd.grouped_allreduce([flat] * (1 + ctx.rank), name="group"),
        }
        for what, call in differing.items():
            refused(f"differ in {what}: rank 0 has .*, rank 1 has", call, hvd.HorovodInternalError)
        assert hvd.allreduce(flat, op=hvd.Sum).tolist() == [2.0] * 4
    refused("has not been initialized; use hvd.init", hvd.rank)
    refused("has not been initialized; use hvd.init", lambda: hvd.allreduce(flat))
    return True


def test_what_is_refused():
    assert run_ranks(hostile, 2) == [True, True]
