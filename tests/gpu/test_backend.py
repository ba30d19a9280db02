"""The backend "collectives" of torch.distributed on every device: the host engine's numbers, nothing to report."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives  # noqa: F401  (registers the backend)
from tests.gpu.devices import check, everywhere, in_group

COUNT = 1000


def launched(rank):
    """All operations, and those of one coalescing block, as (outputs, function of async_op that returns a Work)."""
    size, own = rank.size, rank.random(COUNT)
    other = torch.empty_like(own)
    gathered, scattered = rank.full(0.0, size * COUNT), rank.full(0.0, COUNT)
    whole, exchanged = rank.random(size * COUNT, seed=1), rank.full(0.0, size * COUNT)
    lists = [torch.empty_like(own) for _ in range(size)]
    parts = [rank.random(COUNT, seed=3 + r) for r in range(size)]
    strided = rank.random(COUNT, 2, seed=2)[:, 0]
    ints = (rank.random(COUNT, seed=9) * 100).to(torch.int64)
    flags = rank.random(COUNT, seed=4) > 0
    last = size - 1
    return [
        ([own], lambda a: dist.all_reduce(own, async_op=a)),
        ([strided], lambda a: dist.all_reduce(strided, op=dist.ReduceOp.MAX, async_op=a)),
        ([ints], lambda a: dist.all_reduce(ints, op=dist.ReduceOp.BXOR, async_op=a)),
        ([flags], lambda a: dist.all_reduce(flags, op=dist.ReduceOp.SUM, async_op=a)),
        ([gathered], lambda a: dist.all_gather_into_tensor(gathered, own, async_op=a)),
        ([scattered], lambda a: dist.reduce_scatter_tensor(scattered, whole, op=dist.ReduceOp.AVG, async_op=a)),
        ([exchanged], lambda a: dist.all_to_all_single(exchanged, whole, async_op=a)),
        (lists, lambda a: dist.all_gather(lists, own, async_op=a)),
        (lists, lambda a: dist.all_to_all(lists, parts, async_op=a)),
        ([other], lambda a: dist.reduce_scatter(other, parts, async_op=a)),
        ([other], lambda a: dist.broadcast(other, last, async_op=a)),
        ([other] if rank.rank == last else [], lambda a: dist.reduce(other, last, async_op=a)),
        ([scattered], lambda a: dist.scatter(scattered, parts if rank.rank == 0 else None, 0, async_op=a)),
        (lists if rank.rank == last else [], lambda a: dist.gather(
            own, lists if rank.rank == last else None, last, async_op=a)),
    ]  # fmt: skip


@in_group(backend="collectives")
def operations(rank, asynchronous):
    operations, results, kept = launched(rank), [], []
    with rank.no_host_waits():
        for outputs, launch in operations:
            work = launch(asynchronous)
            if asynchronous:
                work.wait()
            for each in outputs:
                kept.append(each.clone())
                if each.dtype.is_floating_point:
                    each.mul_(0.5)  # used, and written, on the current stream
    rank.synchronize()
    dist.barrier()
    for each in kept:
        results.append(each)
    return results


@everywhere({"blocking": False, "asynchronous": True})
def test_operations(device, ranks, case):
    check(device, operations, ranks, case == "asynchronous", same=False)


@in_group(backend="collectives")
def ordered(rank):
    """Works that are waited for on a side stream, futures, a coalescing block and a batch of sends and receives."""
    after, before = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    tensors = [rank.random(COUNT, seed=seed) for seed in range(4)]
    got, doubled = rank.full(0.0, COUNT), rank.full(0.0, COUNT)
    with rank.no_host_waits():
        work = dist.all_reduce(tensors[0], async_op=True)
        side = rank.new_stream()
        with rank.use(side):
            work.wait()
            torch.mul(tensors[0], 2, out=doubled)
        rank.join(side)
        future = dist.all_reduce(tensors[1], async_op=True).get_future().then(lambda done: done.value()[0] + 1)
        shifted = future.wait()
        with dist.distributed_c10d._coalescing_manager(device=torch.device(rank.device), async_ops=True) as manager:
            dist.all_reduce(tensors[2])
            dist.all_reduce(tensors[3])
        manager.wait()
        if rank.size > 1:
            for each in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, tensors[2], after), dist.P2POp(dist.irecv, got, before)]
            ):
                each.wait()
        total = doubled + shifted + tensors[2] + tensors[3] + got
    dist.barrier()
    return total


@everywhere()
def test_streams_futures_and_blocks(device, ranks):
    check(device, ordered, ranks, same=False)


@in_group(backend="collectives")
def captured(rank):
    tensor, out = rank.random(COUNT), rank.full(0.0, rank.size * COUNT)

    def step():
        tensor.mul_(0.5)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(out, tensor)

    step()
    replay = rank.capture(step)
    for _ in range(2):
        replay()
    rank.synchronize()
    return tensor, out


@everywhere()
def test_a_step_in_a_cuda_graph(device, ranks):
    check(device, captured, ranks)


@in_group(backend="collectives")
def trained(rank):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(rank.device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [rank.random(4, 8, seed=seed) for seed in range(4)]
    for batch in batches:
        wrapped(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rank.synchronize()
    return [each.detach() for each in model.parameters()]


@everywhere(ranks=(2,))
def test_ddp_without_a_hook(device, ranks):
    check(device, trained, ranks, exact=device != "cuda")
