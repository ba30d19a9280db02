"""Trainings under the elastic launcher, in which ranks die, are started again and join."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.launching import free_port
from tests.programs import FORKING, run_forked
from tests.project.test_imports import ROOT

PROGRAM = Path(__file__).with_name("training.py")
SAMPLES, EPOCHS = 96, 2
SECONDS = 90
RUN = [sys.executable, "-m", "collectives.run"]


def options_of(ranks, limits, *options, program=PROGRAM):
    return ["-n", str(ranks), "--elastic", limits, *options, str(program)]


def environment(folder, faults, way, more):
    folder.mkdir(exist_ok=True)
    return {
        **os.environ, "FAULTS": json.dumps(faults), "WAY": way, "OUT": str(folder / "out"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **more,
    }  # fmt: skip


def read_rows(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("out.*"))]


def run_job(folder, ranks, faults, *options, limits="1:8", way="plain", program=PROGRAM, seconds=SECONDS, **env):
    """Run a job on one node; return its process, and what the ranks that finished have written."""
    env = environment(folder, faults, way, env)
    done = run_forked([FORKING, *RUN[1:], *options_of(ranks, limits, *options, program=program)], env, seconds)
    return done, read_rows(folder)


def check_rows(rows, size, text=""):
    """All ranks have ended together, alike, and no sample was lost."""
    assert sorted(row["rank"] for row in rows) == list(range(size)), text
    assert all(row["size"] == size and row["epoch"] == EPOCHS for row in rows), text
    assert len({row["loss"] for row in rows}) == 1, text
    counts = torch.tensor(rows[0]["history"]).sum(0).tolist()
    assert min(counts) >= EPOCHS, (counts, text)  # where they can't be dealt out evenly some occur twice
    assert sum(counts) - EPOCHS * SAMPLES < 8 * 8, (counts, text)


def fault(rank, at, how="kill", life=0):
    return {"rank": rank, "at": at, "how": how, "life": life}


@pytest.mark.parametrize(
    "way",
    ["plain", "ddp", *(pytest.param(way, marks=pytest.mark.thorough) for way in ("own_ddp", "hvd"))],
)
def test_a_rank_dies_and_another_one_joins(tmp_path, way):
    done, rows = run_job(tmp_path, 3, [fault(0, "step 9")], way=way, LEAST="3")
    assert done.returncode == 0, done.stderr
    check_rows(rows, 3, done.stderr)
    assert "died" in done.stderr and "joined" in done.stderr
    assert done.stderr.count("is started again") == 1, f"the survivors go on in their processes: {done.stderr}"


@pytest.mark.thorough
def test_torchs_group_is_opened_again_for_the_same_ranks(tmp_path):
    faults = [fault(1, "commit 3", "update"), fault(0, "commit 9", "update")]
    done, rows = run_job(tmp_path, 2, faults, way="ddp", WIRE="fp32")
    assert done.returncode == 0, done.stderr
    check_rows(rows, 2, done.stderr)
    assert "died" not in done.stderr, done.stderr


def test_several_die(tmp_path):
    """Several ranks die, one of them while the others recover; with a secret, which all records carry."""
    faults = [fault(0, "step 5"), fault(3, "commit 4"), fault(1, "sync 2", "exit")]
    done, rows = run_job(tmp_path, 4, faults, PAUSE="0.01", COLLECTIVES_SECRET="x" * 20)
    assert done.returncode == 0, done.stderr
    assert len(rows) >= 1
    check_rows(rows, rows[0]["size"], done.stderr)


@pytest.mark.thorough
def test_an_undisturbed_job(tmp_path):
    calm, rows = run_job(tmp_path / "calm", 2, [])
    assert calm.returncode == 0, calm.stderr
    check_rows(rows, 2)
    assert set(torch.tensor(rows[0]["history"]).sum(0).tolist()) == {EPOCHS}


ENDS = """
import os, sys, time
import collectives
from collectives import elastic

collectives.init()
elastic.run(lambda state: None)(elastic.ObjectState(step=0))
if os.environ["RANK"] == "1":
    time.sleep(1.0)
    sys.exit(5)
"""


def test_a_rank_that_fails_after_the_training(tmp_path):
    """The job's exit code is that rank's."""
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    done, _ = run_job(tmp_path, 2, [], program=program)
    assert done.returncode == 5, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "rank 1" in last and "after another rank's program has ended with 0" in last


def test_too_few_ranks_end_the_job(tmp_path):
    faults = [fault(rank, "step 3", "raise", life) for rank in (0, 1) for life in range(4)]
    done, rows = run_job(tmp_path, 2, faults, limits="2:2")
    assert done.returncode != 0 and not rows, (faults, done.stderr)
    assert "ValueError: a fault of the program" in done.stderr
    assert "is not started again (--max-restarts)" in done.stderr


def run_two_nodes(folder, faults, *options, program=PROGRAM, **env):
    """Run a job of two launchers, as of two machines, with two ranks each; return what `run_job` does, of both."""
    env = environment(folder, faults, "plain", {"COLLECTIVES_ENGINE": "host", **env})
    place = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")

    def run_node(node):
        words = options_of(2, "1:8", *place, "--node-rank", str(node), *options, program=program)
        return run_forked([FORKING, *RUN[1:], *words], {**env, "COLLECTIVES_HOST_ID": f"node{node}"}, SECONDS)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_node, range(2))), read_rows(folder)


@pytest.mark.thorough
def test_two_nodes(tmp_path):
    """Two launchers; a rank of each dies, and rank 0 is one of them."""
    done, rows = run_two_nodes(tmp_path, [fault(0, "step 5"), fault(2, "step 9")], PAUSE="0.15")
    texts = [each.stderr for each in done]
    assert [each.returncode for each in done] == [0, 0], texts
    check_rows(rows, rows[0]["size"], "\n".join(texts))
