"""Exceptions on some ranks: all ranks lose the same iterations, and a loop that skips bad batches goes on in step."""


import pytest
import torch
from torch import nn

from collectives.errors import RemoteError
from collectives.sharded import ShardedDataParallel
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.sharded.test_scheduler import sharded

STEPS = 9
PLACES = ("begin", "middle", "last", "loss", "loss's backward", "backward", "first layer's backward")


class BadBatch(Exception):
    """Raised on purpose."""


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise BadBatch("in a backward")


class Layers(nn.Module):
    """Three layers; `bad`: the place at which the next forward or its backward raises."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
        self.scale = nn.Parameter(torch.ones(3))
        self.bad = ""

    def raise_at(self, place):
        if self.bad == place:
            raise BadBatch(place)

    def forward(self, x):
        self.raise_at("begin")
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 1:
                self.raise_at("middle")
                x = Raises.apply(x) if self.bad == "backward" else x
            if at == 0 and self.bad == "first layer's backward":
                x = Raises.apply(x)
            x = torch.tanh(x)
        self.raise_at("last")
        return x * self.scale


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, step, rank):
    out = model(batch(step, rank))
    getattr(model, "raise_at", lambda place: None)("loss")
    return (Raises.apply(out) if model.bad == "loss's backward" else out).square().sum()


def trained(lost, size):
    """Return the parameters of a loop over the steps that are not lost, on one process."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(STEPS):
        if step not in lost:
            optimizer.zero_grad()
            (sum(loss_of(model, step, rank) for rank in range(size)) / size).backward()
            optimizer.step()
    return dict(model.named_parameters())


def skips_bad_batches(ctx, cases, comm=None):
    """For each case train, and skip the batches that raise. Returns per case what was raised in each step, and what
    is wrong with the parameters. A case: the place of each (step, rank) that raises.
    """
    found = []
    comm = ctx.communicator() if comm is None else comm
    for bad in cases:
        model = sharded(Layers(), comm=comm.split(0))
        model._scheduler.comm.timeout = 15.0
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        raised = []
        for step in range(STEPS):
            model.bad = bad.get((step, comm.rank), "")
            optimizer.zero_grad()
            try:
                loss_of(model, step, comm.rank).backward()
            except BadBatch:
                raised.append("BadBatch")
            except RemoteError as error:
                raised.append(("RemoteError", error.peers, str(error)))
            else:
                optimizer.step()
                raised.append("")
        with ShardedDataParallel.summon_full_params(model, writeback=False):
            ours = {name: param.detach().clone() for name, param in model.named_parameters()}
        theirs = trained({step for step, _ in bad}, comm.size)
        wrong = [name for name in theirs if not torch.allclose(ours[name], theirs[name], atol=1e-5)]
        found.append((raised, wrong))
    return found


def check_in_step(found, cases, size):
    for rank, results in enumerate(found):
        for bad, (raised, wrong) in zip(cases, results, strict=True):
            for step in range(STEPS):
                at_fault = [each for each in range(size) if (step, each) in bad]
                got = raised[step]
                comes_later = len(at_fault) > 1 and got[:1] == ("RemoteError",)  # than the other rank's exception
                if rank in at_fault and not comes_later:
                    assert got == "BadBatch", (bad, rank, step, raised)
                elif at_fault:
                    assert got[0] == "RemoteError", (bad, rank, step, raised)
                    assert set(got[1]) & set(at_fault) and any(f"rank {each} " in got[2] for each in at_fault), got
                else:
                    assert got == "", (bad, rank, step, raised)
            assert not wrong, (bad, rank, wrong)


def cases_of(size):
    """One rank at each place; while passes are recorded; twice in a row; two ranks at once, at other places."""
    last = size - 1
    cases = [{(5, last if at % 2 else 0): place} for at, place in enumerate(PLACES)]
    cases += [{(step, last): place} for step in (0, 1) for place in ("middle", "loss", "backward")]
    twice = (("middle", "middle"), ("loss", "begin"), ("backward", "loss"))
    cases += [{(4, 0): one, (5, 0): two} for one, two in twice]
    cases += [{(4, 0): "last", (5, last): "begin"}, {(4, 0): "begin", (4, last): "begin"}]
    cases += [{(4, 0): one, (4, last): two} for one, two in (("begin", "loss"), ("middle", "backward"))]
    return [*cases, {(6, rank): PLACES[1 + rank] for rank in range(size)}]


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (3, 4))])
def test_a_loop_that_skips_bad_batches(size):
    cases = cases_of(size)
    check_in_step(run_ranks(skips_bad_batches, size, cases), cases, size)


def skips_on_several_nodes(ctx, cases):
    with joined(ctx, "aab") as comm:
        return skips_bad_batches(ctx, cases, comm)


def test_on_several_nodes():
    cases = [{(4, 0): "middle"}, {(4, 2): "backward"}, {(4, 1): "loss", (5, 1): "begin"}]
    check_in_step(run_ranks(skips_on_several_nodes, 3, cases), cases, 3)
