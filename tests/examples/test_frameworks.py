"""examples/frameworks: each way gives Gloo's losses to the bit with two ranks."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.thorough


def train(name, way):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "frameworks" / f"{name}_train.py"), "--way", way]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith('{"backend"')]
    assert len(found) == 1, done.stdout
    return json.loads(found[0]), done.stderr


@pytest.mark.parametrize("name, package", [("accelerate", None), ("trainer", "transformers"), ("lightning", None)])
def test_every_way_gives_the_losses_of_gloo(name, package):
    for needed in {package or name, "accelerate" if name == "trainer" else name}:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install collectives[integrations]")
    plain, _ = train(name, "gloo")
    assert plain["backend"] == "gloo" and len(plain["losses"]) >= 30
    for way in ("backend", "auto", "hook"):
        ours, log = train(name, way)
        assert ours["losses"] == plain["losses"], way
        assert ours["backend"] == ("collectives" if way == "backend" else "gloo")
        assert ("with fused_allreduce" in log) == (way == "auto"), log
        assert "HookState" not in log
