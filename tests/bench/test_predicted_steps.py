"""Predicted steps: their limits, the bytes of the counts, two queues by hand, and what docs and files hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling import optimizer_in_hook
from benchmarks.scaling.step import (
    RATES,
    WAYS,
    Task,
    counted_rows,
    optimizer_bytes,
    predict_step,
    simulate,
    wire_bytes,
    without_network,
)
from benchmarks.scaling.transformer import LLAMA_1B, LLAMA_7B
from collectives.gradients import bucket_cap

ROOT = Path(__file__).resolve().parent.parent.parent
by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)


def test_parameters_of_llama_2():
    assert LLAMA_7B.parameters == 6_738_415_616
    assert sum(LLAMA_1B.units()) == LLAMA_1B.parameters


def alone_seconds(way, model, ranks, rates):
    """A step in which nothing waits: the arithmetic, the copies, and an optimizer that no network hides."""
    moved = way.passes * 4 + way.casts + optimizer_bytes(way, ranks)
    return 3 * sum(model.forward_flops()) / (rates.flops * rates.mfu) + moved * model.parameters / rates.hbm


@by_way
def test_one_gpu_has_no_communication(way):
    found = predict_step(way, LLAMA_1B, 1)
    updates = optimizer_bytes(way, 1) * LLAMA_1B.parameters / RATES.hbm
    assert found.network_seconds == pytest.approx(updates if way.inside else 0.0)
    if not way.inside:
        assert found.exposed == 0.0
        assert found.seconds == pytest.approx(alone_seconds(way, LLAMA_1B, 1, RATES))


@by_way
@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_network_without_limits_leaves_what_is_computed(way, ranks):
    rates = without_network()
    found = predict_step(way, LLAMA_7B, ranks, rates)
    assert found.seconds <= alone_seconds(way, LLAMA_7B, ranks, rates) * (1 + 1e-9)
    assert found.seconds >= found.compute_seconds
    if not way.inside:
        assert found.seconds == pytest.approx(alone_seconds(way, LLAMA_7B, ranks, rates))


@by_way
def test_a_slower_network_is_no_faster(way):
    slow = dataclasses.replace(RATES, ring_bus=RATES.ring_bus / 20, nvls_bus=RATES.nvls_bus / 20)
    found = predict_step(way, LLAMA_7B, 8, slow)
    assert found.seconds > predict_step(way, LLAMA_7B, 8).seconds
    assert found.seconds >= max(found.network_seconds, found.compute_seconds)


@by_way
def test_bytes_on_the_wire_are_those_of_the_counts(way):
    if not way.counted:
        return
    parts, ranks = 4, 4  # of benchmarks.counts
    counted = counted_rows()[way.counted]["wire"]
    parameters = 33280  # any
    assert wire_bytes(way, parameters, parts, ranks) / (4 * parameters * (ranks - 1) / ranks) == pytest.approx(counted)


def test_the_two_queues():
    compute = [Task("a", 2.0), Task("b", 1.0), Task("c", 1.0, ("x",))]
    assert simulate(compute, [Task("x", 1.0, ("a",))]) == (4.0, 0.0)  # behind b
    assert simulate(compute, [Task("x", 3.0, ("a",))]) == (6.0, 2.0)  # c waits from 3 to 5
    # Half of the SMs from 2 on: b takes 2 s.
    assert simulate(compute, [Task("x", 3.0, ("a",), 0.5)]) == (6.0, 1.0)
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([Task("a", 1.0, ("x",))], [Task("x", 1.0, ("a",))])


def test_the_optimizer_in_the_hook():
    fused, copied, inside = optimizer_in_hook.DERIVED
    parameters = 10**9
    assert optimizer_in_hook.times(fused, parameters, 8) == pytest.approx((7.0 / 350, 42.0 / 4300))
    assert optimizer_in_hook.times(inside, parameters, 8) == pytest.approx((3.5 / 350, 7.5 / 4300))
    assert optimizer_in_hook.times(copied, parameters, 8) == pytest.approx((3.5 / 350, 11.5 / 4300))
    assert optimizer_in_hook.times(inside, parameters, 1)[0] == 0.0
    counted = [4 * counted_rows()[f"DDP, hook, AdamW inside, bf16{views}"]["passes"] for views in ("", " views")]
    assert counted[0] - counted[1] == pytest.approx(4.0, abs=0.02)  # beside the parameters that no rank alone owns
    # The recorder counts the kernel's bf16 parameter as read, too.
    assert counted[1] == pytest.approx(4 + 30 / 4, abs=0.02)
    ways = {way.name: way for way in WAYS}
    for name in (fused, copied, inside):  # the step takes the same bytes
        way = ways[name]
        wire = wire_bytes(way, parameters, 33, 8) / optimizer_in_hook.BUS
        memory = (way.passes * 4 + way.casts + optimizer_bytes(way, 8)) * parameters / optimizer_in_hook.HBM
        assert optimizer_in_hook.times(name, parameters, 8) == pytest.approx((wire, memory))
    found = optimizer_in_hook.steps(LLAMA_7B, 8)
    assert found[inside].seconds <= found[copied].seconds < found[fused].seconds
    assert 80e9 not in found[fused].fits and 80e9 in found[inside].fits


@pytest.mark.parametrize("ranks", [8, 16, 64, 256, 1024, 4096])
def test_default_buckets(ranks):
    """They grow as the model's latency does, and twice as much would gain little."""
    latency = bucket_cap._START + bucket_cap._STEP * ranks
    assert latency == pytest.approx(RATES.start("all_gather", ranks), rel=0.05 if ranks >= 64 else 0.4)
    assert RATES.bus(False, ranks) == pytest.approx(bucket_cap._BANDWIDTH, rel=0.05)
    assert bucket_cap.default_bucket_cap(ranks, 1 << 20) == 25 << 20
    assert bucket_cap.default_bucket_cap(ranks, 1 << 50) <= 400 << 20
    if ranks > 1024:
        return
    for model, way in itertools.product((LLAMA_7B, LLAMA_1B), (each for each in WAYS if each.bucket_bytes is None)):
        if not way.sharded:
            found = predict_step(way, model, ranks).seconds
            cap = bucket_cap.default_bucket_cap(ranks, model.parameters * way.grad)
            assert found <= 1.04 * predict_step(dataclasses.replace(way, bucket_bytes=2 * cap), model, ranks).seconds
            assert found <= predict_step(dataclasses.replace(way, bucket_bytes=25 << 20), model, ranks).seconds


def test_page_and_file_hold_the_predictions(tmp_path):
    (tmp_path / "scaling.md").write_text((ROOT / "docs" / "scaling.md").read_text())
    before = (ROOT / "benchmarks" / "results" / "predictions.json").read_text()
    command = [sys.executable, "benchmarks/scaling_doc.py", "--steps", "--docs", str(tmp_path)]
    done = subprocess.run(
        [*command, "--predictions", str(tmp_path / "predictions.json")], cwd=ROOT, capture_output=True, text=True,
        timeout=120, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scaling.md").read_text() == (ROOT / "docs" / "scaling.md").read_text()
    assert (tmp_path / "predictions.json").read_text() == before
    assert json.loads(before)["one_gpu"]["kernel_bytes_per_s"] == RATES.hbm
