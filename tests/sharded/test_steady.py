"""What a step costs: the path of a gather, the collectives of a step, and the memory of the arena."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import collectives
from collectives.comm.communicator import Communicator
from collectives.sharded import fully_shard
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.sharded.programs import Net, loss_of, shard_blocks
from tests.sharded.test_order_check import CountingStore
from tests.sharded.training import over_comm

PACKAGE = str(Path(collectives.__file__).parent)


@over_comm
def gather_paths(ctx):
    """Return the files and the number of calls from a forward to each all-gather that it makes."""
    net = shard_blocks(Net(), comm=ctx.communicator())
    loss_of(net, ctx.rank, 0).backward()
    found = []

    def look(frame, event, _):
        if event != "call" or frame.f_code is not Communicator.all_gather.__code__:
            return
        path = []
        while not (path and path[-1][1] == "__call__"):
            path.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        found.append(([name for name, _ in path if name.startswith(PACKAGE)], len(path)))

    sys.setprofile(look)
    try:
        net(torch.ones(2, 16))
    finally:
        sys.setprofile(None)
    return found


def test_the_path_of_a_gather():
    for found in run_ranks(gather_paths, 2):
        assert len(found) == 4  # a unit for each block and one for the rest
        for files, calls in found:
            assert len(set(files)) <= 6 and calls <= 12, found


@over_comm
def collectives_of_steps(ctx, machines):
    """Return for each step the collectives that the ranks have called, and the calls of the store."""
    with joined(ctx, machines) as comm:
        net = shard_blocks(Net(), comm=comm, reshard_after_forward=True)
        check = net._unit.scheduler._check
        if check is not None:
            check._store = CountingStore(check._store)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        found = []
        for step in range(6):
            before = comm._native.sequence(), 0 if check is None else check._store.calls
            loss_of(net, ctx.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = comm._native.sequence(), 0 if check is None else check._store.calls
            found.append(tuple(late - early for early, late in zip(before, after, strict=True)))
        ctx.barrier()
        return found


@pytest.mark.parametrize("machines", ["aaaa", "aabb"])
def test_the_collectives_of_a_step(machines):
    """Gathers of four units in the forward and in the backward, four reductions, and which gradients were used."""
    for found in run_ranks(collectives_of_steps, 4, machines):
        assert found[3:] == [(4 + 4 + 4 + 1, 0)] * 3, found


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
    for _ in range(4):
        asked.clear()
        model(torch.full((2, 64), 0.1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(len(asked))
    return found


@pytest.mark.parametrize("reshard", [True, False])
def test_a_steady_step_allocates_nothing(reshard):
    for first, *later in run_ranks(arena_of, 2, reshard):
        # The unit in use, the outermost one, and gradients.
        assert later == [0, 0, 0] and first <= (3 if reshard else 10)


class Keeps(nn.Module):
    """Keeps its weight, views of it and copies."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), []

    def forward(self, x):
        weight = self.linear.weight
        self.kept = [weight, weight.detach(), weight[2], weight.detach().clone()]
        return self.linear(x)


@over_comm
def kept_views(ctx):
    """Views that a program keeps past a reshard raise; they have their values again while the unit is gathered."""
    model = fully_shard(nn.Sequential(fully_shard(Keeps(), comm=ctx.communicator())), comm=ctx.communicator())
    model(torch.ones(2, 8)).sum().backward()
    *views, copied = model[0].kept
    found = []
    for view in views:
        with pytest.raises(RuntimeError) as caught:
            view.detach().sum().item()
        found.append(str(caught.value))
    with model[0]._unit.unsharded():
        assert torch.equal(views[1], copied) and torch.equal(views[2], copied[2])
    return found


def test_views_that_programs_keep():
    for found in run_ranks(kept_views, 2):
        assert len(found) == 3 and all(found)
