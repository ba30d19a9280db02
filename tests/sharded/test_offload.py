"""Shards on the host: the optimizer reads gradients that have arrived, and all-gathers read valid values."""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn

from collectives.sharded import CPUOffloadPolicy, Unit, fully_shard
from collectives.sharded.mesh import Ranks
from collectives.sharded.module import ShardedModule
from collectives.sharded.scheduler import get_scheduler
from collectives.sharded.sharding import shard
from collectives.sharded.streams import HostCopies
from tests.ranks import run_ranks
from tests.sharded.late_copies import DEVICE, Cuda, late_copies


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def opened(ctx):
    """Return a communicator whose device isn't the host to torch, and its double of torch.cuda."""
    comm = ctx.communicator().split(0)
    comm.device = DEVICE
    cuda = Cuda()
    get_scheduler(comm).host_copies = HostCopies(cuda)
    return comm, cuda


def units_of(model, comm, whole, **how):
    """Shard a model's layers and itself; `whole`: all of it stays on each rank."""
    for each in (model[0], model[2], model):
        if whole:
            shard(each, ShardedModule, Ranks(None, None, comm), **how)
        else:
            fully_shard(each, comm=comm, **how)
    return model


def train(model, rank, cuda=None, micro=1):
    """Return the gradients of each of three steps, and the number of waits of the host in each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found, waits = [], []
    for step in range(3):
        before = 0 if cuda is None else cuda.waits
        for part in range(micro):
            torch.manual_seed(100 * step + 10 * part + rank)
            model(torch.randn(4, 6)).square().sum().backward()
        found += [param.grad.clone() for param in model.parameters()]
        waits.append(0 if cuda is None else cuda.waits - before)
        optimizer.step()
        optimizer.zero_grad(set_to_none=micro == 1)
    return [*found, *(param.detach().clone() for param in model.parameters())], waits


def offloaded(ctx, whole, micro):
    comm, cuda = opened(ctx)
    plain = ctx.communicator().split(0)
    expected, _ = train(units_of(net(), plain, whole), ctx.rank, micro=micro)
    with late_copies(cuda) as pinned:
        model = units_of(net(), comm, whole, offload_policy=CPUOffloadPolicy())
        made = len(pinned)
        found, waits = train(model, ctx.rank, cuda, micro)
    return {
        "gradients and parameters": all(map(torch.equal, expected, found)),
        "waits": waits,
        "not page-locked": made == 0 or len(pinned) == made,
        "kept for the copies' stream": len(cuda.recorded) > 0,
    }


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sharded"])
def test_gradients_on_the_host_are_there_when_the_optimizer_reads_them(whole, micro):
    """The copies end with the backward, in one place: an event for each of the two streams."""
    for found in run_ranks(offloaded, 2, whole, micro):
        assert found == {
            "gradients and parameters": True,
            "waits": [2 * micro] * 3,
            "not page-locked": False,
            "kept for the copies' stream": True,
        }


def written(ctx):
    comm, cuda = opened(ctx)
    found = {}
    with late_copies(cuda):
        model = units_of(net(), comm, False, offload_policy=CPUOffloadPolicy())
        copies, open_at = get_scheduler(comm).host_copies, []

        class Watched(torch.optim.SGD):
            def step(self):
                open_at.append(bool(copies._events))

        optimizer = Watched(model.parameters(), 0.1)
        model(torch.randn(4, 6)).sum()  # no backward, in which the host would wait
        found["in progress after a forward"] = bool(copies._events)
        optimizer.step()
        found["when the optimizer writes"] = open_at
        with torch.no_grad():
            model(torch.randn(4, 6))
        found["after an evaluation"] = bool(copies._events)
        state = {name: torch.zeros_like(value) for name, value in net().state_dict().items()}
        model(torch.randn(4, 6)).sum()
        model.load_state_dict(state)
        found["after a load"] = bool(copies._events)
    return found


def test_what_gathers_read_on_the_host_is_not_written_before_they_have():
    for found in run_ranks(written, 2):
        assert found == {
            "in progress after a forward": True,
            "when the optimizer writes": [False],
            "after an evaluation": False,
            "after a load": False,
        }


class _Stream:
    def __init__(self, alive):
        self.alive = alive

    def record_event(self):
        event = type("Event", (), {"__del__": lambda event: self.alive.discard(id(event))})()
        self.alive.add(id(event))
        return event


def reshard_often(ctx, limit):
    from collectives.sharded import ShardedDataParallel

    comm = ctx.communicator()
    model = ShardedDataParallel(net(), comm=comm, limit_all_gathers=limit)
    unit: Unit = model._unit
    unit.device = torch.device("cuda", 0)  # its streams alone: its memory is where it was
    alive: set[int] = set()
    stream = _Stream(alive)
    with mock.patch("torch.cuda.current_stream", lambda device=None: stream):
        for _ in itertools.repeat(None, 20):
            unit.unshard()
            unit.reshard()
    return len(alive)


@pytest.mark.parametrize("limit", [True, False])
def test_no_event_is_kept_for_each_reshard(limit):
    """With limit_all_gathers=False, events were once kept as long as the process lived."""
    assert run_ranks(reshard_often, 2, limit) == [0, 0]
