"""What a step costs: the path of a gather, the collectives of a step, and the memory of the arena."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from collectives.sharded import ShardedModule, fully_shard
from collectives.sharded.param import ParamGroup
from collectives.torch_compat import can_swap_storage_memory
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.sharded.programs import Net, loss_of, shard_blocks
from tests.sharded.test_order_check import CountingStore
from tests.sharded.training import over_comm


@over_comm
def gather_paths(ctx):
    """Return the files of the calls from a forward to each all-gather, which the communicator's C code makes."""
    net = shard_blocks(Net(), comm=ctx.communicator())
    loss_of(net, ctx.rank, 0).backward()
    found = []

    def look(frame, event, _):
        if event != "call" or frame.f_code is not ParamGroup.all_gather.__code__:
            return
        path = []
        while frame.f_code is not ShardedModule.__call__.__code__:
            path.append(frame.f_code.co_filename)
            frame = frame.f_back
        found.append([*path, frame.f_code.co_filename])

    sys.setprofile(look)
    try:
        net(torch.ones(2, 16))
    finally:
        sys.setprofile(None)
    return found


def test_the_path_of_a_gather():
    for found in run_ranks(gather_paths, 2):
        assert len(found) == 4  # a unit for each block and one for the rest
        for path in found:
            assert len(set(path)) + 1 <= 6 and len(path) + 1 <= 12, path


@over_comm
def collectives_of_steps(ctx, machines):
    """Return for each step the collectives that the ranks have called, and the calls of the store."""
    with joined(ctx, machines) as comm:
        net = shard_blocks(Net(), comm=comm, reshard_after_forward=True)
        check = net._sharded_unit.scheduler._check
        if check is not None:
            check._store = CountingStore(check._store)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        found = []
        for step in range(8):
            before = comm._native.sequence(), 0 if check is None else check._store.calls
            loss_of(net, ctx.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = comm._native.sequence(), 0 if check is None else check._store.calls
            found.append(tuple(late - early for early, late in zip(before, after, strict=True)))
        ctx.barrier()
        return found


@pytest.mark.parametrize(("machines", "gathers"), [("aaaa", 2 if can_swap_storage_memory() else 6), ("aabb", 4 + 2)])
def test_the_collectives_of_a_step(machines, gathers):
    """On one host barriers before and behind the forward. On two, four gathers in the forward, and two in the
    backward, which begins with the other ones. On both four reductions, and one sum of which parameters were used.
    """
    for found in run_ranks(collectives_of_steps, 4, machines):
        assert found[5:] == [(gathers + 4 + 1, 0)] * 3, found


@over_comm
def two_models(ctx):
    """A forward of another model, whose gradients nobody wants yet, or ever."""
    comm = ctx.communicator().split(0)
    first, second = (shard_blocks(Net(), comm=comm) for _ in range(2))
    for _ in range(5):  # in which the ranks begin to share their shards
        loss_of(first, ctx.rank, 0).backward()
        loss_of(second, ctx.rank, 1).backward()
    counts = []
    for other in (None, first, first):
        if other is not None:
            loss_of(other, ctx.rank, 0)
        before = comm._native.sequence()
        loss_of(second, ctx.rank, 1).backward()
        counts.append(comm._native.sequence() - before)
    loss_of(first, ctx.rank, 0).backward()
    assert all(param.grad is not None for param in first.parameters())
    unit = weakref.ref(first._sharded_unit)
    loss_of(first, ctx.rank, 0)
    del first, other
    gc.collect()
    return counts, unit() is None


def test_a_backward_reduces_the_units_of_its_own_model():
    for counts, is_freed in run_ranks(two_models, 2):
        assert len(set(counts)) == 1 and is_freed


# ---- Memory.


@over_comm
def arena_of(ctx, reshard):
    """Return for each step what the communicator was asked for, and the bytes that the arena has."""
    comm = ctx.communicator().split(0)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    for layer in layers:
        fully_shard(layer, comm=comm, reshard_after_forward=reshard)
    model = fully_shard(nn.Sequential(layers, nn.Linear(64, 64)), comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    asked, empty = [], comm.empty

    def counted(count, *, dtype):
        asked.append(count * dtype.itemsize)
        return empty(count, dtype=dtype)

    comm.empty = counted
    found = []
    for _ in range(8):
        asked.clear()
        model(torch.full((2, 64), 0.1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(len(asked))
    return found


@pytest.mark.parametrize("reshard", [True, False])
def test_a_steady_step_allocates_nothing(reshard):
    for first, *later in run_ranks(arena_of, 2, reshard):
        # The unit in use, the outermost one, and gradients. From the fourth step on nothing is gathered, with reshards.
        assert later[:2] == [0, 0] and later[-3:] == [0, 0, 0] and first <= (3 if reshard else 10) and sum(later) <= 10


class Keeps(nn.Module):
    """Keeps views of its weight, and a copy."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), []

    def forward(self, x):
        weight = self.linear.weight.detach()
        self.kept = [weight, weight[2], weight.clone()]
        return self.linear(x)


@over_comm
def kept_views(ctx):
    """Views that a program keeps have their values again while the unit is gathered."""
    model = fully_shard(nn.Sequential(fully_shard(Keeps(), comm=ctx.communicator())), comm=ctx.communicator())
    model(torch.ones(2, 8)).sum().backward()
    weight, row, copied = model[0].kept
    with model[0]._sharded_unit.unsharded():
        return weight.equal(copied) and row.equal(copied[2])


def test_views_that_programs_keep():
    assert run_ranks(kept_views, 2) == [True, True]
