"""Communicator operations on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from collectives.comm.multinode.nccl_hierarchical import enable_hierarchical
from collectives.errors import CudaError
from tests.ranks import run_ranks
from tests.streams.checker import checker
from tests.streams.running import expect
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
REDUCING = ["sum", "max", "avg", 0.5]


def values(ctx, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + ctx.rank)
    made = torch.randn(*shape, generator=generator) * 8
    return made.to(dtype).to(ctx.device)


def both(program, ranks, *args, **options):
    """Compare a program's results on the simulated GPU and on the host, bit for bit."""
    there = run_ranks(program, ranks, *args, device="simulated", **options)
    here = run_ranks(program, ranks, *args, **options)
    assert there == here
    return there


def every_operation(ctx, use_async):
    comm = ctx.new_communicator()
    size, rank = comm.size, comm.rank
    done = []

    def do(name, result, *args, **options):
        work = getattr(comm, name)(*args, async_op=use_async, **options)
        assert (work is not None) == use_async
        if work is not None:
            assert work.wait()
        if result is not None:
            result.mul_(1)  # it is used on the current stream
            done.append(result)

    cases = []  # everything is allocated before, as a copy from the host waits
    for dtype in DTYPES:
        for op in REDUCING:
            if isinstance(op, str) or dtype.is_floating_point:
                cases.append((values(ctx, 1000, dtype=dtype), op))
    rows = [rank + peer + 1 for peer in range(size)]
    blocks = [values(ctx, size, 5), values(ctx, size, 5), values(ctx, sum(rows), 3), values(ctx, 5), values(ctx, 7)]
    with steps(ctx):
        for tensor, op in cases:
            do("all_reduce", tensor, tensor, op)
        do("reduce", blocks[3] if rank == size - 1 else None, blocks[3], size - 1, "max")
        do("broadcast", blocks[4], blocks[4], size - 1)
        out = torch.empty_like(blocks[3])
        do("reduce_scatter", out, out, blocks[0])
        whole = torch.zeros_like(blocks[0])
        whole[rank] += 1
        do("all_gather", whole, whole, whole[rank])
        out = torch.empty_like(blocks[1])
        do("all_to_all", out, out, blocks[1])
        out = torch.empty_like(blocks[2])
        do("all_to_all", out, out, blocks[2], rows, rows)
        for root in range(size):
            out = torch.zeros_like(blocks[0]) if rank == root else None
            do("gather", out, out, whole[rank], root)
            out = torch.zeros_like(blocks[3])
            do("scatter", out, out, blocks[1] if rank == root else None, root)
        got = torch.empty_like(blocks[3])
        with comm.group():
            works = [
                comm.send(blocks[3], (rank + 1) % size, async_op=use_async),
                comm.recv(got, (rank - 1) % size, async_op=use_async),
            ]
        if use_async:
            assert all(work.wait() for work in works)
        done.append(got.mul_(2))
        del works
    comm.barrier()
    results = [each.tolist() for each in done]
    comm.close()
    return results


@pytest.mark.parametrize("use_async", [False, True])
def test_every_operation(use_async):
    both(every_operation, 2, use_async)


def algorithms(ctx, name, use_async):
    comm = ctx.new_communicator()
    tensors = [values(ctx, 3000, seed=seed) for seed in range(3)]
    waits = [comm.all_reduce(values(ctx, 3000), op, algorithm=name, async_op=use_async) for op in ("sum", 0.5)]
    for work in waits:  # plans are made
        assert work is None or work.wait()
    small, sums = values(ctx, 1500), values(ctx, 1500)
    halves = [values(ctx, 3000, dtype=torch.bfloat16, seed=seed) for seed in range(2)]
    for _ in range(2):
        comm.reduce_scatter(small, tensors[0], algorithm=name)
        comm.all_reduce(torch.zeros_like(halves[0]), algorithm=name)
    with steps(ctx):
        for tensor in (*tensors, *halves):
            tensor.add_(1)
        # Sums of 16-bit values are sent from scratch, in fp32.
        first = comm.all_reduce(halves[0], algorithm=name, async_op=use_async)
        comm.all_reduce(halves[1], algorithm=name)
        if use_async:
            first.wait()
        # Two calls in a row share the scratch memory; the second is on the current stream.
        first = comm.reduce_scatter(small, tensors[0], algorithm=name, async_op=use_async)
        comm.reduce_scatter(sums, tensors[1], algorithm=name)
        if use_async:
            first.wait()
        small.add_(sums)
        first = comm.all_reduce(tensors[0], algorithm=name, async_op=use_async)
        comm.all_reduce(tensors[1], algorithm=name)
        if use_async:
            first.wait()
        tensors[0].add_(1)
        comm.all_reduce(tensors[2], 0.5, algorithm=name)
    results = [each.tolist() for each in (*tensors, *halves, small)]
    comm.barrier()
    comm.close()
    return results


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_our_algorithms(name, use_async):
    both(algorithms, 2, name, use_async)


