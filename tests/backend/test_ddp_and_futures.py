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


@over("collectives")
def mismatch_in_backward(ctx):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    train_once(model)
    with pytest.raises(Mismatch) as caught:
        if ctx.rank == 0:
            dist.broadcast(torch.zeros(2), 0)
        else:
            train_once(model)
    return "ranks did not make the same call" in str(caught.value)


def test_ddp_raises_the_backends_error_when_the_ranks_differ(tmp_path):
    assert run_ranks(mismatch_in_backward, 2, tmp_path / "store") == [True, True]


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


@over("collectives")
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
    return True


def test_a_failed_future_raises_wherever_it_is_read(tmp_path):
    assert run_ranks(failed_future, 2, tmp_path / "store") == [True, True]


@over("collectives")
def results_alive(ctx):
    """Return how many results live on after their futures are dropped, without a garbage collection."""
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
        return sum(ref() is not None for ref in found)
    finally:
        gc.enable()


def test_a_future_that_is_dropped_releases_its_tensors(tmp_path):
    assert run_ranks(results_alive, 2, tmp_path / "store") == [0, 0]


def pending(ctx):
    """Return the result of a functional collective that nobody has waited for: 1 + 2 in each of 6 places."""
    made = all_reduce(torch.full((2, 3), ctx.rank + 1.0), "sum", dist.group.WORLD)
    assert isinstance(made, AsyncCollectiveTensor)
    return made


@over("collectives")
def functional_results(ctx):
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
    return [sorted(set(each.flatten().tolist())) for each in found]


def test_results_of_functional_collectives_go_into_others(tmp_path):
    assert run_ranks(functional_results, 2, tmp_path / "store") == [[[3.0], [3.0], [6.0], [3.0], [6.0], [3.0]]] * 2
