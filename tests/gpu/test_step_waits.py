"""No step waits for the device: one whole step of every front end where a wait of the host is an error."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import HookState, optim, sharded
from collectives.sharded import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedDataParallel,
    ShardingStrategy,
)
from tests.ddp.training import wrap
from tests.gpu.devices import everywhere, in_group, on
from tests.gpu.test_horovod import started
from tests.gpu.test_sharded import by_units
from tests.gpu.training import RATE, Term, batches, make_terms

WATCHED = ("simulated", "cuda")  # on the host there is nothing to wait for
WARM = 4  # steps before the one that is watched: buckets are made, kernels compiled, orders learnt


def watched(rank, step, warm=WARM):
    """Make some steps, and one more in which the host must not wait for the device."""
    for number in range(warm):
        step(number)
    with rank.no_host_waits():
        step(warm)


def loop(rank, model, optimizer, backward=None, before_step=None):
    """Make a step of a training loop; the batches are on the device before any of them."""
    data = [batches(number, rank.rank, rank.device) for number in range(WARM + 1)]

    def step(number):
        if backward is None:
            model(data[number]).backward()
        else:
            backward(data[number])
        if before_step is not None:
            before_step()
        if optimizer is not None:
            optimizer.step()
        (model if optimizer is None else optimizer).zero_grad()

    return step


DDP = {
    "fp32": {},
    "streams": {"streams": 2},
    "direct": {"algorithm": "direct"},
    "ring": {"algorithm": "ring"},
    "bf16": {"wire": "bf16"},
    "fp16": {"wire": "fp16"},
    "fp8_e4m3": {"wire": "fp8_e4m3"},
    "int8, feedback, streams": {"wire": "int8", "error_feedback": True, "streams": 2},
    "max_norm": {"max_norm": 0.5},
    "max_norm, norm_type inf": {"max_norm": 0.5, "norm_type": math.inf},
    "check_finite": {"check_finite": True},
    "optimizer": {"optimizer": True},
    "optimizer, max_norm, check_finite, int8": {
        "optimizer": True, "max_norm": 0.5, "check_finite": True, "wire": "int8", "error_feedback": True,
    },
    "optimizer, unused parameters": {"optimizer": True, "ddp": {"find_unused_parameters": True}},
}  # fmt: skip


@in_group
def step_of_ddp(rank, case):
    options = dict(DDP[case])
    model = make_terms(rank.device)
    rule = optim.AdamW(model.parameters(), lr=0.01)
    inside, how = options.pop("optimizer", False), dict(options.pop("ddp", {}))
    if "find_unused_parameters" in how and rank.kind == "cuda":
        # DDP sends its map by the process group; Gloo's thread waits for the GPU then, which torch's mode refuses.
        how["process_group"] = dist.new_group(backend="nccl")
    state = HookState(comm=rank.comm, optimizer=rule if inside else None, **options)
    ddp = wrap(model, "torch", state, gradient_as_bucket_view=True, **how)
    watched(rank, loop(rank, ddp, None if inside else rule))


@everywhere(DDP, everyday={"fp32", "optimizer, max_norm, check_finite, int8", "max_norm"}, devices=WATCHED)
def test_ddp(device, ranks, case):
    on(device, step_of_ddp, ranks, case)


@in_group
def step_with_a_scaler(rank, where):
    """torch's scaler reads its own found_inf; what goes before `scaler.step` must not wait."""
    model = make_terms(rank.device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    if where == "ddp":
        state = HookState(comm=rank.comm, optimizer=optimizer)
        module = wrap(model, "torch", state)
        scaler = torch.amp.GradScaler(rank.device.type, init_scale=64.0)
        state.grad_scaler = scaler
    else:
        module = by_units(rank, model)
        optimizer = optim.AdamW(module.parameters(), lr=0.01)
        scaler = sharded.ShardedGradScaler(rank.device.type, init_scale=64.0)
    data = [batches(number, rank.rank, rank.device) for number in range(WARM + 1)]
    for number in range(WARM + 1):
        last = number == WARM
        if last:
            with rank.no_host_waits():
                scaler.scale(module(data[number])).backward()
        else:
            scaler.scale(module(data[number])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@everywhere(["ddp", "shards"], everyday=["ddp"], devices=WATCHED)
def test_backward_with_a_scaler(device, ranks, case):
    on(device, step_with_a_scaler, ranks, case)


SHARDS = {
    **{each.name: each for each in ShardingStrategy if "HYBRID" not in each.name},
    "fully_shard": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "int8, gather bf16": {"hook": {"wire": "int8", "error_feedback": True, "gather": "bf16"}},
    "max_norm": {"hook": {"max_norm": 0.5}},
    "optimizer": {"hook": {"max_norm": 0.5, "check_finite": True}, "optimizer": True},
    "clipped by torch": {"clip": True},
}


@in_group
def step_of_shards(rank, case):
    options = SHARDS[case]
    model = make_terms(rank.device)
    if isinstance(options, ShardingStrategy):
        policy = ModuleWrapPolicy({Term})
        model, options = ShardedDataParallel(model, sharding_strategy=options, auto_wrap_policy=policy), {}
        state = None
    else:
        options = dict(options)
        clip, inside = options.pop("clip", False), options.pop("optimizer", False)
        hook = options.pop("hook", None)
        state = HookState(comm=rank.comm, **hook) if hook is not None else None
        model = by_units(rank, model, hook_state=state, **options)
        options = {"clip": clip, "inside": inside}
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    if options.get("inside"):
        state.optimizer = optimizer
    before = None
    if options.get("clip"):
        before = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    watched(rank, loop(rank, model, optimizer, before_step=before))


@everywhere(SHARDS, everyday={"FULL_SHARD", "optimizer"}, devices=WATCHED)
def test_shards(device, ranks, case):
    on(device, step_of_shards, ranks, case)


@in_group
def backward_of_offloaded_shards(rank):
    """Only the end of a backward waits, once, for what the optimizer on the host reads: not counted here is that."""
    model = by_units(rank, make_terms(rank.device), offload_policy=CPUOffloadPolicy())
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    data = [batches(number, rank.rank, rank.device) for number in range(WARM + 1)]
    for number in range(WARM + 1):
        if number == WARM:
            with rank.no_host_waits():
                loss = model(data[number])
        else:
            loss = model(data[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@everywhere(devices=WATCHED)
def test_forward_of_offloaded_shards(device, ranks):
    on(device, backward_of_offloaded_shards, ranks)


BUCKETS = {"inside": {"overlap": False}, "beside": {"overlap": True}, "int8": {"wire": "int8", "error_feedback": True}}


def step_of_buckets(rank, case):
    """The backward, in which buckets are sent; all_reduce() exchanges flags that the host reads."""
    model = make_terms(rank.device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with collectives.GradientBuckets(model.parameters(), 0.004, comm=rank.comm, **BUCKETS[case]) as buckets:
        step = loop(rank, model, optimizer, before_step=buckets.all_reduce)
        watched(rank, step)


@everywhere(BUCKETS, everyday={"beside"}, devices=WATCHED)
def test_gradient_buckets(device, ranks, case):
    on(device, step_of_buckets, ranks, case)


HOROVOD = {
    "plain": {},
    "no views": {"gradient_as_bucket_view": False},
    "int8": {"compression": "int8"},
    "fp16": {"compression": "fp16"},
    "predivide": {"gradient_predivide_factor": 2.0},
}


def step_of_horovod(rank, case):
    options = dict(HOROVOD[case])
    with started(rank) as hvd:
        if "compression" in options:
            options["compression"] = getattr(hvd.Compression, options["compression"])
        model = make_terms(rank.device)
        plain = optim.SGD(model.parameters(), lr=RATE)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **options)
        watched(rank, loop(rank, model, optimizer))


@everywhere(HOROVOD, everyday={"plain", "int8"}, devices=WATCHED)
def test_horovod(device, ranks, case):
    on(device, step_of_horovod, ranks, case)


def step_of_horovods_operations(rank):
    with started(rank) as hvd:
        x = rank.random(5000)

        def step(number):
            first = hvd.allreduce_async(x * 2, name="first")
            pair = hvd.grouped_allreduce_async([x, x[:7].clone()], op=hvd.Sum, name="pair")
            root = hvd.broadcast_async(x, 0, name="root")
            part = hvd.reducescatter_async(x, op=hvd.Sum, name="part")
            return [hvd.synchronize(handle) for handle in (first, pair, root, part)]

        watched(rank, step)


@everywhere(devices=WATCHED)
def test_horovods_operations(device, ranks):
    on(device, step_of_horovods_operations, ranks)


def step_of_batch_norm(rank):
    with started(rank) as hvd:
        layer = hvd.SyncBatchNorm(3).to(rank.device)
        x = rank.random(6, 3, 2).requires_grad_()
        watched(rank, lambda number: layer(x).sum().backward())


@everywhere(devices=WATCHED)
def test_sync_batch_norm(device, ranks):
    on(device, step_of_batch_norm, ranks)


def step_of_a_communicator(rank):
    comm = rank.comm
    x, parts, part = rank.random(5000), rank.random(comm.size, 8), rank.random(8)

    def step(number):
        work = comm.all_reduce(x, async_op=True)
        comm.all_gather(parts, part)
        comm.reduce_scatter(part, parts, "avg")
        comm.all_reduce(parts, algorithm="ring")
        comm.all_reduce(parts, 0.5, algorithm="direct")
        with comm.group():
            comm.broadcast(part, 0)
            comm.all_to_all(parts, parts.clone())
        work.wait()

    watched(rank, step)


@everywhere(devices=WATCHED)
def test_communicator(device, ranks):
    on(device, step_of_a_communicator, ranks)
