"""No kernel is compiled or loaded in a step: what the options need is there once the front end is set up."""

from __future__ import annotations

import contextlib

import torch

import collectives
from collectives import horovod as hvd
from collectives.sharded import fully_shard
from tests.ddp.training import make_model, over_gloo, run, wrap
from tests.horovod.optimizer_training import a_job
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


def horovod(ctx, model, options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.bf16)
    return model, optimizer.step


# A front end, its options, and kernels that they need.
CASES = [
    (hook, {"wire": "int8", "error_feedback": True, "max_norm": 0.1}, {"coll_quantize", "coll_finish"}),
    (hook, {"optimizer": "AdamW", "max_norm": 0.1}, {"coll_adam", "coll_finish"}),
    (buckets, {"wire": "bf16"}, {"coll_quantize", "coll_cast_f32_f32"}),
    (sharded, {"gather": "int8", "check_finite": True}, {"coll_dequantize"}),
    (horovod, {}, {"coll_cast_f32_bf16"}),
]


@over_gloo
def loads_in_steps(ctx):
    """The kernels are loaded while a front end is set up, and none in its first steps."""
    from tests.streams import kernels

    for front_end, options, expected in CASES:
        kernels.loads.clear()
        kernels._loaded.clear()  # the process has run other programs
        with a_job(ctx) if front_end is horovod else contextlib.nullcontext():
            model, after = front_end(ctx, make_model().to(ctx.device), options)
            before = list(kernels.loads)
            for x, y in batches_on(ctx, 3):
                loss_of(model, x, y).backward()
                if after is not None:
                    after()
        assert kernels.loads == before and expected <= set(before), (front_end, options)


def test_no_kernel_is_loaded_in_a_step(tmp_path):
    run(loads_in_steps, 2, tmp_path / "group", device="simulated")
