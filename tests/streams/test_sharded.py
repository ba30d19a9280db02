"""Sharded modules on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import collectives
from collectives.errors import InvalidUsage, RemoteError
from collectives.sharded import (
    CPUOffloadPolicy,
    FullParamOptimizer,
    MixedPrecisionPolicy,
    ShardedDataParallel,
    fully_shard,
    uneven,
)
from collectives.sharded.gather_windows import get_gather_comm, get_windows
from tests.ddp.training import make_model, over_gloo, run
from tests.ranks import run_ranks
from tests.streams.programs import batches_on, compare, loss_of, nearly, on_host
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation

WARM = 3


def train(ctx, model, optimizer, waits=False):
    """Train; give the full parameters. `waits`: the host waits once at a backward's end, as the optimizer is there."""
    for number, (x, y) in enumerate(batches_on(ctx, WARM + 2)):
        with steps(ctx, number >= WARM and not waits):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    with ShardedDataParallel.summon_full_params(model, writeback=False):
        return on_host(model.parameters())


def units_of(model, **options):
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Pair:
    """Muon for the matrices and AdamW for the rest, as one."""

    def __init__(self, model):
        params = list(model.parameters())
        muon = FullParamOptimizer([p for p in params if p.dim() > 1], torch.optim.Muon, lr=0.05)
        self.both = muon, torch.optim.AdamW([p for p in params if p.dim() < 2], 0.01)

    def zero_grad(self):
        for each in self.both:
            each.zero_grad()

    def step(self):
        for each in self.both:
            each.step()


@over_gloo
def whole_params(ctx):
    model = make_model().to(ctx.device)
    units_of(model, comm=ctx.communicator())
    return train(ctx, model, Pair(model))


def test_whole_parameters(tmp_path):
    compare(whole_params, tmp_path)


@over_gloo
def whole_params_fail(ctx):
    """The owner's optimizer raises: the others do, at the latest in the next step, and none of them hangs.

    Shards on the host are refused.
    """
    model = units_of(make_model().to(ctx.device), comm=ctx.communicator(), offload_policy=CPUOffloadPolicy())
    with pytest.raises(InvalidUsage, match="CPU offload"):
        FullParamOptimizer([p for p in model.parameters() if p.dim() > 1], torch.optim.Muon)
    model = make_model().to(ctx.device)
    units_of(model, comm=ctx.communicator())
    optimizer = FullParamOptimizer([p for p in model.parameters() if p.dim() > 1], torch.optim.SGD, lr=0.1)
    for number, (x, y) in enumerate(batches_on(ctx, 9)):
        fails = number == 5 and ctx.rank == 1
        try:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            with mock.patch.object(optimizer._inner, "step", side_effect=ZeroDivisionError if fails else None):
                optimizer.step()
        except (ZeroDivisionError, RemoteError) as error:
            return type(error).__name__, number
    return None


def test_an_owners_error(tmp_path):
    mine, theirs = run(whole_params_fail, 2, tmp_path / "simulated", device="simulated")
    assert theirs == ("ZeroDivisionError", 5)
    assert mine in (("RemoteError", 5), ("RemoteError", 6))


class Reads(nn.Sequential):
    """Computes with layers' weights before it calls them, after that, and without calling them."""

    def forward(self, x):
        weight = self[2].weight
        for layer in self:
            x = layer(x)
        return x + (x @ self[6].weight.mean(1, keepdim=True)) * weight.mean() + self[4].bias.sum()


def by_reads(ctx, kind):
    model = Reads(*make_model()).to(ctx.device)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"plain": {}, "list": {}, "bf16": {"mp_policy": low}}[kind]
    layers = (
        [[model[0], model[6]], [model[2], model[4]]] if kind == "list" else [model[0], model[2], model[4], model[6]]
    )
    for each in layers:
        fully_shard(each, comm=ctx.communicator(), **options)
    fully_shard(model, comm=ctx.communicator(), **options)
    model[0].set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
    return train(ctx, model, torch.optim.SGD(model.parameters(), 0.1))


@over_gloo
def reads_lists_and_hooks(ctx):
    return [param for kind in ("plain", "list", "bf16") for param in by_reads(ctx, kind)]


def test_reads_lists_and_hooks(tmp_path):
    compare(reads_lists_and_hooks, tmp_path, same=nearly)


@over_gloo
def whole_shards(ctx):
    """full_tensor() of parameters and gradients, while the computation may still be running."""
    found = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = make_model().to(ctx.device)
        units_of(model, comm=ctx.communicator(), **options)
        x, y = batches_on(ctx, 1)[0]
        loss_of(model, x, y).backward()
        for param in model.parameters():
            found += on_host([param.full_tensor(), param.grad.full_tensor()])
    return found


def test_whole_shards(tmp_path):
    compare(whole_shards, tmp_path)


