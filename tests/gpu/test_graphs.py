"""A whole training step in a CUDA graph, of every front end: replayed steps give the bits of eager ones."""

from __future__ import annotations

import contextlib

import pytest
import torch

import collectives
from collectives import HookState, optim
from collectives.errors import InvalidUsage
from collectives.sharded import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.ddp.training import wrap
from tests.gpu.devices import compare, everywhere, in_group, on
from tests.gpu.test_horovod import started
from tests.gpu.test_sharded import by_units
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
        found.append([param.detach().clone() for param in model.parameters()])
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


@in_group
def step_of_ddp(rank, case, captured):
    def make():
        model = make_terms(rank.device)
        options = dict(DDP[case])
        if "optimizer" in options or "AdamW" in case:
            optimizer = optim.AdamW(model.parameters(), lr=RATE)
        else:
            optimizer = torch.optim.SGD(model.parameters(), RATE)
        if "optimizer" in options:
            options["optimizer"] = optimizer
        ddp = wrap(model, "torch", HookState(comm=rank.comm, **options), gradient_as_bucket_view=True)
        static = batches(0, rank.rank, rank.device)
        return model, graph_step(ddp, static, optimizer), static

    return train(rank, captured, make)


def check_replays(device, function, ranks, *args):
    compare(on(device, function, ranks, *args, True), on(device, function, ranks, *args, False))


@everywhere(DDP, everyday={"max_norm", "int8, feedback"}, devices=DEVICES)
def test_ddp(device, ranks, case):
    check_replays(device, step_of_ddp, ranks, case)


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


@in_group
def step_of_shards(rank, case, captured):
    def make():
        options = dict(SHARDS[case])
        hook, inside = options.pop("hook", None), options.pop("inside", False)
        if hook is not None:
            options["hook_state"] = state = HookState(comm=rank.comm, **hook)
        model = by_units(rank, make_terms(rank.device), **options)
        static = batches(0, rank.rank, rank.device)
        if not inside:
            return model, graph_step(model, static, torch.optim.SGD(model.parameters(), RATE)), static
        optimizer = optim.AdamW(model.parameters(), lr=RATE)
        state.optimizer = optimizer
        return model, graph_step(model, static, optimizer), static

    return train(rank, captured, make)


@everywhere(SHARDS, everyday={"max_norm"}, devices=DEVICES)
def test_shards(device, ranks, case):
    check_replays(device, step_of_shards, ranks, case)


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


REFUSED = {
    "a barrier": (barrier, "capture"),
    "close": (close, "capture"),
    "a wait with a limit": (wait_with_a_limit, "capture"),
    "GradientBuckets' first round": (first_round, "the host"),
    "Horovod": (operation_of_horovod, "agree on the host"),
    "an optimizer's first step": (first_step_of_an_optimizer, "make a step first"),
    "shards' first forward": (first_forward_of_shards, "steps of the same kind before the capture"),
    "CPU offload": (offloaded, "CPU offload"),
}


@everywhere(REFUSED, ranks=(2,), devices=DEVICES)
def test_refused(device, ranks, case):
    program, words = REFUSED[case]
    for text in on(device, program, ranks):
        assert words in text


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


@everywhere(ranks=(2,), devices=DEVICES)
def test_a_work_that_was_captured(device, ranks):
    on(device, work_after_its_capture, ranks)


HOOKS = {
    "stochastic rounding": ({"wire": "int8", "stochastic_rounding": True}, "stochastic rounding"),
}


@in_group
def captured_hook(rank, case):
    side = rank.new_stream()
    with rank.use(side):  # as torch's DDP must be for a capture: its nodes of the backward belong to this stream
        model = make_terms(rank.device)
        static = batches(0, rank.rank, rank.device)
        ddp = wrap(model, "torch", HookState(comm=rank.comm, **HOOKS[case][0]), gradient_as_bucket_view=True)
        step = graph_step(ddp, static, torch.optim.SGD(model.parameters(), RATE))
        for _ in range(WARM):  # until DDP measures no more, which a capture forbids
            step()
    rank.join(side)
    rank.synchronize()
    return refusal(rank, step)


@everywhere(HOOKS, ranks=(2,), devices=DEVICES)
def test_refused_by_hook(device, ranks, case):
    for text in on(device, captured_hook, ranks, case):
        assert HOOKS[case][1] in text
