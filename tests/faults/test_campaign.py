"""The fault trials of benchmarks/faults: some seeds of each kind, and all that have once gone wrong."""

from __future__ import annotations

import pytest

from benchmarks.faults import deviations, kills, soak, trainings

# What these have found: a receive with less room than what came made Gloo end the process (several nodes, 47); a
# stopped rank 0 of several nodes held up everybody at its store (103); after rank 0's death the store was said to be
# another rank's (114).
# Ranks that connected between nodes named a rank that waited itself (40075, 40135), or nobody (40073); an elastic DDP
# training hung where a rank died before its process group was opened (41000). In a split between nodes nobody noticed
# a rank that ended before it had connected (100233, 100639), or a rank that had opened its part waited for one that
# had not (111035), or one that couldn't connect was named (110489). Where the process that serves the store was
# stopped the error came late (62022); a rank was named beside the stopped one for which it waited (62036, 111001).
ONCE_WRONG = [
    (deviations, 47), (kills, 103), (kills, 114), (kills, 40073), (kills, 40075), (kills, 40135), (kills, 62022),
    (kills, 62036), (kills, 100233), (kills, 100639), (kills, 110489), (kills, 111001), (kills, 111035),
    (trainings, 41000),
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