@over_gloo
def on_two_streams(ctx):
    """Every other step runs on a stream of its own, behind and before the others."""
    for options in ({}, {"hook_state": collectives.HookState(comm=ctx.communicator(), gather="int8")}):
        model = make_model().to(ctx.device)
        units_of(model, comm=ctx.communicator(), **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for number, (x, y) in enumerate(batches_on(ctx, WARM + 3)):
            stream = side if number % 2 else main
            stream.wait_stream(main)
            with torch.cuda.stream(stream), steps(ctx, number >= WARM):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
            for each in (x, y):
                each.record_stream(stream)
            main.wait_stream(stream)
        torch.cuda.synchronize()


def test_two_streams(tmp_path):
    run(on_two_streams, 2, tmp_path / "simulated", device="simulated")


# ---- Buffers that units use in turn.
PURPOSES = ("gathered parameters", "gradients")


@over_gloo
def in_turn(ctx, keeps):
    """Count the device's buffers after each step. `keeps`: hold a view of a gathered parameter from the first on."""
    model = units_of(make_model().to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept, counts, first = [], [], None

    def keep(module, args, out):
        if keeps and not kept:
            kept.append(module.weight.detach())

    model[2].register_forward_hook(keep)
    pool, comm = model[0]._unit.pool, model[0]._unit.ranks.shard
    for number, (x, y) in enumerate(batches_on(ctx, WARM + 2)):
        with steps(ctx, number >= WARM):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        if keeps:
            first = kept[0].clone() if first is None else first
            assert torch.equal(first, kept[0])
        windows = get_windows(comm)
        counts.append((*(len(pool.in_turn(comm, name)) for name in PURPOSES), 0 if windows is None else len(windows)))
    return counts, comm is get_gather_comm(comm)


def test_buffers_in_turn(tmp_path):
    """Three windows, two buffers of gradients, one for the outermost unit's parameters, a communicator for gathers."""
    for counts, shared in run(in_turn, 2, tmp_path / "simulated", False, device="simulated"):
        assert counts == [(1, 2, 3)] * (WARM + 2) and not shared


def test_without_windows(tmp_path):
    """A buffer that a view of the user's is of is the user's; another one takes its place."""
    options = {"env": {"COLLECTIVES_NO_WINDOWS": "1"}, "device": "simulated"}
    for counts, _ in run(in_turn, 2, tmp_path / "simulated", True, **options):
        assert len(set(counts[1:])) == 1 and counts[-1][1:] == (2, 0) and counts[-1][0] <= 4


@over_gloo
def prefetched(ctx):
    """Gather four units at once, two of them in one window: the first moves out."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]).to(ctx.device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1], model[2], model[3]])
    model[4].set_modules_to_backward_prefetch([model[3], model[2], model[1]])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(WARM + 1):
        optimizer.zero_grad()
        model(torch.full((2, 8), number + ctx.rank + 1.0, device=ctx.device)).sum().backward()
        optimizer.step()
    with ShardedDataParallel.summon_full_params(model, writeback=False):
        return on_host(model.parameters())


def test_units_that_need_one_window(tmp_path):
    compare(prefetched, tmp_path)


def small_units(ctx, comm, width=8):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(ctx.device)
    for layer in model:
        fully_shard(layer, comm=comm)
    return fully_shard(model, comm=comm)


def step_of(model, width=8):
    model(torch.ones(2, width, device=next(model.parameters()).device)).sum().backward()


def kept_views(ctx):
    """Both ranks, or one, hold a view of what a window holds, which the next unit in the window must not overwrite:
    both raise, and go on without it.
    """
    model = small_units(ctx, ctx.communicator())
    for holders in ((0, 1), (0,)):
        kept = []
        hook = model[0].register_forward_hook(
            lambda module, args, out, kept=kept, holders=holders: (
                kept.append(module.weight.detach()) if ctx.rank in holders else None
            )
        )
        own = ctx.rank in holders
        text = "still views gathered parameters" if own else "rank 0 could not go on"
        with pytest.raises(InvalidUsage if own else RemoteError, match=text):
            step_of(model)
        hook.remove()
        kept.clear()
        step_of(model)


def test_a_view_of_a_window():
    run_ranks(kept_views, 2, device="simulated", timeout=30)


class NoElements(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x):
        return x + self.weight.sum()


def what_stays(ctx):
    """Count what a communicator has registered: it follows the largest units, and ends with the communicator."""
    comm = ctx.communicator().split(0)
    counts = set()
    for width in (8, 16, 24):
        model = small_units(ctx, comm, width)
        step_of(model, width)
        gathers = get_gather_comm(comm)
        counts.add((len(comm._registrations), len(gathers._registrations)))
    empty = fully_shard(nn.Sequential(fully_shard(NoElements().to(ctx.device), comm=comm), NoElements()), comm=comm)
    for _ in range(3):
        x = torch.ones(2, 8, device=ctx.device, requires_grad=True)
        empty(x).sum().backward()
    counts.add((len(comm._registrations), len(gathers._registrations)))
    model[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_of(model, width)
    unit = weakref.ref(model[0]._unit)
    del model
    gc.collect()
    comm.close()
    with pytest.raises(InvalidUsage, match="closed"):
        empty(x)
    return counts, gathers.closed, unit() is None


def test_what_stays_registered():
    for counts, closed, freed in run_ranks(what_stays, 2, device="simulated"):
        assert len(counts) == 1 and closed and freed, counts


def masters_of_one_rank(ctx):
    """One rank gathers a unit's masters, which another one has in its window and takes part with."""
    model = small_units(ctx, ctx.communicator())
    unit = model[3]._unit
    for _ in range(2):
        step_of(model)
    with uneven(model):
        loss = model(torch.ones(2, 8, device=ctx.device)).sum()
        if ctx.rank == 0:
            masters = model._scheduler.all_gather_master_shards(unit)
            del masters
        with torch.no_grad():
            model(torch.ones(2, 8, device=ctx.device))  # unit 0 takes the window
        loss.backward()
    step_of(model)


def test_masters_of_a_unit_in_a_window():
    run_ranks(masters_of_one_rank, 2, device="simulated")
