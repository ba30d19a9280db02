"""The model of predicted steps: its limits, two queues by hand, the default buckets, and the page that shows it."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from benchmarks import scaling
from benchmarks.scaling import MODELS, RATES, WAYS, Step, Task, simulate
from collectives.gradients import bucket_cap

FREE = {name: float("inf") for name in ("ring", "switch", "port")}
FREE |= dict.fromkeys(("start", "step_in_node", "step_between", "tree_step", "ring_sms", "switch_sms"), 0.0)
by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


def test_parameters_of_llama_2():
    assert sum(MODELS[0].units) == 6_738_415_616


def test_two_queues():
    compute = [Task("a", 2.0), Task("b", 1.0), Task("c", 1.0, ("x",))]
    assert simulate(compute, [Task("x", 1.0, ("a",))]) == (4.0, 0.0)  # behind b
    assert simulate(compute, [Task("x", 3.0, ("a",))]) == (6.0, 2.0)  # c waits from 3 to 5
    assert simulate(compute, [Task("x", 3.0, ("a",), 0.5)]) == (6.0, 1.0)  # half of the SMs from 2 on: b takes 2 s
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([Task("a", 1.0, ("x",))], [Task("x", 1.0, ("a",))])


@by_way
def test_a_network_without_limits_leaves_what_is_computed(way):
    step = Step(way, MODELS[0], 1024, **FREE)
    computed = sum(task.seconds for task in step.compute)
    assert computed >= 3 * sum(MODELS[0].forward_flops) / RATES["flops"].value
    assert step.seconds == pytest.approx(computed, rel=0.01 if way.inside else 1e-9)  # AdamW inside is in the network's
    assert Step(way, MODELS[0], 8).seconds > computed


@by_way
def test_a_slower_network_is_no_faster(way):
    rates = {name: RATES[name].value / 20 for name in ("ring", "switch")}
    slow = Step(way, MODELS[0], 8, **rates)
    assert slow.seconds > Step(way, MODELS[0], 8).seconds
    assert slow.seconds >= sum(task.seconds for task in slow.network)


def test_passes_are_those_of_the_counts():
    path = scaling.ROOT / "benchmarks" / "results" / "counts.json"
    counted = {row["way"]: row["passes"] for row in json.loads(path.read_text())["rows"]}
    names = ("DDP, torch's", "DDP, hook", None, "FSDP2, torch's, bf16", "fully_shard, bf16")
    for way, name in zip(WAYS, names, strict=True):
        assert name is None or way.passes == pytest.approx(counted[name], abs=0.01), name


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_default_buckets(ranks):
    """They grow as a ring's latency does, and twice as much would gain little."""
    assert bucket_cap.default_bucket_cap(ranks, 1 << 20) == 25 << 20
    assert bucket_cap.default_bucket_cap(ranks, 1 << 50) <= 400 << 20
    for model, way in itertools.product(MODELS, (way for way in WAYS if way.bucket_bytes is None and not way.sharded)):
        step = Step(way, model, ranks)
        twice, torchs = (dataclasses.replace(way, bucket_bytes=size) for size in (2 * step.bucket_bytes, 25 << 20))
        assert step.seconds <= 1.04 * Step(twice, model, ranks).seconds
        assert step.seconds <= Step(torchs, model, ranks).seconds


def test_the_page_has_the_tables():
    page = scaling.PAGE.read_text()
    for name, text in scaling.texts().items():
        assert f"<!-- {name} -->\n{text}\n<!-- end -->" in page, "python benchmarks/scaling.py --write"
