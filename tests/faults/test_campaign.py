"""The fault trials of benchmarks/faults: some seeds of each kind, and all that have once gone wrong."""

from __future__ import annotations

import pytest

from benchmarks.faults import deviations, kills, soak, trainings

# What these have found: a receive with less room than what came made Gloo end the process (several nodes, 47); a
# stopped rank 0 of several nodes held up everybody at its store (103); after rank 0's death the store was said to be
# another rank's (114).
# Ranks that connected between nodes named a rank that waited itself (40075, 40135), or nobody (40073); an elastic DDP
# training hung where a rank died before its process group was opened (41000).
ONCE_WRONG = [
    (deviations, 47), (kills, 103), (kills, 114), (kills, 40073), (kills, 40075), (kills, 40135), (trainings, 41000),
]  # fmt: skip


@pytest.mark.parametrize("seed", [2, 5, 9, 13])
def test_ranks_die(seed):
    assert kills.run_trial(seed)["wrong"] == []


@pytest.mark.parametrize("seed", range(8))
def test_a_program_deviates(seed):
    assert deviations.run_trial(seed)["wrong"] == []


@pytest.mark.parametrize(
    ("kind", "seed"), [pytest.param(*each, marks=pytest.mark.thorough) for each in ONCE_WRONG]
)
def test_what_has_once_gone_wrong(kind, seed):
    assert kind.run_trial(seed)["wrong"] == []


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", [3, 14, 35])
def test_trainings(seed):
    """A model in shards, of which some are missing; torch's process group with a rank less; four deaths."""
    assert trainings.run_trial(seed)["wrong"] == []


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", [0, 1])
def test_many_operations(seed, monkeypatch):
    monkeypatch.setattr(soak, "OPERATIONS", 200)
    assert soak.run_trial(seed)["wrong"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kills, deviations])
def test_many_trials(kind):
    wrong = {seed: row["wrong"] for seed in range(20_000, 20_300) if (row := kind.run_trial(seed))["wrong"]}
    assert not wrong


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_a_long_soak(seed):
    assert soak.run_trial(seed)["wrong"] == []
