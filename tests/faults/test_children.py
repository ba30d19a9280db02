"""split() and shrink() that fail: errors have the parent's rank numbers, come in time, and reach every rank."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest
import torch

from tests.conformance.cases import Case, run_cases
from tests.hosts import apart
from tests.ranks import Died, run_ranks

F32, SUM = 7, 0
SOON = 5.0  # seconds: what the project promises
CASES = [Case("all_reduce", "float32", 100)]


def caught(call):
    from collectives.errors import CollectivesError

    with pytest.raises(CollectivesError) as error:
        call()
    return error.value


def all_reduce(comm):
    x = np.ones(10, np.float32)
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)


def facts(error):
    return type(error).__name__, error.rank, error.peers, str(error)


def killed_among_turned_splits(ctx, victim, delay):
    """The children's ranks are in the other order than their parent's, so no number is right by chance."""
    comm = ctx.new_comm()
    comm.split(0, 0).destroy()
    if ctx.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    while True:
        try:
            comm.split(0, -ctx.rank).destroy()
        except Exception as error:
            spent = time.monotonic() - start - delay
            smaller = comm.shrink(list(error.peers), flags=1)
            found = run_cases(ctx, CASES, smaller)
            smaller.destroy()
            comm.abort()
            return facts(error), spent, found


@pytest.mark.parametrize(("victim", "seed"), [(0, 0), (1, 1), (3, 0)])
def test_a_death_has_the_parents_number(seed, victim):
    delay = random.Random(seed).uniform(0.2, 0.3)
    results = run_ranks(killed_among_turned_splits, 4, victim, delay, timeout=30, deaths={victim})
    assert isinstance(results.pop(victim), Died)
    ranks = [rank for rank in range(4) if rank != victim]
    for rank, ((name, own, peers, text), spent, found) in zip(ranks, results, strict=True):
        assert (name, own, peers, found) == ("RemoteError", rank, (victim,), []), text
        assert f"rank {victim}" in text
        assert not any(f"rank {other}" in text.split("]", 1)[-1] for other in ranks), text
        assert spent < SOON


def fails_locally(ctx, at_fault, turned):
    comm = ctx.new_comm()
    ctx.barrier()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ctx.rank == at_fault:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    start = time.monotonic()
    try:
        error = caught(lambda: comm.split(0, -ctx.rank if turned else ctx.rank))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    spent = time.monotonic() - start
    child = comm.split(0, ctx.rank)
    found = run_cases(ctx, CASES, child) + run_cases(ctx, CASES, comm)
    child.destroy()
    comm.destroy()
    return facts(error), spent, found


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("at_fault", [0, 2])
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


def late_for_a_split(ctx, late):
    comm = ctx.new_comm()
    comm.set_timeout(1.0)
    if ctx.rank == late:
        ctx.barrier()
        comm.set_timeout(None)
    start = time.monotonic()
    error = caught(lambda: comm.split(0, -ctx.rank))
    spent = time.monotonic() - start
    after = [caught(lambda: comm.split(0, 0)), caught(lambda: all_reduce(comm))]
    if ctx.rank != late:
        ctx.barrier()
    ctx.barrier()
    comm.abort()
    return facts(error), spent, [facts(each) for each in after]


@pytest.mark.parametrize("late", [0, 2])
def test_a_split_past_the_timeout_ends_the_communicator(late):
    results = run_ranks(late_for_a_split, 3, late, timeout=30)
    for rank, ((name, own, peers, text), spent, after) in enumerate(results):
        assert own == rank
        assert spent < SOON
        if rank == late:
            assert name == "RemoteError", text
            assert set(peers) <= {0, 1, 2} - {late}
        else:
            assert (name, peers) == ("CollectiveTimeout", (late,)), text
            assert f"rank {late}" in text
        assert all(later in ("InvalidUsage", "RemoteError") for later, *_ in after), after


def late_for_a_shrink(ctx, late):
    """Rank 0 is left out, so that the others' numbers change."""
    comm = ctx.new_comm()
    comm.set_timeout(1.0)
    if ctx.rank == 0:
        ctx.barrier()
        ctx.barrier()
        comm.abort()
        return None
    if ctx.rank == late:
        ctx.barrier()
    start = time.monotonic()
    error = caught(lambda: comm.shrink([0]))
    spent = time.monotonic() - start
    if ctx.rank != late:
        ctx.barrier()
    smaller = comm.shrink([0])
    found = run_cases(ctx, CASES, smaller)
    smaller.destroy()
    ctx.barrier()
    comm.abort()
    return facts(error), spent, found


@pytest.mark.parametrize("late", [1, 3])
def test_a_shrink_past_the_timeout_is_called_again(late):
    results = run_ranks(late_for_a_shrink, 4, late, timeout=30)
    for rank, result in enumerate(results):
        if rank == 0:
            continue
        (name, own, peers, text), spent, found = result
        assert own == rank
        assert spent < SOON
        assert found == []
        if rank == late:
            assert name == "RemoteError", text
            assert set(peers) <= {1, 2, 3} - {late}, text
        else:
            assert (name, peers) == ("CollectiveTimeout", (late,)), text


def late_on_several_nodes(ctx, machines, late):
    with apart(ctx, machines):
        comm = collectives_init()
        comm.timeout = 1.0
        if ctx.rank == 0:
            ctx.barrier()
            comm.abort()
            return None
        if ctx.rank == late:
            ctx.barrier()
            comm.abort()
            return None
        start = time.monotonic()
        error = caught(lambda: comm.shrink([0], abort=True))
        spent = time.monotonic() - start
        ctx.barrier()
        comm.abort()
        return facts(error), spent


def collectives_init():
    import collectives
    import collectives.rendezvous.world

    collectives.rendezvous.world._generation = 0  # processes that are used again have opened other worlds before
    return collectives.init()


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


def dies_on_several_nodes(ctx, machines, victim):
    with apart(ctx, machines):
        comm = collectives_init()
        ctx.barrier()
        if ctx.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        error = caught(lambda: comm.split(0, -ctx.rank))
        smaller = comm.shrink(error.peers, abort=True)
        x = torch.ones(10)
        smaller.all_reduce(x)
        found = x.tolist() == [3.0] * 10
        smaller.close()
        comm.abort()
        return facts(error), found


@pytest.mark.parametrize(("machines", "victim"), [("abba", 3), ("aabb", 1)])
def test_a_death_on_several_nodes(machines, victim):
    results = run_ranks(dies_on_several_nodes, 4, machines, victim, timeout=40, deaths={victim})
    for rank in set(range(4)) - {victim}:
        (name, own, peers, text), right = results[rank]
        assert (name, own, peers, right) == ("RemoteError", rank, (victim,), True), text
