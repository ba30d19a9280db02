"""split() and shrink() that fail: errors have the parent's rank numbers, come in time, and reach every rank.

Deaths in splits: test_campaign.py.
"""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.hosts import joined
from tests.ranks import run_ranks

F32, SUM = 7, 0
SOON = 5.0  # seconds: what the project promises
CASES = [Case("all_reduce", "float32", 100)]


def caught(call):
    """Make a call, which must raise an error of ours; give its facts, and the seconds."""
    from collectives.errors import CollectivesError

    start = time.monotonic()
    with pytest.raises(CollectivesError) as raised:
        call()
    error = raised.value
    return (type(error).__name__, error.rank, error.peers, str(error)), time.monotonic() - start


def all_reduce(comm):
    x = np.ones(10, np.float32)
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)


def fails_locally(ctx, at_fault, turned):
    comm = ctx.new_comm()
    ctx.barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ctx.rank == at_fault:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        facts, spent = caught(lambda: comm.split(0, -ctx.rank if turned else ctx.rank))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    child = comm.split(0, ctx.rank)
    found = run_cases(ctx, CASES, child) + run_cases(ctx, CASES, comm)
    child.destroy()
    comm.destroy()
    return facts, spent, found


@pytest.mark.parametrize(("at_fault", "turned"), [(0, True), (2, False)])
def test_a_rank_without_descriptors_is_named_by_all(at_fault, turned):
    results = run_ranks(fails_locally, 3, at_fault, turned, timeout=30)
    for rank, ((name, own, peers, text), spent, found) in enumerate(results):
        assert own == rank
        assert spent < SOON
        assert found == []  # the parent is as it was, and the next split is the same one for all
        if rank == at_fault:
            assert (name, peers) == ("TransportError", ())
        else:
            assert (name, peers) == ("RemoteError", (at_fault,)), text
            assert f"rank {at_fault} has given up this split" in text


def late_for(ctx, what, late):
    """A rank comes too late: to a split, which ends the communicator, or to a shrink, which is called again."""
    comm = ctx.new_comm()
    comm.set_timeout(1.0)
    calls = {"split": lambda: comm.split(0, -ctx.rank), "shrink": lambda: comm.shrink([0])}
    facts = spent = after = None
    if ctx.rank == late:
        ctx.barrier()
        comm.set_timeout(None)
    if what == "split" or ctx.rank:  # rank 0 is left out of a shrink, so that the others' numbers change
        facts, spent = caught(calls[what])
    if ctx.rank != late:
        ctx.barrier()
    if what == "split":
        after = [caught(lambda: comm.split(0, 0))[0][0], caught(lambda: all_reduce(comm))[0][0]]
    elif ctx.rank:
        smaller = comm.shrink([0])
        after = run_cases(ctx, CASES, smaller)
        smaller.destroy()
    ctx.barrier()
    comm.abort()
    return facts, spent, after


@pytest.mark.parametrize(("what", "late", "n"), [("split", 0, 3), ("split", 2, 3), ("shrink", 1, 4), ("shrink", 3, 4)])
def test_a_rank_that_is_late(what, late, n):
    results = run_ranks(late_for, n, what, late, timeout=30)
    ranks = range(1 if what == "shrink" else 0, n)
    for rank in ranks:
        (name, own, peers, text), spent, after = results[rank]
        assert own == rank
        assert spent < SOON
        if rank == late:
            assert name == "RemoteError" and set(peers) <= set(ranks) - {late}, text
        else:
            assert (name, peers) == ("CollectiveTimeout", (late,)) and f"rank {late}" in text, text
        if what == "split":
            assert set(after) <= {"InvalidUsage", "RemoteError"}, after
        else:
            assert after == []


def late_on_several_nodes(ctx, machines, late):
    with joined(ctx, machines) as comm:
        comm.timeout = 1.0
        found = None
        if ctx.rank not in (0, late):
            found = caught(lambda: comm.shrink([0], abort=True))
        ctx.barrier()
        comm.abort()
        return found


@pytest.mark.parametrize(("machines", "late"), [("abba", 3), ("abbb", 2)])
def test_a_late_rank_on_several_nodes(machines, late):
    results = run_ranks(late_on_several_nodes, 4, machines, late, timeout=40)
    for rank in {1, 2, 3} - {late}:
        (name, own, peers, text), spent = results[rank]
        assert own == rank
        assert name in ("CollectiveTimeout", "RemoteError"), text
        assert not set(peers) - ({late} if name == "CollectiveTimeout" else {1, 2, 3} - {rank}), text
        assert "shrink" in text
        assert spent < SOON, (rank, text)
