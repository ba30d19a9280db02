"""A whole step of every front end: the host waits for nothing in it, and a CUDA graph of it gives the same bits."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import HookState, optim, sharded
from collectives.errors import InvalidUsage
from collectives.sharded import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy
from tests.ddp.training import wrap
from tests.gpu.devices import compare, everywhere, in_group, on
from tests.gpu.test_horovod import started
from tests.gpu.test_sharded import by_strategy, by_units
from tests.gpu.training import RATE, batches, make_terms

DEVICES = ("simulated", "cuda")  # the host has no graphs
WARM = 12  # steps before the capture; DDP makes its buckets again in the second one, and measures until the eleventh
REPLAYS = 3


def train(rank, captured, make):
    """Make a model's steps on a side stream, then some more: replayed if `captured`, else eager. Return the parameters.

    ``make()``, on that stream: the model, the step, what a step reads of its batch.
    """

    def load(number):
        for tensor, data in zip(static, batches(number, rank.rank, rank.device), strict=True):
            tensor.copy_(data)

    side = rank.new_stream()
    with rank.use(side):
        model, step, static = make()
        for number in range(WARM):
            load(number)
            step()
    rank.join(side)
    rank.synchronize()
    again = rank.capture(step) if captured else step
    found = []
    for number in range(WARM, WARM + REPLAYS):
        load(number)
        with rank.no_host_waits():
            again()
        parts = [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]
        found.append([part.detach().clone() for part in parts])
    rank.synchronize()
    return found


def graph_step(model, static, optimizer, after_backward=lambda: None):
    """Return a training step, which is captured and made eagerly as it is."""

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(static).backward()
        after_backward()
        optimizer.step()

    return step


def check_replays(device, function, ranks, case, eager_only=False):
    """Run a front end's steps, in which the host waits for nothing, eagerly and, unless `eager_only`, in a graph."""
    eager = on(device, function, ranks, case, False)
    if not eager_only:
        compare(on(device, function, ranks, case, True), eager)


DDP = {
    "fp32": {},
    "streams": {"streams": 2},
    "direct": {"algorithm": "direct"},
    "bf16": {"wire": "bf16"},
    "int8, feedback": {"wire": "int8", "error_feedback": True, "streams": 2},
    "max_norm": {"max_norm": 0.5},
    "fused AdamW": {},
    "optimizer inside": {"optimizer": True},
    "optimizer inside, max_norm": {"optimizer": True, "max_norm": 0.5},
}
EAGER_DDP = {
    "ring": {"algorithm": "ring"},
    "fp16": {"wire": "fp16"},
    "fp8_e4m3": {"wire": "fp8_e4m3"},
    "max_norm, norm_type inf": {"max_norm": 0.5, "norm_type": math.inf},
    "check_finite": {"check_finite": True},
    "optimizer, max_norm, check_finite, int8": {
        "optimizer": True, "max_norm": 0.5, "check_finite": True, "wire": "int8", "error_feedback": True,
    },
    "optimizer, unused parameters": {"optimizer": True, "find_unused_parameters": True},
}  # fmt: skip


@in_group
def step_of_ddp(rank, case, captured):
    def make():
        model = make_terms(rank.device)
        options, how = dict((DDP | EAGER_DDP)[case]), {}
        if "optimizer" in options or "AdamW" in case:
            optimizer = optim.AdamW(model.parameters(), lr=RATE)
        else:
            optimizer = torch.optim.SGD(model.parameters(), RATE)
        if "optimizer" in options:
            options["optimizer"] = optimizer
        if options.pop("find_unused_parameters", False):
            how["find_unused_parameters"] = True
            if rank.kind == "cuda":
                # DDP sends its map by the process group; Gloo's thread waits for the GPU, which torch's mode refuses.
                how["process_group"] = dist.new_group(backend="nccl")
        ddp = wrap(model, "torch", HookState(comm=rank.comm, **options), gradient_as_bucket_view=True, **how)
        static = batches(0, rank.rank, rank.device)
        return model, graph_step(ddp, static, optimizer), static

    return train(rank, captured, make)


