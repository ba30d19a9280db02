"""Ranks that lack something (benchmarks/faults/resources.py): some seeds of each kind."""

from __future__ import annotations

import os

import pytest

from benchmarks.faults import resources

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, as root alone may")
# What these have found: a dump of the flight recorder left a part of a file on a full disk (26); ranks of several nodes
# didn't learn which of them had no descriptor (132), and not that no thread could be started (109).
ONCE_WRONG = [pytest.param(26, marks=needs_root), 109, 132]


def kind_of(seed: int):
    kind = resources.make_plan(seed).kind
    marks = [needs_root] if kind in ("disk", "shm") else []
    return pytest.param(seed, id=f"{kind}-{seed}", marks=marks)


@pytest.mark.parametrize("seed", [kind_of(seed) for seed in range(6, 8)])
def test_a_rank_lacks_something(seed):
    assert resources.run_trial(seed)["wrong"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_what_has_once_gone_wrong(seed):
    assert resources.run_trial(seed)["wrong"] == []


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [kind_of(seed) for seed in range(20_000, 20_120)])
def test_many_trials(seed):
    assert resources.run_trial(seed)["wrong"] == []
