"""The benchmarks of sharding, run small: rows with all fields, and results that are checked."""

from __future__ import annotations

import json
import os

import pytest

from collectives.sharded import fsdp2
from tests.bench.test_ddp_benchmarks import PROGRAMS, WHERE
from tests.programs import run_forked
from tests.rank_process import ROOT

pytestmark = pytest.mark.skipif(fsdp2._protocol is None, reason="this torch has no custom collectives in FSDP2")
STEP = "step --models 3xLinear128 --rounds 1 --turn-seconds 0.01 --ways"


@pytest.mark.thorough
def test_steps_and_memory(tmp_path):
    lines = [
        f"{STEP} asked fsdp2_ours ours_shard_optimizer ours_no_shard",
        "memory --models 3xLinear512 --optimizers ours --ways alone fsdp2 ours",
        f"spoil {STEP} ddp ours",
    ]
    words = [PROGRAMS, "sharded", str(tmp_path), *" , ".join(lines).split()]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_forked(words, environ, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, memory, spoiled = (json.loads(line) for line in done.stdout.splitlines())

    (row,) = steps["rows"]
    assert set(row) >= WHERE and row["model"] == "3xLinear128" and row["parameter_bytes"] == 3 * 129 * 128 * 4
    ways = {"alone", "ddp", "fsdp2", "fsdp2_ours", "ours", "ours_shard_optimizer", "ours_no_shard"}
    assert ways <= set(row["parts_ms"]) == set(row["apart"])
    assert row["apart"]["alone"] > 0.05
    assert all(row["apart"][way] == 0 for way in ways if way == "ddp" or way.startswith("ours"))
    by_hand = (row["ours_ms"] - row["alone_ms"]) / (row["fsdp2_ms"] - row["alone_ms"])
    assert row["added"]["ours"][0] == pytest.approx(by_hand, abs=0.05)  # of times rounded to 1 us
    assert row["to_ddp"]["ours"][0] == pytest.approx(row["ours_ms"] / row["ddp_ms"], abs=0.01)

    rows = {row["way"]: row for row in memory["rows"]}
    share = 3 * 513 * 512 * 4 // 2
    assert set(rows) == {"alone", "fsdp2", "ours"} and all(set(row) >= WHERE for row in rows.values())
    assert rows["alone"]["kept_bytes"] == pytest.approx(6 * share, rel=0.1)  # all parameters and AdamW's states
    # A step's gradients, states and parameters, and at least a unit of them whole; but of so small
    # a model a part, some 1 MiB, comes from what malloc has free when the counting begins.
    free = 3 << 19
    assert 4 * share + share // 3 - free < rows["ours"]["peak"] < 8 * share
    assert all(0.7 < ratio < 1.2 for ratio in rows["ours"]["to_plan"].values())

    assert "the parameters aren't" in done.stderr and spoiled["code"] not in (0, None) and not spoiled["rows"]