@everywhere(DDP | EAGER_DDP, everyday={"max_norm", "int8, feedback", [*EAGER_DDP][5]}, devices=DEVICES)
def test_ddp(device, ranks, case):
    check_replays(device, step_of_ddp, ranks, case, case in EAGER_DDP)


BUCKETS = {"inside": {"overlap": False}, "beside": {"overlap": True}, "int8": {"wire": "int8", "error_feedback": True}}


def step_of_buckets(rank, case, captured):
    with contextlib.ExitStack() as closing:

        def make():
            model = make_terms(rank.device)
            static = batches(0, rank.rank, rank.device)
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            buckets = collectives.GradientBuckets(model.parameters(), 0.004, comm=rank.comm, **BUCKETS[case])
            closing.enter_context(buckets)
            return model, graph_step(model, static, optimizer, buckets.all_reduce), static

        return train(rank, captured, make)


@everywhere(BUCKETS, everyday={"beside"}, devices=DEVICES)
def test_gradient_buckets(device, ranks, case):
    check_replays(device, step_of_buckets, ranks, case)


SHARDS = {
    "fully_shard": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "int8": {"hook": {"wire": "int8", "error_feedback": True}},
    "max_norm": {"hook": {"max_norm": 0.5}},
    "optimizer inside": {"hook": {"max_norm": 0.5}, "inside": True},
}
EAGER_SHARDS = {
    **{each.name: {"strategy": each.name} for each in ShardingStrategy if "HYBRID" not in each.name},
    "int8, gather bf16": {"hook": {"wire": "int8", "error_feedback": True, "gather": "bf16"}},
    "optimizer, check_finite": {"hook": {"max_norm": 0.5, "check_finite": True}, "inside": True},
    "clipped by torch": {"clip": True},
}


@in_group
def step_of_shards(rank, case, captured):
    def make():
        options = dict((SHARDS | EAGER_SHARDS)[case])
        hook, inside, clip = (options.pop(name, None) for name in ("hook", "inside", "clip"))
        if hook is not None:
            options["hook_state"] = state = HookState(comm=rank.comm, **hook)
        model = make_terms(rank.device)
        if "strategy" in options:
            model = by_strategy(options["strategy"])(rank, model)
        else:
            model = by_units(rank, model, **options)
        static = batches(0, rank.rank, rank.device)
        if inside:
            state.optimizer = optimizer = optim.AdamW(model.parameters(), lr=RATE)
        else:
            optimizer = torch.optim.SGD(model.parameters(), RATE)
        after = (lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5)) if clip else lambda: None
        return model, graph_step(model, static, optimizer, after), static

    return train(rank, captured, make)


@everywhere(SHARDS | EAGER_SHARDS, everyday={"max_norm", "optimizer, check_finite"}, devices=DEVICES)
def test_shards(device, ranks, case):
    check_replays(device, step_of_shards, ranks, case, case in EAGER_SHARDS)


HOROVOD = {
    "plain": {},
    "no views": {"gradient_as_bucket_view": False},
    "int8": {"compression": "int8"},
    "fp16": {"compression": "fp16"},
    "predivide": {"gradient_predivide_factor": 2.0},
}


def step_of_horovod(rank, case, captured):
    with started(rank) as hvd:

        def make():
            options = dict(HOROVOD[case])
            if "compression" in options:
                options["compression"] = getattr(hvd.Compression, options["compression"])
            model = make_terms(rank.device)
            static = batches(0, rank.rank, rank.device)
            plain = optim.SGD(model.parameters(), lr=RATE)
            optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **options)
            return model, graph_step(model, static, optimizer), static

        return train(rank, captured, make)


