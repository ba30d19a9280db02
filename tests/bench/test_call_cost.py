"""A call from Python to the C function costs less than a microsecond: the benchmark, run short."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.rank_process import ROOT


def test_a_call_costs_less_than_a_microsecond():
    command = [sys.executable, str(ROOT / "benchmarks" / "call_cost.py"), "--rounds", "4000", "--results", ""]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["binding_ns"] < 1000
    assert row["binding_ns"] < row["ctypes_ns"]
