"""No kernel is compiled or loaded in a step: what the options need is there once the front end is set up."""

from __future__ import annotations

import pytest
import torch

import collectives
from collectives.sharded import fully_shard
from tests.ddp.training import make_model, over_gloo, run, wrap
from tests.ranks import run_ranks
from tests.streams.programs import batches_on, loss_of
from tests.streams.simulated import needs_simulation

pytestmark = needs_simulation


def hook(ctx, model, options):
    state = collectives.HookState(**{name: each for name, each in options.items() if name != "optimizer"})
    if "optimizer" in options:
        state.optimizer = getattr(collectives.optim, options["optimizer"])(model.parameters(), lr=0.1)
    return wrap(model, "state", state), None


def buckets(ctx, model, options):
    found = collectives.GradientBuckets(model.parameters(), comm=ctx.communicator(), **options)
    return model, found.all_reduce


def sharded(ctx, model, options):
    state = collectives.HookState(comm=ctx.communicator(), **options)
    for module in (model[0], model[2], model):
        fully_shard(module, comm=ctx.communicator(), hook_state=state)
    return model, None


FRONT_ENDS = {"hook": hook, "buckets": buckets, "sharded": sharded}


@over_gloo
def loads_in_steps(ctx, front_end, options):
    """Give the kernels that were loaded while the front end was set up, and those of the first steps."""
    from tests.streams import kernels

    kernels.loads.clear()
    kernels._loaded.clear()  # the process has run other programs
    model, reduce = FRONT_ENDS[front_end](ctx, make_model().to(ctx.device), options)
    before = list(kernels.loads)
    for x, y in batches_on(ctx, 3):
        loss_of(model, x, y).backward()
        if reduce is not None:
            reduce()
    return before, kernels.loads[len(before) :]


@pytest.mark.parametrize(
    ("front_end", "options", "expected"),
    [
        ("hook", {"wire": "int8", "error_feedback": True, "max_norm": 0.1}, ["coll_quantize", "coll_finish"]),
        ("hook", {"optimizer": "AdamW", "max_norm": 0.1}, ["coll_adam", "coll_finish"]),
        ("buckets", {"wire": "bf16"}, ["coll_quantize", "coll_cast_f32_f32"]),
        ("sharded", {"gather": "int8", "check_finite": True}, ["coll_dequantize", "coll_cast", "coll_copy"]),
    ],
    ids=str,
)
def test_no_kernel_is_loaded_in_a_step(tmp_path, front_end, options, expected):
    for before, later in run(loads_in_steps, 2, tmp_path / "group", front_end, options, device="simulated"):
        assert later == []
        assert set(expected) <= set(before)


def loads_of_horovod(ctx):
    from collectives import horovod as hvd
    from tests.horovod.optimizer_training import a_job
    from tests.streams import kernels

    kernels.loads.clear()
    kernels._loaded.clear()
    with a_job(ctx):
        model = make_model().to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.bf16)
        before = list(kernels.loads)
        for x, y in batches_on(ctx, 2):
            loss_of(model, x, y).backward()
            optimizer.step()
    return before, kernels.loads[len(before) :]


def test_no_kernel_is_loaded_in_a_step_of_horovods():
    for before, later in run_ranks(loads_of_horovod, 2, device="simulated"):
        assert later == [] and "coll_cast_f32_bf16" in before