@everywhere(HOROVOD, everyday={"int8"}, devices=DEVICES)
def test_horovod(device, ranks, case):
    check_replays(device, step_of_horovod, ranks, case, eager_only=True)


# ---- Parts of a step in which the host waits for nothing.


@in_group
def part_of_a_step(rank, case):
    """The backward with a scaler of torch's, which reads its own found_inf; the forward of offloaded shards, whose
    backward waits once at its end, for what the optimizer on the host reads.
    """
    options = {"offload_policy": CPUOffloadPolicy()} if case == "offloaded" else {}
    model = make_terms(rank.device)
    module = model if case == "ddp" else by_units(rank, model, **options)
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    kind = sharded.ShardedGradScaler if case == "shards" else torch.amp.GradScaler
    scaler = kind(rank.device.type, init_scale=64.0, enabled=case != "offloaded")
    if case == "ddp":
        state = HookState(comm=rank.comm, optimizer=optimizer)
        module = wrap(model, "torch", state)
        state.grad_scaler = scaler
    data = [batches(number, rank.rank, rank.device) for number in range(5)]
    for number, batch in enumerate(data):
        watched = rank.no_host_waits() if number == len(data) - 1 else contextlib.nullcontext()
        with watched:
            loss = scaler.scale(module(batch))
            if case != "offloaded":
                loss.backward()
        if case == "offloaded":
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@everywhere(["ddp", "shards", "offloaded"], everyday=["ddp", "offloaded"], devices=DEVICES)
def test_a_part_of_a_step(device, ranks, case):
    on(device, part_of_a_step, ranks, case)


def watch(rank, step):
    """Make some steps, and one more in which the host must not wait for the device."""
    for _ in range(4):
        step()
    with rank.no_host_waits():
        step()


def operations_of_horovod(rank):
    with started(rank) as hvd:
        x = rank.random(5000)
        layer, y = hvd.SyncBatchNorm(3).to(rank.device), rank.random(6, 3, 2).requires_grad_()

        def step():
            first = hvd.allreduce_async(x * 2, name="first")
            pair = hvd.grouped_allreduce_async([x, x[:7].clone()], op=hvd.Sum, name="pair")
            root = hvd.broadcast_async(x, 0, name="root")
            part = hvd.reducescatter_async(x, op=hvd.Sum, name="part")
            return [hvd.synchronize(handle) for handle in (first, pair, root, part)]

        watch(rank, step)
        watch(rank, lambda: layer(y).sum().backward())


def operations_of_a_communicator(rank):
    comm = rank.comm
    x, parts, part = rank.random(5000), rank.random(comm.size, 8), rank.random(8)

    def step():
        work = comm.all_reduce(x, async_op=True)
        comm.all_gather(parts, part)
        comm.reduce_scatter(part, parts, "avg")
        comm.all_reduce(parts, algorithm="ring")
        comm.all_reduce(parts, 0.5, algorithm="direct")
        with comm.group():
            comm.broadcast(part, 0)
            comm.all_to_all(parts, parts.clone())
        work.wait()

    watch(rank, step)


@everywhere({"Horovod": 0, "communicator": 1}, devices=DEVICES)
def test_operations(device, ranks, case):
    on(device, operations_of_horovod if case == "Horovod" else operations_of_a_communicator, ranks)


# ---- What can't be captured.


def refusal(rank, step):
    """Return the text of the error of a capture; CUDA may raise another one on top, as the capture was left early."""
    try:
        rank.capture(step)
    except Exception as error:  # the chain is what is looked at
        while not isinstance(error, InvalidUsage):
            assert error.__context__ is not None, repr(error)
            error = error.__context__
        return str(error)
    raise AssertionError("nothing was raised")


def first_round(rank):
    model = make_terms(rank.device)
    static = batches(0, rank.rank, rank.device)
    with collectives.GradientBuckets(model.parameters(), 0.004, comm=rank.comm) as buckets:
        model(static).backward()
        return refusal(rank, buckets.all_reduce)


