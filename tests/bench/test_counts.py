"""Counts of a training step: docs/counts.md has them, the host never waits, and launches don't grow with the ranks."""

from __future__ import annotations

import pytest

from benchmarks.counts import __main__ as counts
from tests.streams.simulated import needs_simulation

pytestmark = needs_simulation

EVERY_TIME = [
    "DDP, hook", "DDP, hook, int8 with error feedback", "GradientBuckets", "Horovod's DistributedOptimizer",
    "fully_shard", "DDP, hook, AdamW inside",
]  # fmt: skip


def check(ways):
    found = counts.measure(ways=ways)
    rows = found[max(found)]["rows"]
    names = {row["way"] for row in rows}
    assert not ways or names == set(ways)
    assert [row["way"] for row in rows if row["ours"] and row["host_waits"]] == []
    assert [row["way"] for row in rows if row["ours"] and row["nccl_memory"]] == []
    grown = counts.growing(found)
    assert grown == [], {ranks: [row for row in one["rows"] if row["way"] in grown] for ranks, one in found.items()}
    table = counts.PAGE.read_text().splitlines()
    assert [line for line in counts.lines_of(found) if line not in table] == [], "make counts"
    return found


def test_some_ways():
    check(EVERY_TIME)


@pytest.mark.thorough
def test_all_ways():
    found = check([])
    assert counts.page(found, counts.PAGE.read_text()) == counts.PAGE.read_text()
