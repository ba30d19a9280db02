"""Trainings with models in shards, in which ranks die: others go on from the shards' copies, with the
bits of a job that loads a checkpoint of that commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collectives.elastic.replicas import find_keepers
from tests.elastic import sharded_training
from tests.elastic.test_training import fault, run_job, run_two_nodes
from tests.ranks import run_ranks

PROGRAM = Path(sharded_training.__file__)
STEPS = 2 * (sharded_training.SAMPLES // sharded_training.BATCH)


def run(folder, ranks, faults, *options, **env):
    return run_job(folder, ranks, faults, *options, program=PROGRAM, SAVES=str(folder / "saves"), **env)


def check(folder, done, rows, size, versions):
    """All ranks have ended with one state, which is that of a job that resumes from the disk.

    `versions`: from which commits it may have gone on last.
    """
    assert done.returncode == 0, done.stderr
    assert sorted(row["rank"] for row in rows) == list(range(size)), done.stderr
    assert len({row["digest"] for row in rows}) == 1
    counts = torch.tensor(rows[0]["history"]).sum(0).tolist()
    assert min(counts) >= sharded_training.EPOCHS, (counts, done.stderr)
    assert sum(counts) - STEPS * sharded_training.BATCH < 8 * 8, (counts, done.stderr)
    last, commits = rows[0]["starts"][-1]
    assert last == size and commits in versions, (rows[0]["starts"], done.stderr)
    if commits:
        (folder / "resumed").mkdir()
        for row in run_ranks(sharded_training.resume, size, folder / "saves" / f"commit_{commits}"):
            assert row["loss"] == rows[0]["loss"] and row["digest"] == rows[0]["digest"]
            assert row["history"] == rows[0]["history"]


def test_a_rank_dies_in_a_step(tmp_path):
    done, rows = run(tmp_path, 3, [fault(1, "step 6")], "--max-restarts", "0", WHOLE="1")
    check(tmp_path, done, rows, 2, {2})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks, faults, left, versions",
    [
        (3, [fault(0, "refresh 3")], 2, {2}),  # the version that was being sent is not whole: the one before it is
        (2, [fault(0, "refresh 1")], 1, {0}),
        (4, [fault(3, "commit 4"), fault(1, "attach 2")], 2, {2}),
    ],
    ids=["while shards are sent", "while the first shards are sent", "one after the other, in a recovery"],
)
def test_ranks_die(tmp_path, ranks, faults, left, versions):
    done, rows = run(tmp_path, ranks, faults, "--max-restarts", "0", EVERY="2" if ranks == 4 else "1")
    check(tmp_path, done, rows, left, versions)


@pytest.mark.thorough
def test_another_rank_joins(tmp_path):
    """The restarted rank joins at a commit between two versions, and gets its shards from the others."""
    late = {**fault(0, "start", "wait", 1), "wait": 2.0}  # not in the recovery
    done, rows = run(tmp_path, 2, [fault(0, "step 9"), late], EVERY="3", JOIN="2")
    check(tmp_path, done, rows, 2, {4, 1})  # 1: not even the first version was whole
    first, alone, both = max((row["starts"] for row in rows), key=len)
    assert first == [2, 0] and alone == [1, both[1] - 1]


def test_shards_whose_ranks_have_all_died(tmp_path):
    faults = [{**fault(rank, "step 9"), "wait": 0.5} for rank in (1, 2)]
    done, rows = run(tmp_path, 3, faults, "--max-restarts", "0", KEPT=f"{tmp_path}/saves/kept", KEEP="2")
    assert done.returncode != 0 and not rows
    assert "MissingShards" in done.stderr and "the shards of rank 1 are on no rank that is left" in done.stderr
    assert f"the newest whole checkpoint is {tmp_path}/saves/kept/step_000000004" in done.stderr


@pytest.mark.thorough
def test_the_others_die_before_a_rank_that_joins_has_its_shards(tmp_path):
    late = {**fault(1, "start", "wait", 1), "wait": 2.0}  # not in the recovery
    done, rows = run(tmp_path, 2, [fault(1, "step 5"), late, fault(0, "attach 3")], "--max-restarts", "1", JOIN="2")
    assert done.returncode != 0 and not rows
    assert "MissingShards" in done.stderr and "the shards of rank 0 are on no rank that is left" in done.stderr


@pytest.mark.thorough
def test_a_node_dies(tmp_path):
    """All ranks of the second of two nodes: the first one's ranks have kept their shards."""
    (tmp_path / "job").mkdir()
    faults = [{**fault(rank, "step 6"), "wait": 0.5} for rank in (2, 3)]
    done, rows = run_two_nodes(tmp_path / "job", faults, "--max-restarts", "0", program=PROGRAM,
                               SAVES=str(tmp_path / "job" / "saves"))  # fmt: skip
    done[0].stderr += done[1].stderr
    check(tmp_path / "job", done[0], rows, 2, {2, 3})


def test_keepers_are_on_other_nodes():
    assert find_keepers(1, [(0,)], 1) == []
    assert find_keepers(3, [(0, 1, 2)], 1) == [[1, 2, 0]]
    assert find_keepers(3, [(0, 1, 2)], 5) == [[1, 2, 0], [2, 0, 1]]
    for nodes in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0,), (1, 2), (3, 4, 5)], [(0, 1), (2, 3), (4, 5)]):
        size = sum(map(len, nodes))
        node_of = {rank: node for node in nodes for rank in node}
        (keepers,) = find_keepers(size, nodes, 1)
        assert sorted(keepers) == list(range(size))
        assert all(node_of[rank] != node_of[keeper] for rank, keeper in enumerate(keepers))
