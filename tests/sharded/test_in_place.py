"""From the fourth step on the full parameters lie in the ranks' shards on CPUs of one host: no rank writes while
others read.
"""

import gc
import os
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from collectives.comm import allocate_common, common_memory
from collectives.errors import InvalidUsage
from collectives.sharded import fully_shard
from collectives.torch_compat import can_swap_storage_memory
from tests.ranks import run_ranks
from tests.sharded.training import over_comm

pytestmark = pytest.mark.skipif(not can_swap_storage_memory(), reason="this torch can't swap a storage's memory")
SECONDS = 0.05  # by which the slow rank is late: a missing barrier shows


class Slow(nn.Linear):
    """A layer that computes late on one rank, in its forward and in its backward."""

    rank = slow_rank = 0

    def forward(self, x):
        self.wait()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.wait())
        return y

    def wait(self):
        if self.rank == self.slow_rank:
            time.sleep(SECONDS)


def make(ctx, slow_rank, **options):
    """Return a sharded model of ones, whose last layer is late on one rank."""
    model = nn.Sequential(nn.Linear(16, 16), Slow(16, 16), Slow(16, 16))
    for layer in model:
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    for layer in model[1:]:
        layer.rank, layer.slow_rank = ctx.rank, slow_rank
    for layer in model:
        fully_shard(layer, comm=ctx.communicator(), **options)
    model = fully_shard(model, comm=ctx.communicator(), **options)
    for _ in range(3):
        model(X).sum().backward()
        model.zero_grad()
    return model


def fill(model, value):
    """Write to this rank's shards as nobody sees who counts writes."""
    for layer in model:
        layer._sharded_unit.params[0].local.data.fill_(value)


X = torch.ones(1, 16)
WHOLE = 16.0**3  # what ones make of X, and of its gradient


def writes_behind(ctx, slow_rank, options, way):
    """Write to the shards as soon as this rank has ended what the slow one still does; return what it has computed."""
    model = make(ctx, slow_rank, **options)
    found = []
    for value in (1.0, 2.0, 3.0, 4.0):
        fill(model, value)
        if way == "no_grad":
            with torch.no_grad():
                y = model(X)
        elif way == "forward alone":
            y = model(X)
        else:
            x = X.clone().requires_grad_()
            y = model(x)
            if way == "no_sync":
                model.set_requires_gradient_sync(False)
            y.sum().backward()
            y = x.grad
        fill(model, -100.0)
        assert any(layer._sharded_unit in model._sharded_unit.scheduler.reads.readers for layer in model)
        found.append((y / WHOLE / value**3).unique().tolist())
    return found


@over_comm
def all_writes(ctx, slow_rank, options):
    ways = ("no_grad", "forward alone", "backward", "no_sync")
    return {way: writes_behind(ctx, slow_rank, options, way) for way in ways}


@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": None}], ids=["resharded", "default"])
def test_writes_wait_for_the_reads_of_all_ranks(slow_rank, options):
    for found in run_ranks(all_writes, 2, slow_rank, options):
        for way, values in found.items():
            assert values == [[1.0]] * 4, way


@over_comm
def own_gathers(ctx):
    """What a program has gathered itself is a copy."""
    model = make(ctx, None)
    with torch.no_grad():
        model(X)
    ctx.barrier()
    model[0].unshard()
    ctx.barrier()
    fill(model, 7.0)
    ctx.barrier()
    found = model[0].weight.unique().tolist()
    model[0].reshard()
    with torch.no_grad():
        return found, model(X).unique().tolist()


def test_what_a_program_has_gathered_is_a_copy():
    assert run_ranks(own_gathers, 2) == [([1.0], [7.0**3 * WHOLE])] * 2


class Momentum(nn.Module):
    """A layer, and one that follows it, which is written to in the forward."""

    def __init__(self, ctx):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16, bias=False), Slow(16, 16, bias=False)
        nn.init.ones_(self.q.weight)
        nn.init.ones_(self.k.weight)
        self.k.rank, self.k.slow_rank = ctx.rank, 1
        self.writes_before = self.writes_after = False

    def forward(self, x):
        y = self.q(x)
        if self.writes_before:
            self.write()
        z = self.k(x)
        if self.writes_after:
            self.write()
        return y, z

    @torch.no_grad()
    def write(self):
        self.k.wait()
        self.k.weight.mul_(0.5).add_(self.q.weight, alpha=0.5)


