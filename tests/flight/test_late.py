"""The flight recorder tells a rank that was late from one that died, and from one that a launcher ended afterwards."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from collectives.errors import CollectivesError, Mismatch, RemoteError
from collectives.flight import analyse, read_folder
from tests.ranks import run_ranks
from tests.variables import variables


def job(ctx, folder, how):
    """Rank 0 waits in an all-reduce, rank 1 does as `how` says, rank 2 computes; a launcher ends all at last."""
    with variables(COLLECTIVES_FLIGHT_DIR=folder):
        comm = ctx.new_communicator(timeout=1.0 if how == "late" else 60.0)
    x = torch.ones(16)
    comm.all_reduce(x)
    if how == "after a caught error":
        with pytest.raises(Mismatch):
            comm.broadcast(x, 0) if ctx.rank == 1 else comm.all_reduce(x)
        comm.all_reduce(x)
    ctx.barrier()
    if ctx.rank == 1 and how != "late":
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.rank == 0 and how == "nameless":  # what NCCL's own errors say
        comm._flight.record_error(RemoteError("unhandled remote error", op="all_reduce", rank=0))
    elif ctx.rank == 0:
        with pytest.raises(CollectivesError):
            comm.all_reduce(x)
    ctx.barrier(ranks=None if how == "late" else [rank for rank in range(ctx.size) if rank != 1])
    os.kill(os.getpid(), signal.SIGKILL)


def analysed(tmp_path, how, size=3):
    run_ranks(job, size, str(tmp_path), how, timeout=30, deaths=set(range(size)))
    rings, problems = read_folder(tmp_path)
    assert not problems
    return {(each.kind, each.ranks): each.text for each in analyse(rings)}, {ring.rank: ring for ring in rings}


@pytest.mark.parametrize("how", ["died", "after a caught error"])
def test_a_dead_rank_is_the_culprit_alone(tmp_path, how):
    found, rings = analysed(tmp_path, how)
    assert ("died", (1,)) in found and ("ended", (2,)) in found, found
    assert not [kind for kind, _ in found if kind == "late"]
    assert "no rank's error names it" in found["ended", (2,)]
    assert rings[0].error["kind"] == "RemoteError" and rings[0].error["peers"] == [1]
    assert list(found)[0] == ("died", (1,))  # the cause comes first


def test_a_late_rank_did_not_die(tmp_path):
    found, rings = analysed(tmp_path, "late")
    assert not [kind for kind, _ in found if kind == "died"], found
    assert rings[0].error["kind"] == "CollectiveTimeout" and sorted(rings[0].error["peers"]) == [1, 2]
    for rank in (1, 2):  # both were late
        assert "its process lived then, and was ended later" in found["late", (rank,)], found
    assert ("missing", (1, 2)) in found


@pytest.mark.parametrize("size", [2, 3])
def test_an_error_that_names_nobody(tmp_path, size):
    found, _ = analysed(tmp_path, "nameless", size)
    if size == 2:
        assert ("died", (1,)) in found, found
    else:  # one of both
        assert not [kind for kind, _ in found if kind in ("died", "ended", "late")], found
        for rank in (1, 2):
            assert "rank 0's RemoteError doesn't say which rank was missing" in found["unclear", (rank,)]


def caught_and_closed(ctx, folder, end):
    """All ranks catch a Mismatch, go on, and end in good order, or abort."""
    with variables(COLLECTIVES_FLIGHT_DIR=folder):
        comm = ctx.new_communicator()
    x = torch.ones(16)
    with pytest.raises(Mismatch):
        comm.broadcast(x, 0) if ctx.rank == 1 else comm.all_reduce(x)
    comm.all_reduce(x)
    ctx.barrier()
    comm.close() if end == "close" else comm.abort()
    ctx.barrier()
    os.kill(os.getpid(), signal.SIGKILL)  # the files of its communicators stay


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_caught_error_and_a_good_end(tmp_path, end):
    run_ranks(caught_and_closed, 2, str(tmp_path), end, timeout=30, deaths={0, 1})
    rings, problems = read_folder(tmp_path)
    assert not problems
    found = [each for each in analyse(rings) if each.communicator == rings[0].name]
    assert {each.kind for each in found} <= {"error", "different"}, found
    assert {ring.state for ring in rings if ring.error} == {"closed" if end == "close" else "aborted"}
    assert all(ring.error["kind"] == "Mismatch" for ring in rings if ring.error)
