"""Sharded modules on every device: strategies, HSDP, bf16, offload, wires, optimizers in the backward, FSDP2's own."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from collectives import HookState, sharded
from collectives.sharded import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    ShardingStrategy,
    fsdp2,
    fully_shard,
)
from tests.gpu.devices import check, compare, everywhere, in_group
from tests.gpu.test_ddp import OPTIMIZERS, expected, rounded_once
from tests.gpu.training import RATE, STEPS, Term, batches, make_terms

BF16 = torch.bfloat16


def by_units(rank, model, **options):
    """Shard each term but the first two, which the outermost unit takes."""
    for term in model.terms[2:]:
        fully_shard(term, **options)
    return fully_shard(model, **options)


def by_strategy(name, **more):
    def shard(rank, model):
        options = {"auto_wrap_policy": ModuleWrapPolicy({Term}), **more}
        strategy = ShardingStrategy[name]
        if name.endswith(("HYBRID_SHARD", "ZERO2")):
            options["device_mesh"] = init_device_mesh(rank.device.type, (rank.size, 1), mesh_dim_names=("r", "s"))
        return ShardedDataParallel(model, sharding_strategy=strategy, **options)

    return shard


def by_mesh(*shape):
    def shard(rank, model):
        sizes = [rank.size if size == -1 else size for size in shape]
        return by_units(rank, model, mesh=init_device_mesh(rank.device.type, tuple(sizes)))

    return shard


def units(**options):
    return lambda rank, model: by_units(rank, model, **options)


# How a model is sharded, to the same bits as the DDP hook's.
EXACT = {
    **{each.name: by_strategy(each.name) for each in ShardingStrategy},
    "prefetch late": by_strategy("FULL_SHARD", backward_prefetch=sharded.BackwardPrefetch.BACKWARD_POST),
    "prefetch forward": by_strategy("FULL_SHARD", forward_prefetch=True),
    "gathers not limited": by_strategy("FULL_SHARD", limit_all_gathers=False),
    "fully_shard": units(),
    "fully_shard, kept": units(reshard_after_forward=False),
    "mesh": by_mesh(-1),
    "HSDP": by_mesh(-1, 1),
    "HSDP of one replica": by_mesh(1, -1),
    "offload": units(offload_policy=CPUOffloadPolicy()),
    "offload, pageable": units(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "offload, NO_SHARD": by_strategy("NO_SHARD", cpu_offload=CPUOffload(offload_params=True)),
}
# To other bits than DDP's, which are the same on every device.
OTHER = {
    "bf16": units(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
    "bf16 sums": units(mp_policy=MixedPrecisionPolicy(param_dtype=BF16)),
    "bf16, offload": units(mp_policy=MixedPrecisionPolicy(param_dtype=BF16), offload_policy=CPUOffloadPolicy()),
    "bf16, SHARD_OPTIMIZER": by_strategy("SHARD_OPTIMIZER", mixed_precision=MixedPrecision(param_dtype=BF16)),
    "bf16, HSDP": lambda rank, model: by_units(
        rank, model, mesh=init_device_mesh(rank.device.type, (rank.size, 1)),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16),
    ),
}  # fmt: skip
WAYS = {**EXACT, **OTHER}
EVERYDAY = {"FULL_SHARD", "SHARD_OPTIMIZER", "NO_SHARD", "fully_shard", "HSDP", "offload", "bf16"}


def whole(model):
    """Give the full parameters, in the model's order."""
    return [param.full_tensor().detach().cpu() for param in model.parameters()]


def train(rank, model, optimizer, steps=STEPS):
    for step in range(steps):
        optimizer.zero_grad()
        model(batches(step, rank.rank, rank.device)).backward()
        optimizer.step()
    return whole(model)


@in_group
def trained(rank, way):
    found = {}
    for rule in ("sgd", "adamw"):
        model = WAYS[way](rank, make_terms(rank.device))
        found[rule] = train(rank, model, OPTIMIZERS[rule](model.parameters()))
    model = WAYS[way](rank, make_terms(rank.device))
    found["torch"] = train(rank, model, torch.optim.SGD(model.parameters(), RATE))
    return found


@everywhere(WAYS, everyday=EVERYDAY)
def test_training(device, ranks, case):
    (found, *_) = check(device, trained, ranks, case)
    for rule, ends in found.items():
        wanted = expected(ranks, None if rule == "torch" else rule, True)[1]
        if case in EXACT:
            compare(ends, wanted)
        else:
            compare(ends, wanted, exact=False, rtol=3e-2, atol=3e-2)


# ---- With a HookState.

