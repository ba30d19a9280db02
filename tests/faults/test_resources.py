"""Ranks that lack something (tests/faults/resources.py): some seeds of each kind, and what once went wrong."""

from __future__ import annotations

import pytest

from tests.faults.resources import Plan, make_plan, run_plan

# Ranks of several nodes didn't learn which of them had no descriptor, nor that one could start no thread.
# Both still go wrong in some runs: torch's own store fails first, without a name.
ONCE_WRONG = [
    pytest.param(Plan(132, "descriptors", 4, "aabb", (1,), "init", 9), id="descriptors", marks=pytest.mark.thorough),
    pytest.param(Plan(109, "memory", 3, "aab", (0, 1, 2), "split", 16351.9), id="threads", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("seed", [6, 8, 10])
def test_a_rank_lacks_descriptors(seed):
    assert run_plan(make_plan(seed))["wrong"] == []


@pytest.mark.parametrize("plan", ONCE_WRONG)
def test_what_has_once_gone_wrong(plan):
    assert run_plan(plan)["wrong"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20_000, 20_060))
def test_many_trials(seed):
    assert run_plan(make_plan(seed))["wrong"] == []
