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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All programs in one process, since importing torch takes seconds; {command line: what it
    gave}.
    """
    lines = [
        f"{STEP} sync compressed stepped",
        "memory --width 512 --gradients copies --settings int8_ef --ranks 3",
        f"spoil {STEP} ours",
        f"spoil {STEP} ours_int8_ef",
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


def test_memory_is_at_most_a_bucket(runs):
    hook, optimizer = rows_of(runs, "memory")
    assert hook["residuals"] == hook["parameter_bytes"] == 8 * 513 * 512 * 4 and not hook["bucket_view"]
    assert hook["residuals"] < hook["extra"] <= hook["allowed"] and hook["good"]
    assert 1 / 3 <= optimizer["optimizer_share"] <= optimizer["allowed"] < 0.334 and optimizer["ranks"] == 3


def test_a_spoiled_result_is_seen(runs):
    spoiled = {line: result for line, result in runs[0].items() if line.startswith("spoil")}
    assert len(spoiled) == 2
    for line, result in spoiled.items():
        assert result["code"] not in (0, None) and not result["rows"], line
    for way in ("ours", "ours_int8_ef"):
        assert f"{way}: gradient" in runs[1], way
