"""The program that measures host time: each way works without peers, and its rows have what they must have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.streams.simulated import needs_simulation

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [needs_simulation, pytest.mark.thorough]


def host_time(*options):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.host_time", *options], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_rows(tmp_path):
    done = host_time("--rounds", "1", "--steps", "1", "--results", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert {row["per"] for row in rows.values()} == {"bucket", "gather", "reduce", "batch", "call"}
    for case in ("hook", "hook, max_norm", "sharded", "sharded, kept", "horovod: grouped_allreduce_ of 16 tensors"):
        assert rows[case]["goal_us"] > 0 and "ratio" in rows[case] and rows[case]["torch"]
    assert all(row["ranks"] == 8 and row["commit"] for row in rows.values())


def test_profile():
    done = host_time("--profile", "--ways", "hook", "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    assert "ddp/hook.py" in done.stdout