@over_comm
def momentum(ctx, first_step):
    """Return whether each step computes with what its forward has written, from a step on."""
    model = Momentum(ctx)
    for layer in (model.q, model.k):
        fully_shard(layer, comm=ctx.communicator())
    fully_shard(model, comm=ctx.communicator())
    optimizer = torch.optim.SGD(model.q.parameters(), 1e-3)
    found = []
    for step in range(8):
        model.writes_before = step >= first_step
        q, k = (layer.weight.full_tensor() for layer in (model.q, model.k))
        y, z = model(X)
        found.append(torch.equal(z, X @ (k * 0.5 + q * 0.5 if model.writes_before else k).T))
        (y.sum() + 0 * z.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found, model.k._sharded_unit.writes_inside, model.q._sharded_unit.writes_inside


@pytest.mark.parametrize("first_step", [0, 5])
def test_units_that_a_forward_writes_to_are_copied(first_step):
    assert run_ranks(momentum, 2, first_step) == [([True] * 8, True, False)] * 2


@over_comm
def written_behind(ctx):
    model = Momentum(ctx)
    for layer in (model.q, model.k):
        fully_shard(layer, comm=ctx.communicator())
    fully_shard(model, comm=ctx.communicator())
    for _ in range(4):
        sum(model(X)).sum().backward()
    model.writes_after = True
    with pytest.raises(InvalidUsage, match="k .Slow. were written to inside of a forward"):
        model(X)
    model(X)  # copies now
    return True


def test_a_write_behind_a_read_is_an_error():
    assert run_ranks(written_behind, 2) == [True] * 2


@over_comm
def kept_gradients(ctx):
    """A gradient's local tensor that a program keeps has its values."""
    model = make(ctx, None)
    model(X).sum().backward()
    with torch.no_grad():
        kept = [param.grad.to_local() for param in model.parameters()]
    copies = [grad.clone() for grad in kept]
    model.zero_grad()
    (2 * model(X).sum()).backward()
    assert all(map(torch.equal, kept, copies))
    pairs = zip(model.parameters(), copies, strict=True)
    return [torch.equal(param.grad.to_local(), 2 * grad) for param, grad in pairs]


def test_gradients_that_are_kept():
    for found in run_ranks(kept_gradients, 2):
        assert found == [True] * 6


@over_comm
def taking_turns(ctx):
    """Layers of one unit that are trainable in turn."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for number, layer in enumerate(model):
        nn.init.constant_(layer.weight, 1 + number)
    fully_shard(model, comm=ctx.communicator())
    found = []
    for step in range(4):
        for number, layer in enumerate(model):
            layer.weight.requires_grad_(number % 2 == step % 2)
        model(torch.ones(1, 8)).sum().backward()
        grads = [None if layer.weight.grad is None else layer.weight.grad.full_tensor() for layer in model]
        found.append([None if grad is None else grad.unique().tolist() for grad in grads])
        model.zero_grad()
    return found


def test_parameters_that_are_trained_in_turn():
    whole = 24.0 * 8**3
    first, second = ([whole / number if number % 2 == part else None for number in range(1, 5)] for part in (1, 0))
    expected = [[None if each is None else [each] for each in (first, second)[step % 2]] for step in range(4)]
    assert run_ranks(taking_turns, 2) == [expected] * 2


@over_comm
def regularised(ctx):
    """A loss of whole parameters outside of the forward, whose gradient lies on all ranks, and then the model's."""
    model = make(ctx, None)
    model.zero_grad()
    model[0].weight.mean().backward()
    model(X).sum().backward()
    return (model[0].weight.grad.full_tensor() - 1 / 256).unique().tolist()


def test_gradients_that_lie_otherwise_are_cut():
    assert run_ranks(regularised, 2) == [[16.0**2]] * 2


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:collectives"), len(os.listdir("/proc/self/fd"))


@over_comm
def many_models(ctx):
    counts = []
    for _ in range(4):
        model = make(ctx, None)
        model(X).sum().backward()
        counts.append(mappings())
        kept = model[0].weight.to_local()
        del model
        gc.collect()
        ctx.barrier()
        assert kept.unique().tolist() == [1.0]
        del kept
        counts.append(mappings())
    return counts


def test_memory_goes_with_the_model():
    for counts in run_ranks(many_models, 2):
        assert counts[3:5] == counts[5:7] and counts[-1][0] < counts[-2][0], counts
        assert counts[-1][1] == counts[-2][1]  # nor has a model descriptors


@over_comm
def not_mapped(ctx):
    """A rank in another process namespace: the ranks copy."""
    own = common_memory.this_process()
    with mock.patch.object(common_memory, "this_process", lambda: own.replace("pid:", f"pid:{ctx.rank}")):
        found = mapped.__wrapped__(ctx, reads=False)
        memory, reason = allocate_common(ctx.communicator(), 100)
    return found, memory is None and reason


@over_comm
def mapped(ctx, reads=True):
    model = make(ctx, None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    model(X).sum().backward()
    optimizer.step()
    with torch.no_grad():
        found = model(X).sum().item()
    assert bool(model._sharded_unit.scheduler.reads.readers) is reads
    return found


def test_ranks_that_cannot_map_it_copy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_ranks(not_mapped, 2)
    expected = run_ranks(mapped, 2)
    reason = "rank 1: it is in another process namespace than rank 0"
    assert found == [(value, reason) for value in expected]


def shared_bytes(ctx):
    memory, reason = allocate_common(ctx.communicator(), 8 * ctx.size)
    assert not reason
    values = torch.frombuffer(memory, dtype=torch.int64, count=ctx.size)
    values[ctx.rank] = ctx.rank + 1
    ctx.communicator().barrier()
    return values.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_see_what_each_writes(ranks):
    assert run_ranks(shared_bytes, ranks) == [list(range(1, ranks + 1))] * ranks
