"""The hook of DDP on the simulated GPU: the host engine's numbers, and nothing to report."""

from __future__ import annotations

import pytest
import torch

import collectives
from tests.ddp.training import make_model, over_gloo, run, wrap
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation


@over_gloo
def trained(ctx, options, count=5):
    """Train for some steps; give the parameters at the end.

    The first three may wait: the communicator is made, the ranks compare options, DDP makes its buckets again.
    """
    model = make_model().to(ctx.device)
    hook = "torch" if options is None else "state"
    ddp = wrap(model, hook, None if options is None else collectives.HookState(**options))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batches = [moved_batch(step, ctx) for step in range(count)]
    for number, batch in enumerate(batches):
        with steps(ctx, number >= 3):
            optimizer.zero_grad()
            loss_on(ddp, batch).backward()
            optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def moved_batch(step, ctx):
    from tests.ddp.training import batch

    return tuple(each.to(ctx.device) for each in batch(step, ctx.rank))


def loss_on(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def compare(tmp_path, options, ranks=2):
    there = run(trained, ranks, tmp_path / "simulated", options, device="simulated")
    here = run(trained, ranks, tmp_path / "host", options)
    for rank in range(ranks):
        for one, other in zip(there[rank], here[rank], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("options", [None, {"streams": 2}], ids=str)
def test_hook(tmp_path, options):
    compare(tmp_path, options)