def streams_and_futures(ctx):
    comm = ctx.communicator()
    tensor = values(ctx, 1000)
    side = torch.cuda.Stream()
    with steps(ctx):
        side.wait_stream(torch.cuda.current_stream())
        comm.all_reduce(tensor, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        tensor.add_(1)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            comm.all_reduce(tensor)
        torch.cuda.current_stream().wait_stream(side)
        work = comm.all_reduce(tensor, async_op=True)
        assert work.future().wait() is not None
        tensor.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the default stream's address is 0
            comm.all_reduce(tensor, async_op=True, stream=torch.cuda.default_stream()).wait()
            tensor.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        for _ in range(20):  # nobody keeps tensor or Work
            comm.all_reduce(torch.ones(1 << 10, device=comm.device), async_op=True)
    comm.barrier()
    return tensor.sum().item()


def test_streams_and_futures():
    results = run_ranks(streams_and_futures, 2, device="simulated")
    assert results[0] == results[1]


def groups(ctx, use_async):
    comm = ctx.communicator()
    tensors = [values(ctx, 100, seed=seed) for seed in range(4)]
    with steps(ctx):
        with comm.group():
            works = [comm.all_reduce(each, async_op=use_async) for each in tensors]
        for work in works if use_async else ():
            work.wait()
        for each in tensors:
            each.mul_(2)
        works = work = None
    return [each.tolist() for each in tensors]


@pytest.mark.parametrize("use_async", [False, True])
def test_groups(use_async):
    both(groups, 2, use_async)


def captured(ctx):
    comm = ctx.communicator()
    tensor = torch.ones(8, device=ctx.device)
    comm.all_reduce(tensor)
    tensor.fill_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        comm.all_reduce(tensor)
        twice = tensor * 2
    assert tensor.tolist() == [1.0] * 8  # a capture runs nothing
    for _ in range(2):
        graph.replay()
    return tensor.tolist(), twice.tolist()


def test_capture():
    assert run_ranks(captured, 2, device="simulated") == [([10.0] * 8, [20.0] * 8)] * 2  # 1 -> 4 -> 10


def memory(ctx):
    comm = ctx.new_communicator()
    tensor = comm.empty(1000, torch.bfloat16)
    tensor.fill_(1.0)
    registration = comm.register(tensor)
    comm.all_reduce(tensor)
    total = tensor.float().sum().item()
    comm.deregister(registration)
    del tensor
    child = comm.split(0, key=-comm.rank)
    other = torch.ones(3, device=comm.device)
    child.all_reduce(other)
    result = total, other.tolist(), child.rank
    child.close()
    comm.close()
    return result


def test_memory_and_split():
    both(memory, 2)


def dropped_memory(ctx):
    """A tensor of `empty` that is dropped in a step, even while a stream uses it, has nobody wait."""
    comm = ctx.new_communicator()

    def allocated(nbytes):
        return sum(block.kind == "nccl" and block.nbytes == nbytes for block in checker.blocks.values())

    tensor, side = comm.empty(300_001, torch.float32), torch.cuda.Stream()
    tensor.fill_(1.0)
    comm.all_reduce(tensor)
    side.wait_stream(torch.cuda.current_stream())
    with steps(ctx):
        with torch.cuda.stream(side):
            tensor.mul_(2)
        del tensor
        gc.collect()
    assert allocated(1200004) == 1
    other = comm.empty(300_003, torch.float32)  # it waits
    checker.flush()
    assert (allocated(1200004), allocated(1200012)) == (0, 1)
    with steps(ctx):
        other.fill_(1.0)
        del other
    comm.close()
    checker.flush()
    assert allocated(1200012) == 0


def test_dropped_memory():
    run_ranks(dropped_memory, 2, device="simulated")


def wrong_windows(ctx):
    """What the checker says of windows: freed memory, sizes that differ, and a communicator that ends first."""
    comm = ctx.new_communicator()
    library, native = comm.engine.library, comm._native
    with pytest.raises(CudaError):  # memory that is none of ncclMemAlloc's
        native.window_register(torch.ones(1024, device=ctx.device).data_ptr(), 4096, 1)
    address = library.mem_alloc(8192)
    window = native.window_register(address, 4096 * (1 + ctx.rank), 1)
    expect("window", "different sizes")
    native.window_deregister(window)
    window = native.window_register(address, 8192, 1)
    library.mem_free(address)
    expect("window", "is freed", "registered as a window")
    native.window_deregister(window)
    tensor = comm.empty(4, window=True)
    comm.register_window(tensor)
    comm._registrations.clear()
    comm.close()
    expect("window", "a communicator is destroyed")


def test_wrong_windows():
    run_ranks(wrong_windows, 2, device="simulated")


def two_levels(ctx):
    """What `init(hierarchical=True)` does, as on two nodes of two ranks: steps on one stream, with scratch between."""
    comm = ctx.new_communicator()
    comm.peers = [SimpleNamespace(node=node) for node in "aabb"]
    enable_hierarchical(comm)
    done = []
    cases = [values(ctx, count, dtype=dtype) for count in (4, 4003, 30_000) for dtype in DTYPES]
    with steps(ctx):
        for tensor in cases:
            count = tensor.numel()
            for op in REDUCING:
                if isinstance(op, str) or tensor.dtype.is_floating_point:
                    whole = tensor.clone()
                    comm.all_reduce(whole, op)
                    works = [comm.all_reduce(tensor.clone(), op, async_op=True) for _ in range(2)]
                    done += [whole.mul_(1), *(work.result().mul_(1) for work in works if work.wait())]
            large, part = tensor.repeat(comm.size), torch.empty_like(tensor)
            comm.reduce_scatter(part, large, "max")
            comm.all_gather(large, part)
            work = comm.all_gather(torch.empty_like(large), part, async_op=True)
            assert work.wait() and large.numel() == count * comm.size
            done += [part, large, work.result().mul_(1)]
    done = [each.cpu() for each in done]
    comm.close()
    return [each.tolist() for each in done]


@pytest.mark.sampled(one_in=3)
def test_two_levels():
    both(two_levels, 4)
