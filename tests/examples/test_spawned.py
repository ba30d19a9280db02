"""Programs that start their own ranks: the example, by each start method, and what goes wrong there."""

import json

import pytest

from tests.examples.running import fork_example
from tests.programs import run_python

NAME = "spawned_all_reduce.py"


def start_alone(*options, cwd):
    return fork_example(NAME, *options, cwd=cwd, ranks=1, variables=lambda *_: {})


@pytest.mark.parametrize("method, ranks", [("spawn", 2), pytest.param("fork", 3, marks=pytest.mark.thorough)])
def test_all_three_ways_give_the_sum(method, ranks, tmp_path):
    code, out, err = start_alone("--start-method", method, "--ranks", str(ranks), cwd=tmp_path)
    assert code == 0, out + err
    result = json.loads(out.splitlines()[-1])
    total = ranks * (ranks + 1) / 2
    assert result["right"] is True and result["expected"] == total
    assert list(result["data"].values()) == 3 * [ranks * [total]]
    said = sorted(line.split("  ")[0] for line in out.splitlines()[:-1])
    assert said == [f"Rank {rank} has data {total}" for rank in range(ranks) for _ in range(3)]


def test_a_rank_that_raises_ends_the_program_with_its_traceback(tmp_path):
    code, out, err = start_alone("--start-method", "fork", "--fail-rank", "1", cwd=tmp_path)
    assert code == 1 and out == ""
    assert err.rstrip().endswith("RuntimeError: rank 1 was asked to fail")


def test_under_a_launcher_it_says_how_to_start_it(tmp_path):
    code, _, err = fork_example(NAME, cwd=tmp_path)
    assert code != 0 and "run it with python alone, not under a launcher (slurm)" in err


FORKED = """
import os
import torch
import torch.multiprocessing as mp
import collectives

def child(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    with collectives.init() as comm:
        tensor = torch.ones(1)
        comm.all_reduce(tensor)
        assert tensor.item() == 2

comm = collectives.init()
try:
    mp.start_processes(child, nprocs=2, start_method="fork")
except mp.ProcessRaisedException as error:
    print(str(error).splitlines()[-1])
comm.close()
mp.start_processes(child, nprocs=2, start_method="fork")  # what the message says
print("closed first: well")
"""


def test_forked_ranks_of_a_parent_that_has_a_communicator_raise_what_to_do():
    done = run_python(FORKED, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    text, then = done.stdout.splitlines()
    assert "opened in the parent process" in text and "close() it before the fork, or start them by the spawn" in text
    assert then == "closed first: well"
