"""Ranks that lack something (tests/faults/resources.py): some seeds of each kind, and what once went wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.faults.resources import make_plan, run_plan, run_trial

# Ranks of several nodes didn't learn which of them had no descriptor, nor that one could start no thread.
# Both still go wrong in some runs: torch's own store fails first, without a name.
ONCE_WRONG = [
    dict(kind="descriptors", ranks=4, machines="aabb", victims=(1,), action="init", amount=9),
    dict(kind="memory", ranks=3, machines="aab", victims=(0, 1, 2), action="split", amount=16351.9),
]


@pytest.mark.parametrize("seed", [4, 6, 8, 10])
def test_a_rank_lacks_descriptors(seed):
    assert run_plan(make_plan(seed))["wrong"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ONCE_WRONG, ids=["descriptors", "threads"])
def test_what_has_once_gone_wrong(plan):
    assert run_plan(SimpleNamespace(**plan))["wrong"] == []


@pytest.mark.thorough
def test_many_trials():
    wrong = {seed: row["wrong"] for seed in range(20_000, 20_060) if (row := run_trial(seed))["wrong"]}
    assert not wrong
