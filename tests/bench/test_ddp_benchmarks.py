"""The benchmarks of DDP, run small: rows with all fields, and results that are checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.programs import run_forked
from tests.rank_process import ROOT

PROGRAMS = str(Path(__file__).with_name("programs.py"))
WHERE = {"machine", "cores", "commit", "python", "time", "torch", "collectives", "load", "benchmark", "ranks"}
STEP = "step --models 3xLinear128 --rounds 1 --block-seconds 0.01 --ways"
BUCKET = "bucket --mib 1 --rounds 2 --ways"
LEARN = "convergence --steps 3 --hidden 16 --wires int8_ef --seeds"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All programs in one process, since importing torch takes seconds; {command line: what it
    gave}.
    """
    lines = [
        f"{STEP} sync compressed stepped",
        f"{BUCKET} gloo_bf16 fp32_staged fp32 bf16 fp8_e5m2_ef int8_ef",
        "memory --width 512 --gradients copies --settings int8_ef --ranks 3",
        f"{LEARN} 1 2",
        f"spoil {STEP} ours",
        f"spoil {STEP} ours_int8_ef",
        f"spoil {BUCKET} int8_ef",
        f"spoil {LEARN} 1",
    ]
    words = [PROGRAMS, "ddp", str(tmp_path_factory.mktemp("rows")), *" , ".join(lines).split()]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_forked(words, environ, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(lines, results, strict=True)), done.stderr


def rows_of(runs, start):
    (found,) = [result for line, result in runs[0].items() if line.startswith(start)]
    assert found["code"] == 0, runs[1]
    for row in found["rows"]:
        assert set(row) >= WHERE
    return found["rows"]


def test_step(runs):
    (row,) = rows_of(runs, "step")
    assert row["model"] == "3xLinear128" and row["gradient_bytes"] == 198144 and row["steps"] >= 3
    ways = [key.removesuffix("_ms") for key in row if key.endswith("_ms")]
    assert {"no_sync", "gloo", "hook", "ours", "gloo_bf16", "ours_int8_ef", "ours_adamw"} <= set(ways)
    for way in set(ways) - {"plain", "no_sync"}:
        assert row["times"][way] > 0 and way in row["added"], way
    added = (row["ours_ms"] - row["no_sync_ms"]) / (row["gloo_ms"] - row["no_sync_ms"])
    assert row["added"]["ours"] == pytest.approx(added, abs=0.02)  # of times rounded to 0.1 us
    added = (row["ours_bf16_ms"] - row["no_sync_ms"]) / (row["gloo_bf16_ms"] - row["no_sync_ms"])
    assert row["added"]["ours_bf16"] == pytest.approx(added, abs=0.02)


def test_bucket_counts_bytes(runs):
    rows = {row["way"]: row for row in rows_of(runs, "bucket")}
    assert rows["fp32"]["of_fp32"] == rows["fp32_staged"]["of_fp32"] == 1
    assert rows["bf16"]["of_fp32"] == rows["gloo_bf16"]["of_fp32"] == 0.5
    assert rows["int8_ef"]["of_fp32"] == rows["fp8_e5m2_ef"]["of_fp32"] == pytest.approx((256 + 4) / 1024, abs=1e-3)
    assert rows["int8_ef"]["peer"] == "gloo_bf16" and rows["int8_ef"]["times"] > 0
    assert "1 of 1" in rows["fp32"]["shared"] and "1 of 1" not in rows["fp32_staged"]["shared"]


def test_memory_is_at_most_a_bucket(runs):
    hook, optimizer = rows_of(runs, "memory")
    assert hook["residuals"] == hook["parameter_bytes"] == 8 * 513 * 512 * 4 and not hook["bucket_view"]
    assert hook["residuals"] < hook["extra"] <= hook["allowed"] and hook["good"]
    assert 1 / 3 <= optimizer["optimizer_share"] <= optimizer["allowed"] < 0.334 and optimizer["ranks"] == 3


def test_convergence(runs):
    fp32, int8 = rows_of(runs, "convergence")
    assert fp32["train_by_fp32"] == fp32["of_fp32"] == 1 and int8["wire"] == "int8_ef"
    assert int8["train_by_fp32"] == pytest.approx(1, abs=0.01) and 0.25 < int8["of_fp32"] < 0.3


def test_a_spoiled_result_is_seen(runs):
    spoiled = {line: result for line, result in runs[0].items() if line.startswith("spoil")}
    assert len(spoiled) == 4
    for line, result in spoiled.items():
        assert result["code"] not in (0, None) and not result["rows"], line
    for way in ("ours", "ours_int8_ef", "int8_ef"):
        assert f"{way}: gradient" in runs[1], way
    assert "the ranks' results differ" in runs[1]
