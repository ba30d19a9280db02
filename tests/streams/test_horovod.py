"""Horovod's API on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import pytest
import torch

from tests.ddp.training import make_model
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation


def both(program, *args):
    there = run_ranks(program, 2, *args, device="simulated")
    here = run_ranks(program, 2, *args)
    assert there == here


def operations(ctx):
    from collectives import horovod as hvd
    from tests.horovod.optimizer_training import a_job

    base = (torch.arange(12.0).reshape(4, 3) + ctx.rank).to(ctx.device)
    done = []
    with a_job(ctx):
        for number in range(3):  # requests are agreed on in the first round
            with steps(ctx, number == 2):
                done = [
                    hvd.allreduce(base, name="sum", op=hvd.Sum),
                    hvd.synchronize(hvd.allreduce_async(base * 2, name="dropped")),
                    *hvd.grouped_allreduce([base, base + 1], name="group"),
                    hvd.broadcast(base, 1, name="broadcast"),
                    hvd.reducescatter(base, name="scatter"),
                ]
                with torch.cuda.stream(torch.cuda.Stream()) if ctx.device.type == "cuda" else torch.no_grad():
                    handle = hvd.allreduce_async(torch.ones(5, device=ctx.device) * ctx.rank, name="side")
                    done.append(hvd.synchronize(handle))
                    done[-1] = done[-1] + 1
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        done.append(hvd.allgather(base, name="gather"))
        done.append(hvd.alltoall(base, name="all to all"))
        results = [each.tolist() for each in done]
    return results


def test_operations():
    both(operations)


def trained(ctx, options):
    from collectives import horovod as hvd
    from tests.ddp.training import batch
    from tests.horovod.optimizer_training import a_job

    model = make_model().to(ctx.device)
    batches = [tuple(each.to(ctx.device) for each in batch(step, ctx.rank)) for step in range(5)]
    with a_job(ctx):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        made = dict(options)
        if "compression" in made:
            made["compression"] = getattr(hvd.Compression, made["compression"])
        if "op" in made:
            made["op"] = getattr(hvd, made["op"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **made)
        for number, (x, y) in enumerate(batches):
            with steps(ctx, number >= 3):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        results = [param.tolist() for param in model.parameters()]
    return results


@pytest.mark.parametrize("options", [{}, {"op": "Adasum"}], ids=str)
def test_optimizer(options):
    both(trained, options)


def test_optimizer_in_fp16():
    """With NCCL fp16 is divided before the sum, where gradients below 6e-5 lose bits."""
    there, here = (run_ranks(trained, 2, {"compression": "fp16"}, device=device) for device in ("simulated", None))
    for ours, hosts in zip(there, here, strict=True):
        for one, other in zip(ours, hosts, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-6)
