"""What torch's own C++ and functional code hands the backend "collectives", or reads from it."""

import gc
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.nn.parallel import DistributedDataParallel

from collectives.errors import Mismatch, RemoteError
from tests.backend.groups import over
from tests.ranks import Died, run_ranks


def train_once(model):
    model(torch.ones(2, 4)).sum().backward()


def mismatch_in_backward(ctx):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    train_once(model)
    with pytest.raises(Mismatch, match="ranks did not make the same call"):
        if ctx.rank == 0:
            dist.broadcast(torch.zeros(2), 0)
        else:
            train_once(model)


def failed_future(ctx):
    tensor = torch.ones(2 + ctx.rank)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    chained = future.then(lambda done: done.value())
    for each, kind in ((future, Mismatch), (chained, RuntimeError), (torch.futures.collect_all([future]), None)):
        if kind is None:
            with pytest.raises(Mismatch):
                each.wait()[0].value()
            continue
        for look in (each.wait, each.value):
            with pytest.raises(kind, match="did not make the same call"):
                look()


def dropped_results(ctx):
    """A future that is dropped releases its tensors, without a garbage collection."""
    peer = 1 - ctx.rank

    def started():
        whole, strided, parts = torch.ones(1 << 18), torch.ones(4, 6).t(), [torch.ones(3) for _ in range(2)]
        received = torch.zeros(5)
        works = [
            dist.all_reduce(whole, async_op=True), dist.all_reduce(strided, async_op=True),
            dist.all_gather(parts, torch.ones(3), async_op=True), dist.irecv(received, peer),
        ]  # fmt: skip
        futures = [work.get_future() for work in works]
        dist.isend(torch.ones(5), peer).wait()
        for work, future in zip(works, futures, strict=True):
            future.wait()
            work.wait()
        return [weakref.ref(tensor) for tensor in (whole, strided, *parts, received)]

    gc.collect()
    gc.disable()
    try:
        found = started()
        deadline = time.monotonic() + 30  # the thread that completed the futures may hold them for a moment
        while any(ref() is not None for ref in found) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [ref() for ref in found] == [None] * len(found)
    finally:
        gc.enable()


def pending(ctx):
    """Return the result of a functional collective that nobody has waited for: 1 + 2 in each of 6 places."""
    made = all_reduce(torch.full((2, 3), ctx.rank + 1.0), "sum", dist.group.WORLD)
    assert isinstance(made, AsyncCollectiveTensor)
    return made


def functional_results(ctx):
    """Results of functional collectives go into others."""
    parts = [torch.empty(2, 3) for _ in range(ctx.size)]
    dist.all_gather(parts, pending(ctx))
    whole = torch.empty(4, 3)
    dist.all_gather_into_tensor(whole, pending(ctx))
    summed = pending(ctx)
    dist.all_reduce(summed)
    sent = pending(ctx)
    dist.broadcast(sent, 0)
    scattered = torch.empty(1, 3)
    dist.reduce_scatter_tensor(scattered, pending(ctx))
    exchanged = torch.empty(2, 3)
    dist.all_to_all_single(exchanged, pending(ctx))
    found = [torch.stack(parts), whole, summed, sent, scattered, exchanged]
    assert [each.unique().tolist() for each in found] == [[3.0], [3.0], [6.0], [3.0], [6.0], [3.0]]


def calls_of_callbacks(ctx):
    """Collectives of the program, of callbacks, and of callbacks in these, on ranks of which one is late each time."""
    found = []

    def reduce(numel, value=1.0):
        return dist.all_reduce(torch.full((numel,), value), async_op=True).get_future()

    def late(rank):
        if ctx.rank == rank:
            time.sleep(0.05)

    def third(done):
        late(1)
        found.append(dist_sum(5))
        return done.value()

    def dist_sum(numel):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        return (numel, tensor.sum().item())

    def second(done):
        late(0)
        inner = reduce(3).then(third)
        found.append(dist_sum(7))
        return inner.wait()

    for _ in range(3):
        first, other = reduce(1 << 20), reduce(2)
        ends = [first.then(second), other.then(third)]
        found.append(dist_sum(11))
        dist.barrier()
        assert [len(end.wait()[0]) for end in ends] == [3, 2]
    assert found == [(5, 10.0), (7, 14.0), (5, 10.0), (11, 22.0)] * 3


def callbacks_that_wait(ctx):
    """A callback may wait for another operation; those of receives don't block where they are registered."""

    def again(done):
        total = done.value()[0]
        return dist.all_reduce(total.clone(), async_op=True).get_future().wait()[0] + total

    found = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again).wait()
    strided = torch.ones(3, 2)[:, 0]
    nested = dist.all_reduce(strided, async_op=True).get_future().then(again).then(lambda done: done.value() * 2).wait()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        dist.barrier(async_op=True).get_future().then(lambda done: 1 / 0).wait()
    assert found.tolist() == [6.0] * 3 and nested.tolist() == [12.0] * 3
    received, found = torch.zeros(3), []
    chained = dist.irecv(received, 1 - ctx.rank).get_future().then(lambda done: found.append(received.sum().item()))
    sent = dist.isend(torch.full((3,), ctx.rank + 1.0), 1 - ctx.rank)  # both ranks have registered before they send
    chained.wait()
    sent.wait()
    assert found == [6.0 - 3 * ctx.rank]
    assert not dist.irecv(torch.ones(1), 1 - ctx.rank, tag=9).get_future().done()


@over("collectives")
def in_one_group(ctx):
    for program in (
        mismatch_in_backward, failed_future, dropped_results, functional_results, calls_of_callbacks,
        callbacks_that_wait,
    ):  # fmt: skip
        program(ctx)


def test_futures_and_errors(tmp_path):
    run_ranks(in_one_group, 2, tmp_path / "store")


def killed_before_backward(ctx, path):
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    train_once(model)
    if ctx.rank == 1:
        os._exit(7)
    with pytest.raises(RemoteError) as caught:
        train_once(model)
    del model
    dist.destroy_process_group()
    return caught.value.peers


def test_ddp_raises_the_backends_error_when_a_rank_dies(tmp_path):
    first, dead = run_ranks(killed_before_backward, 2, tmp_path / "store", deaths=[1])
    assert isinstance(dead, Died) and first == (1,)
