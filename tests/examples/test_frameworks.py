"""The frameworks on our collectives: what they compute with Gloo, to the bit with two ranks.

What `make test` runs is forked with torch imported; what starts ranks by the frameworks' own launchers is thorough.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, fork_example, torchrun_variables

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = EXAMPLES / "frameworks"
PROGRAMS = Path(__file__).with_name("framework_programs")


def require(*packages):
    for needed in packages:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: it is in the group `test`")


def cpu_only(rank, ranks, port):
    return torchrun_variables(rank, ranks, port) | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}


def fork(path, *options, cwd):
    code, out, err = fork_example(path, *options, cwd=cwd, variables=cpu_only)
    assert code == 0, out + err
    return out, err


def run(*command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def read_losses(out):
    found = [line for line in out.splitlines() if line.startswith('{"backend"')]
    assert len(found) == 1, out
    return json.loads(found[0])


NAMES = {"accelerate": ["accelerate"], "trainer": ["transformers", "accelerate"], "lightning": ["lightning"]}
_of_gloo: dict[str, list[float]] = {}


# On the backend accelerate and the Trainer run below, too.
OFTEN = [("accelerate", "auto"), ("trainer", "auto"), ("lightning", "backend"), ("lightning", "auto")]
RARE = [(name, "hook") for name in NAMES] + [("accelerate", "backend"), ("trainer", "backend")]


@pytest.mark.parametrize(
    "name, way", [*OFTEN, *(pytest.param(*each, marks=pytest.mark.thorough) for each in RARE)]
)
def test_every_way_gives_the_losses_of_gloo(name, way, tmp_path):
    require(*NAMES[name])
    program = FRAMEWORKS / f"{name}_train.py"
    if name not in _of_gloo:
        plain = read_losses(fork(program, "--way", "gloo", cwd=tmp_path)[0])
        assert plain["backend"] == "gloo" and len(plain["losses"]) >= 30
        _of_gloo[name] = plain["losses"]
    out, log = fork(program, "--way", way, cwd=tmp_path)
    ours = read_losses(out)
    assert ours["losses"] == _of_gloo[name]
    assert ours["backend"] == ("collectives" if way == "backend" else "gloo")
    assert ("fused_allreduce on" in log) == (way == "auto"), log
    assert "HookState" not in log


@pytest.mark.thorough
def test_accelerate_with_fsdp2(tmp_path):
    require("accelerate")
    program = FRAMEWORKS / "accelerate_train.py"
    plain = read_losses(fork(program, "--way", "gloo", "--model", "ddp", cwd=tmp_path)[0])
    ours = read_losses(fork(program, "--way", "backend", "--model", "fsdp2", cwd=tmp_path)[0])
    assert ours["model"].startswith("FSDP") and ours["losses"] == plain["losses"]


@pytest.mark.thorough
def test_accelerate_launch():
    require("accelerate")
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    script = FRAMEWORKS / "accelerate_train.py"
    ours = read_losses(run(*launch, script, "--way", "backend")[0])
    out, log = run(*launch, "--module", "collectives.auto", script, "--way", "gloo")
    assert ours["backend"] == "collectives" and "fused_allreduce on" in log
    assert read_losses(out)["losses"] == ours["losses"]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "spawn", "fork", "fsdp2", "tensor"])
def test_lightning_starts_its_ranks(strategy):
    require("lightning")
    program = FRAMEWORKS / "lightning_train.py"
    plain, ours = (read_losses(run(program, "--way", way, "--strategy", strategy)[0]) for way in ("gloo", "backend"))
    assert (plain["backend"], ours["backend"]) == ("gloo", "collectives")
    assert len(ours["losses"]) >= 30 and ours["losses"] == plain["losses"]


@pytest.mark.parametrize(
    "program, options",
    [
        ("accelerate_utilities", []),
        ("trainer_options", ["accumulation"]),
        *(pytest.param("trainer_options", [name], marks=pytest.mark.thorough) for name in ("bf16", "fsdp", "dispatch")),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_frameworks_do_beside_gradients(program, options, tmp_path):
    require(*NAMES["trainer" if "trainer" in program else "accelerate"])
    found = {}
    for backend in ("gloo", "collectives"):
        out, _ = fork(PROGRAMS / f"{program}.py", backend, *options, cwd=tmp_path)
        (line,) = [line for line in out.splitlines() if line.startswith("found ")]
        found[backend] = json.loads(line.removeprefix("found "))
        assert len(found[backend]) == 2
    assert found["collectives"] == found["gloo"]


@pytest.mark.thorough
def test_ray_train():
    require("ray")
    losses = [read_losses(run(FRAMEWORKS / "ray_train.py", "--way", way)[0]) for way in ("gloo", "backend")]
    assert [each["backend"] for each in losses] == ["gloo", "collectives"]
    assert len(losses[0]["losses"]) >= 30 and losses[0]["losses"] == losses[1]["losses"]
