"""Tools on every device: the timeline and collectives.auto."""

from __future__ import annotations

import json

import torch

import collectives
from collectives import HookState, optim
from tests.ddp.training import wrap
from tests.gpu.devices import compare, everywhere, in_group, on
from tests.gpu.training import alone, batches, make_terms

STEPS = 3


@in_group
def recorded(rank, case, path):
    options = {"streams": {"streams": 2}, "int8": {"wire": "int8", "max_norm": 1.0}, "optimizer": {}}[case]
    model = make_terms(rank.device)
    if case == "optimizer":
        options["optimizer"] = optim.SGD(model.parameters(), lr=0.1)
    ddp = wrap(model, "torch", HookState(comm=rank.comm, **options))
    for step in range(2):  # DDP makes its buckets anew
        ddp(batches(step, rank.rank, rank.device)).backward()
    with collectives.timeline(path) as timeline:
        for step in range(STEPS):
            ddp(batches(step, rank.rank, rank.device)).backward()
    return timeline.report()


@everywhere(["streams", "int8", "optimizer"], everyday=["int8"])
def test_timeline(device, ranks, case, tmp_path):
    path = tmp_path / "trace.json"
    for report in on(device, recorded, ranks, case, str(path)):
        assert len(report.splitlines()) == 1 + ranks
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in range(ranks):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        sent = [e for e in spans if names[rank, e["tid"]].startswith("lane")]
        collective = [e for e in sent if e["name"].split()[0] in ("all_reduce", "reduce_scatter")]
        assert len(collective) >= STEPS * 2
        parameters = ", ".join(e["args"].get("parameters", "") for e in collective)
        assert all(f"terms.{number}.weight" in parameters for number in range(7))
        assert all(e["dur"] >= 0 for e in sent)


@in_group
def by_auto(rank):
    """A DDP model without a hook gets one; its gradients stay the ranks' averages."""
    import collectives.auto  # noqa: F401

    module = make_terms(rank.device)
    ddp = wrap(module, "plain")
    seen = []
    for step in range(14):
        ddp.zero_grad()
        ddp(batches(step, rank.rank, rank.device)).backward()
        seen.append([param.grad.clone() for param in module.parameters()])
    return seen


@everywhere(ranks=(2,))
def test_auto(device, ranks):
    wanted = alone(ranks, 14, make=lambda params: torch.optim.SGD(params, 0.0))[0]
    for found in on(device, by_auto, ranks, fresh=True):
        compare(found, wanted, exact=False, rtol=1e-5, atol=1e-6)
