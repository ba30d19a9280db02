"""Sharded modules on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from collectives.sharded import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.ddp.training import make_model, over_gloo, run
from tests.ranks import run_ranks
from tests.streams.programs import batches_on, compare, loss_of, nearly, on_host
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation

WARM = 3


def full(model):
    return on_host([param.full_tensor() for param in model.parameters()])


def train(ctx, model, optimizer, waits=False, micro=1):
    """Train; return the full parameters. `waits`: the host waits at a backward's end, as the optimizer is there."""
    for number, (x, y) in enumerate(batches_on(ctx, WARM + 2)):
        with steps(ctx, number >= WARM and not waits):
            optimizer.zero_grad()
            for part in range(micro):
                model.set_requires_gradient_sync(part == micro - 1)
                loss_of(model, x, y).backward()
            optimizer.step()
    return full(model)


def units_of(model, **options):
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


# ---- Training.


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@over_gloo
def strategies(ctx):
    """Every reshard, accumulation, activation checkpointing, prefetch by name, and several modules in a unit."""
    found = []
    for reshard, micro in itertools.product((None, True, False), (1, 2)):
        model = units_of(make_model().to(ctx.device), reshard_after_forward=reshard)
        found += train(ctx, model, sgd(model), micro=micro)
    model = units_of(Checkpointed(*make_model()).to(ctx.device))
    found += train(ctx, model, sgd(model))
    model = units_of(make_model().to(ctx.device))
    model[0].set_modules_to_forward_prefetch([model[2], model[4]])
    model[4].set_modules_to_backward_prefetch([model[2], model[0]])
    found += train(ctx, model, torch.optim.AdamW(model.parameters(), 0.01))
    model = make_model().to(ctx.device)
    fully_shard([model[0], model[6]]), fully_shard([model[2], model[4]])
    fully_shard(model)
    model[0].set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
    return found + train(ctx, model, sgd(model))


def test_strategies(tmp_path):
    compare(strategies, tmp_path)


@over_gloo
def neighbours(ctx):
    """An int as reshard_after_forward, and replicas."""
    found = []
    for options in ({"reshard_after_forward": 2}, {"mesh": init_device_mesh(ctx.device.type, (2, 2))}):
        model = units_of(make_model().to(ctx.device), **options)
        found += train(ctx, model, sgd(model))
    return found


def test_neighbours_and_replicas(tmp_path):
    compare(neighbours, tmp_path, ranks=4)


@over_gloo
def in_bf16(ctx):
    found = []
    for policy in (
        MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    ):
        model = units_of(make_model().to(ctx.device), mp_policy=policy)
        found += train(ctx, model, sgd(model))
    return found


def test_in_bf16(tmp_path):
    compare(in_bf16, tmp_path, same=lambda a, b: torch.allclose(a, b, rtol=0.1, atol=0.02))


@over_gloo
def offloaded(ctx):
    """The host waits once in a step, at the backward's end."""
    found = []
    for micro in (1, 2):
        model = units_of(make_model().to(ctx.device), offload_policy=CPUOffloadPolicy())
        assert all(param.to_local().device.type == "cpu" for param in model.parameters())
        found += train(ctx, model, sgd(model), waits=True, micro=micro)
        x, y = batches_on(ctx, 1)[0]
        loss_of(model, x, y)  # gathers may read the host's memory still
        model.load_state_dict({name: torch.zeros_like(value) for name, value in make_model().state_dict().items()})
        found += full(model)
    return found


def test_offloaded(tmp_path):
    compare(offloaded, tmp_path)


@over_gloo
def muon(ctx):
    model = units_of(make_model().to(ctx.device))
    matrices = torch.optim.Muon([param for param in model.parameters() if param.dim() > 1], 0.05)
    others = torch.optim.AdamW([param for param in model.parameters() if param.dim() < 2], 0.01)
    for x, y in batches_on(ctx, WARM):
        loss_of(model, x, y).backward()
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()
    return full(model)


def test_muon(tmp_path):
    compare(muon, tmp_path, same=nearly)


@over_gloo
def full_tensors(ctx):
    """Of parameters and gradients, while the computation may still be running; and a clipped norm."""
    found = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = units_of(make_model().to(ctx.device), **options)
        x, y = batches_on(ctx, 1)[0]
        loss_of(model, x, y).backward()
        for param in model.parameters():
            found += on_host([param.full_tensor(), param.grad.full_tensor()])
        found += on_host([nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()])
    return found


def test_full_tensors(tmp_path):
    compare(full_tensors, tmp_path, same=nearly)


@over_gloo
def on_two_streams(ctx):
    """Every other step runs on a stream of its own, behind and before the others."""
    model = units_of(make_model().to(ctx.device))
    optimizer = sgd(model)
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


@over_gloo
def after_exceptions(ctx):
    """All ranks raise in a forward, and in a backward; then training goes on."""
    model = units_of(make_model().to(ctx.device))
    for register in (model[2].register_forward_hook, model[2].register_full_backward_hook):
        handle = register(lambda *_: 1 / 0)
        x, y = batches_on(ctx, 1)[0]
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, x, y).backward()
        handle.remove()
        model.zero_grad()
    return train(ctx, model, sgd(model))


def test_exceptions(tmp_path):
    compare(after_exceptions, tmp_path)


# ---- Memory.


def small_units(ctx, comm, count=6, width=32):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]).to(ctx.device)
    for layer in model:
        fully_shard(layer, comm=comm)
    return fully_shard(nn.Sequential(model, nn.Linear(width, width).to(ctx.device)), comm=comm)


def arena_blocks(ctx, reshard):
    """Return how many blocks the arena has asked the communicator for in each step."""
    comm = ctx.communicator().split(0)
    model = small_units(ctx, comm)
    model.set_reshard_after_forward(reshard)
    optimizer, empty, counts = sgd(model), comm.empty, []
    nbytes = []

    def counted(count, *, dtype):
        nbytes.append(count * dtype.itemsize)
        return empty(count, dtype=dtype)

    comm.empty = counted
    for number in range(WARM + 2):
        nbytes.clear()
        with steps(ctx, number >= WARM):
            optimizer.zero_grad()
            model(torch.full((2, 32), 0.1, device=ctx.device)).sum().backward()
            optimizer.step()
        counts.append(len(nbytes))
    return counts


@pytest.mark.parametrize("reshard", [True, False])
def test_a_steady_step_allocates_nothing(reshard):
    for counts in run_ranks(arena_blocks, 2, reshard, device="simulated"):
        first, *later = counts
        # Six equal units: the unit in use, the next one and gradients, and the outermost unit's.
        assert first <= (6 if reshard else 10) and later == [0] * (WARM + 1)
