"""The frameworks on our collectives: what they compute with Gloo, to the bit with two ranks."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
PROGRAMS = Path(__file__).with_name("framework_programs")
pytestmark = pytest.mark.thorough




def require(*packages):
    for needed in packages:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install collectives[integrations]")


def run(*command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


def torchrun(*command):
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command)


def read_losses(done):
    found = [line for line in done.stdout.splitlines() if line.startswith('{"backend"')]
    assert len(found) == 1, done.stdout
    return json.loads(found[0])


def train(name, way, *options, start=torchrun):
    done = start(EXAMPLES / f"{name}_train.py", "--way", way, *options)
    return read_losses(done), done.stderr


@pytest.mark.parametrize("name, package", [("accelerate", None), ("trainer", "transformers"), ("lightning", None)])
def test_every_way_gives_the_losses_of_gloo(name, package):
    require(package or name, "accelerate" if name == "trainer" else name)
    plain, _ = train(name, "gloo")
    assert plain["backend"] == "gloo" and len(plain["losses"]) >= 30
    for way in ("backend", "auto", "hook"):
        ours, log = train(name, way)
        assert ours["losses"] == plain["losses"], way
        assert ours["backend"] == ("collectives" if way == "backend" else "gloo")
        assert ("with fused_allreduce" in log) == (way == "auto"), log
        assert "HookState" not in log


def test_accelerate_with_fsdp2():
    require("accelerate")
    plain, _ = train("accelerate", "gloo", "--model", "ddp")
    ours, _ = train("accelerate", "backend", "--model", "fsdp2")
    assert ours["model"].startswith("FSDP") and ours["losses"] == plain["losses"]


def test_accelerate_launch():
    require("accelerate")
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    script = EXAMPLES / "accelerate_train.py"
    ours = read_losses(run(*launch, script, "--way", "backend"))
    done = run(*launch, "--module", "collectives.auto", script, "--way", "gloo")
    assert ours["backend"] == "collectives" and "with fused_allreduce" in done.stderr
    assert read_losses(done)["losses"] == ours["losses"]


@pytest.mark.parametrize("strategy", ["ddp", "spawn", "fork", "fsdp2", "tensor"])
def test_lightning_starts_its_ranks(strategy):
    require("lightning")
    plain, _ = train("lightning", "gloo", "--strategy", strategy, start=run)
    ours, _ = train("lightning", "backend", "--strategy", strategy, start=run)
    assert (plain["backend"], ours["backend"]) == ("gloo", "collectives")
    assert len(ours["losses"]) >= 30 and ours["losses"] == plain["losses"]


@pytest.mark.parametrize(
    "program, options, packages",
    [
        ("accelerate_utilities", [], ["accelerate"]),
        *(("trainer_options", [name], ["accelerate", "transformers"])
          for name in ("accumulation", "bf16", "fsdp", "dispatch")),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_frameworks_do_beside_gradients(program, options, packages):
    require(*packages)
    found = {}
    for backend in ("gloo", "collectives"):
        done = torchrun(PROGRAMS / f"{program}.py", backend, *options)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        found[backend] = json.loads(line.removeprefix("found "))
        assert len(found[backend]) == 2
    assert found["collectives"] == found["gloo"]


def test_ray_train():
    require("ray")
    losses = [read_losses(run(EXAMPLES / "ray_train.py", "--way", way)) for way in ("gloo", "backend")]
    assert [each["backend"] for each in losses] == ["gloo", "collectives"]
    assert len(losses[0]["losses"]) >= 30 and losses[0]["losses"] == losses[1]["losses"]
