"""The timeline and `collectives.auto` on the simulated GPU: nothing to report."""

from __future__ import annotations

import json

import pytest
import torch

import collectives
from tests.ddp.training import make_model, over_gloo, run, wrap
from tests.streams.simulated import needs_simulation, steps
from tests.streams.test_ddp import batches_on, loss_of

pytestmark = needs_simulation


@over_gloo
def recorded(ctx, path):
    ddp = wrap(make_model().to(ctx.device), "torch", collectives.HookState(streams=2))
    batches = batches_on(ctx, 6)
    for batch in batches[:3]:
        loss_of(ddp, *batch).backward()
    with collectives.timeline(path):
        for number, batch in enumerate(batches[3:]):
            with steps(ctx, number > 0):  # the first one ties the GPU's clock to the host's
                loss_of(ddp, *batch).backward()
    return None


def test_timeline(tmp_path):
    path = tmp_path / "trace.json"
    run(recorded, 2, tmp_path / "store", path, device="simulated")
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert any("all_reduce" in name for name in names), names


@over_gloo
def tried(ctx):
    """Models that `auto` tries and keeps; give how far apart the ranks' parameters end."""
    from collectives.auto.install import install

    install({})
    ddp = wrap(make_model().to(ctx.device), "plain")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, y in batches_on(ctx, 14):
        optimizer.zero_grad()
        loss_of(ddp, x, y).backward()
        optimizer.step()
    return [param.detach().cpu() for param in ddp.parameters()]


@pytest.mark.sampled(one_in=2)  # tests/gpu has it, too
def test_auto(tmp_path):
    there = run(tried, 2, tmp_path / "store", device="simulated", fresh=True)
    for one, other in zip(*there, strict=True):
        assert torch.equal(one, other)
