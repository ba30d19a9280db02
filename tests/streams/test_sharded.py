"""Sharded modules on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import collectives
from collectives.sharded import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from tests.ddp.training import make_model, over_gloo, run
from tests.streams.simulated import needs_simulation, steps
from tests.streams.test_ddp import batches_on, compare, loss_of, nearly, on_host

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


@over_gloo
def by_strategy(ctx, strategy):
    model = ShardedDataParallel(
        make_model().to(ctx.device),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        comm=ctx.communicator(),
    )
    return train(ctx, model, torch.optim.AdamW(model.parameters(), 0.01))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_OPTIMIZER"])
def test_strategies(tmp_path, strategy):
    compare(by_strategy, tmp_path, strategy)


@over_gloo
def by_units(ctx, kind):
    model = make_model().to(ctx.device)
    options = {
        "plain": {},
        "kept": {"reshard_after_forward": False},
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy()},
        "int8": {"hook_state": collectives.HookState(comm=ctx.communicator(), wire="int8")},
        "norm": {"hook_state": collectives.HookState(comm=ctx.communicator(), max_norm=0.1)},
    }[kind]
    units_of(model, comm=ctx.communicator(), **options)
    rule = collectives.optim.AdamW if kind in ("plain", "offload") else torch.optim.AdamW
    return train(ctx, model, rule(model.parameters(), 0.01), waits=kind == "offload")


@pytest.mark.parametrize("kind", ["plain", "kept", "bf16", "offload", "int8", "norm"])
def test_units(tmp_path, kind):
    compare(by_units, tmp_path, kind, same=nearly if kind in ("norm", "bf16") else torch.equal)


def test_offload_of_one_rank(tmp_path):
    compare(by_units, tmp_path, "offload", ranks=1)


@over_gloo
def on_two_streams(ctx, kind):
    """Every other step runs on a stream of its own, behind and before the others."""
    model = make_model().to(ctx.device)
    options = {"gathered as int8": {"hook_state": collectives.HookState(comm=ctx.communicator(), gather="int8")}}
    units_of(model, comm=ctx.communicator(), **options.get(kind, {}))
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
    return []


@pytest.mark.parametrize("kind", ["plain", "gathered as int8"])
def test_two_streams(tmp_path, kind):
    run(on_two_streams, 2, tmp_path / "simulated", kind, device="simulated")


@over_gloo
def hybrid(ctx):
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    model = units_of(make_model().to(ctx.device), mesh=mesh)
    return train(ctx, model, torch.optim.SGD(model.parameters(), 0.1))


def test_hybrid(tmp_path):
    compare(hybrid, tmp_path, ranks=4, same=nearly)  # NCCL sums a part over shards, then over replicas


# ---- Buffers that units use in turn.
@over_gloo
def in_turn(ctx):
    """Bytes of the device's buffers after each step, and whether a view that is kept stays as it was."""
    model = units_of(make_model().to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept, counts = [], []

    def keep(module, args, out):
        if not kept:
            kept.append(module.weight.detach())

    model[2].register_forward_hook(keep)
    first = None
    for number, (x, y) in enumerate(batches_on(ctx, WARM + 2)):
        with steps(ctx, number >= WARM):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        first = kept[0].clone() if first is None else first
        pool = model[0]._unit.pool
        comm = model[0]._unit.ranks.shard
        counts.append([(len(each), each.nbytes) for each in map(lambda name: pool.in_turn(comm, name), PURPOSES)])
    assert torch.equal(first, kept[0])
    return counts


PURPOSES = ("gathered parameters", "gradients")


def test_buffers_in_turn(tmp_path):
    """Steady from the second step on; two buffers of gradients; a buffer that is viewed is given to its user."""
    for counts in run(in_turn, 2, tmp_path / "simulated", device="simulated"):
        assert len(set(map(str, counts[1:]))) == 1, counts
        (gathered, _), (gradients, _) = counts[-1]
        assert gradients == 2 and gathered <= 4