HOOKED = {
    "fp32": {},
    "direct": {"algorithm": "direct"},
    "check_finite": {"check_finite": True},
    **{wire: {"wire": wire} for wire in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8")},
    "int8, feedback": {"wire": "int8", "error_feedback": True},
    "gather bf16": {"gather": "bf16"},
    "gather int8, int8": {"gather": "int8", "wire": "int8"},
    "optimizer": {"optimizer": "adamw"},
    "optimizer, int8, gather bf16": {"optimizer": "sgd", "wire": "int8", "error_feedback": True, "gather": "bf16"},
    "max_norm": {"max_norm": 0.5},
    "optimizer, max_norm": {"optimizer": "adamw", "max_norm": 0.5, "check_finite": True},
}


@in_group
def hooked(rank, case):
    options = dict(HOOKED[case])
    inside = options.pop("optimizer", None)
    state = HookState(comm=rank.comm, **options)
    model = by_units(rank, make_terms(rank.device), hook_state=state)
    if inside is not None:
        state.optimizer = optimizer = OPTIMIZERS[inside](model.parameters())
    else:
        optimizer = torch.optim.SGD(model.parameters(), RATE)
    return {"parameters": train(rank, model, optimizer), "norm": state.grad_norm, "nonfinite": state.nonfinite}


@everywhere(HOOKED, everyday={"int8, feedback", "optimizer", "optimizer, int8, gather bf16"})
def test_hook_state(device, ranks, case):
    options = HOOKED[case]
    close = {"exact": False, "rtol": 1e-4, "atol": 1e-5} if "norm" in case else {}
    if "check_finite" in options:  # the norm
        close = {"exact": False, "rtol": 1e-5, "atol": 1e-6}
    if rounded_once(options):
        close = {"exact": False, "rtol": 2e-2, "atol": 2e-2}
    (found, *_) = check(device, hooked, ranks, case, **close)
    if not {"wire", "gather", "max_norm"} & set(options):
        compare(found["parameters"], expected(ranks, options.get("optimizer"), True)[1])


# ---- What programs do with sharded modules.


@in_group
def accumulated(rank):
    """Two micro-batches, the first without synchronisation, and clipping after the backward."""
    model = by_units(rank, make_terms(rank.device))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        model(batches(10 + step, rank.rank, rank.device)).backward()
        model.set_requires_gradient_sync(True)
        model(batches(step, rank.rank, rank.device)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().detach())
        optimizer.step()
    return whole(model), norms


@everywhere()
def test_accumulation_and_clipping(device, ranks):
    check(device, accumulated, ranks, exact=False, rtol=1e-4, atol=1e-5)


@in_group
def scaled(rank):
    """One rank's loss is infinite in step 1: no rank steps, and the scale falls."""
    model = by_units(rank, make_terms(rank.device))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = sharded.ShardedGradScaler(rank.device.type, init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batches(step, rank.rank, rank.device))
        if step == 1 and rank.rank == rank.size - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return whole(model), scales


@everywhere()
def test_grad_scaler(device, ranks):
    found = check(device, scaled, ranks)
    assert found[0][1] == [64.0, 32.0, 32.0, 64.0]


# torch's own collectives gather DTensors: over Gloo they crash for tensors on a GPU (torch 2.11).
@in_group(backend="collectives")
def saved(rank, case):
    """A model and its AdamW go on from state dicts of shards, or of full tensors."""
    options = {"offload_policy": CPUOffloadPolicy()} if case == "offloaded" else {}
    full = {"full_state_dict": case == "full"}
    model = by_units(rank, make_terms(rank.device), **options)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(rank, model, optimizer, 2)
    weights = sharded.get_model_state_dict(model, **full)
    state = sharded.get_optimizer_state_dict(model, optimizer, **full)
    again = by_units(rank, make_terms(rank.device), **options)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    its = OPTIMIZERS["adamw"](again.parameters())
    sharded.set_model_state_dict(again, weights)
    sharded.set_optimizer_state_dict(again, its, state)
    return train(rank, model, optimizer, 2), train(rank, again, its, 2)


@everywhere(["on the device", "offloaded", "full"], everyday=["offloaded", "full"])
def test_state_dicts(device, ranks, case):
    for ours, again in check(device, saved, ranks, case):
        compare(again, ours)


@in_group
def checkpointed(rank):
    """Matrix products, a unit called twice, checkpointed activations, compared with averaged gradients."""
    from torch.utils.checkpoint import checkpoint

    def make():
        torch.manual_seed(3)
        return nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)]).to(rank.device)

    def run(layers, step):
        x = rank.random(8, 16, seed=step)
        x = torch.tanh(layers[0](x))
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(layers[1](y)), x, use_reentrant=False)
        return layers[2](x).square().mean()

    ends = []
    for way in ("ddp", "shards"):
        layers = make()
        if way == "shards":
            for layer in layers:
                fully_shard(layer)
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            run(layers, step).backward()
            if way == "ddp":
                for param in layers.parameters():
                    rank.comm.all_reduce(param.grad, "avg")
            optimizer.step()
        if way == "shards":
            ends.append([each for layer in layers for each in whole(layer)])
        else:
            ends.append([param.detach().cpu() for param in layers.parameters()])
    return ends


@everywhere()
def test_checkpointed_activations(device, ranks):
    for plain, shards in check(device, checkpointed, ranks, exact=False, rtol=1e-3, atol=1e-5):
        compare(shards, plain, exact=False, rtol=1e-4, atol=1e-6)


# ---- torch's own FSDP2 with our collectives.


@in_group
def by_torchs_fsdp2(rank):
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as torchs

    model = make_terms(rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    gather, scatter = fsdp2.AllGather(), fsdp2.ReduceScatter()
    for module in (*model.terms, model):
        torchs(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        # FSDP2 frees gradients to its reductions' stream, which waits for this one before it takes memory again. The
        # checker of the simulation knows no such promise.
        rank.synchronize()
        optimizer.zero_grad()
        model(batches(step, rank.rank, rank.device)).backward()
        optimizer.step()
    shards = [param.to_local().detach().cpu().numpy() for param in model.parameters()]
    return [torch.from_numpy(numpy.concatenate(each)) for each in zip(*rank.exchange(shards), strict=True)]


@pytest.mark.skipif(fsdp2._protocol is None, reason="this torch has no custom collectives in FSDP2")
@everywhere()
def test_torchs_own_fsdp2(device, ranks):
    (found, *_) = check(device, by_torchs_fsdp2, ranks)
    compare(found, expected(ranks, None, True)[1])