def operation_of_horovod(rank):
    with started(rank) as hvd:
        tensor = rank.full(1.0, 4)
        hvd.allreduce(tensor, name="warm")
        return refusal(rank, lambda: hvd.allreduce(tensor, name="captured"))


def first_step_of_an_optimizer(rank):
    param = torch.nn.Parameter(rank.full(1.0, 8))
    param.grad = rank.full(1.0, 8)
    return refusal(rank, optim.AdamW([param], lr=RATE).step)


@in_group
def first_forward_of_shards(rank):
    model = by_units(rank, make_terms(rank.device))
    static = batches(0, rank.rank, rank.device)
    return refusal(rank, lambda: model(static))


@in_group
def offloaded(rank):
    model = by_units(rank, make_terms(rank.device), offload_policy=CPUOffloadPolicy())
    static = batches(0, rank.rank, rank.device)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    step = graph_step(model, static, optimizer)
    step()
    rank.synchronize()
    return refusal(rank, step)


def refused_call(rank, call):
    """A call that waits for the device, of a communicator with an operation in flight."""
    comm = rank.new_communicator()
    work = comm.all_reduce(rank.full(1.0, 8), async_op=True)
    text = refusal(rank, lambda: call(comm, work))
    rank.synchronize()
    comm.close()
    return text


def barrier(rank):
    return refused_call(rank, lambda comm, work: comm.barrier())


def close(rank):
    return refused_call(rank, lambda comm, work: comm.close())


def wait_with_a_limit(rank):
    return refused_call(rank, lambda comm, work: work.wait(timeout=1))


@in_group
def hook_of_random_bits(rank):
    side = rank.new_stream()
    with rank.use(side):  # as torch's DDP must be for a capture: its nodes of the backward belong to this stream
        model = make_terms(rank.device)
        static = batches(0, rank.rank, rank.device)
        state = HookState(comm=rank.comm, wire="int8", stochastic_rounding=True)
        ddp = wrap(model, "torch", state, gradient_as_bucket_view=True)
        step = graph_step(ddp, static, torch.optim.SGD(model.parameters(), RATE))
        for _ in range(WARM):  # until DDP measures no more, which a capture forbids
            step()
    rank.join(side)
    rank.synchronize()
    return refusal(rank, step)


REFUSED = {
    "a barrier": (barrier, "capture"),
    "close": (close, "capture"),
    "a wait with a limit": (wait_with_a_limit, "capture"),
    "GradientBuckets' first round": (first_round, "the host"),
    "Horovod": (operation_of_horovod, "agree on the host"),
    "an optimizer's first step": (first_step_of_an_optimizer, "make a step first"),
    "shards' first forward": (first_forward_of_shards, "make some steps before the capture"),
    "CPU offload": (offloaded, "CPU offload"),
    "stochastic rounding": (hook_of_random_bits, "stochastic rounding"),
}


def work_after_its_capture(rank):
    """Nobody knows when a captured operation runs."""
    tensor, works = rank.full(1.0, 8), []

    def step():
        works.append(rank.comm.all_reduce(tensor, async_op=True))
        works[-1].wait()

    step()
    rank.synchronize()
    rank.capture(step)
    assert works[-1].wait()  # there is nothing to wait for
    for ask in (works[-1].done, works[-1].exception, lambda: works[-1].wait(timeout=1)):
        with pytest.raises(InvalidUsage, match=r"captured in a CUDA graph.*replay"):
            ask()
    rank.comm.barrier()


def all_refused(rank):
    found = {case: program(rank) for case, (program, _) in REFUSED.items()}
    work_after_its_capture(rank)
    return found


@everywhere(ranks=(2,), devices=DEVICES)
def test_what_a_capture_refuses(device, ranks):
    for found in on(device, all_refused, ranks):
        for case, text in found.items():
            assert REFUSED[case][1] in text, case
