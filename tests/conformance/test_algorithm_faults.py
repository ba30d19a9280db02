"""Ring and direct on real ranks where a rank calls something else, comes late, fails or dies."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from collectives.comm.algorithms import plan as plans
from collectives.errors import Aborted, CollectivesError, CollectiveTimeout, InvalidUsage, Mismatch, RemoteError
from tests.conformance.worlds import check
from tests.ranks import Died, run_ranks

KILLED = Died(signal=9, exitcode=0)


def mismatch(ctx, async_op):
    """One rank calls something else: an error on all ranks with a table, nothing written, and the next call is good."""
    comm, found, odd = ctx.communicator(), [], ctx.rank == 1
    x = torch.full((1000,), 7.0)
    before, how = x.clone(), {"async_op": async_op}
    for call, words in (
        (lambda: comm.all_reduce(x, algorithm="native" if odd else "ring", **how), ["all_reduce (ring)"]),
        (lambda: comm.all_reduce(x, algorithm="direct" if odd else "ring", **how), ["direct", "ring"]),
        (lambda: comm.all_reduce(x[: 999 if odd else 1000], algorithm="ring", **how), ["count=999", "count=1000"]),
        (lambda: comm.all_reduce(x, "max" if odd else "sum", algorithm="direct", **how), ["op=max", "op=sum"]),
        (lambda: comm.all_reduce(x.int() if odd else x, algorithm="ring", **how), ["float32", "int32"]),
    ):
        with pytest.raises(Mismatch) as caught:
            call().wait(30)
        text = str(caught.value)
        words += [f"rank {r}" for r in range(ctx.size)]
        found += [f"no {word} in {text}" for word in words if word not in text]
        wrong = (1,) if not odd else tuple(r for r in range(ctx.size) if r != 1)
        found += [f"peers {caught.value.peers}"] * (caught.value.peers != wrong)
        found += ["something was written"] * (not torch.equal(x, before))
        for algorithm in ("ring", "native", "direct"):
            comm.all_reduce(x, "avg", algorithm=algorithm)
        found += [f"afterwards: {x[:3]}"] * (not torch.equal(x, before))
    return found


@pytest.mark.parametrize("async_op", [False, True])
def test_mismatch(async_op):
    check(mismatch, "host", 3, async_op)


def dies(ctx, algorithm, async_op, victim):
    """The victim is killed while all ranks go on and on."""
    comm = ctx.new_communicator()
    x = torch.ones(1 << 18)
    comm.all_reduce(x, "max", algorithm=algorithm)
    if ctx.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        while time.monotonic() < begun + 30:
            work = comm.all_reduce(x, "max", algorithm=algorithm, async_op=async_op)
            if work is not None:
                work.wait(20)
    error = caught.value
    for again in (algorithm, "native"):  # at once, and not another hang
        with pytest.raises(Exception, match=f"rank {victim}|out of use"):
            comm.all_reduce(x, "max", algorithm=again)
    comm.abort()
    return error.peers, str(error)


@pytest.mark.parametrize(("algorithm", "async_op"), [("ring", True), ("direct", False)])
def test_a_dead_peer(algorithm, async_op):
    results = run_ranks(dies, 3, algorithm, async_op, 1, deaths={1}, timeout=40)
    assert results[1] == KILLED
    for peers, text in (results[0], results[2]):
        assert peers == (1,) and "rank 1" in text and "all_reduce" in text, text


def killed_between_steps(ctx):
    """The victim meets the others, and is gone before its first step."""
    comm = ctx.new_communicator()
    x = torch.ones(5000)
    comm.all_reduce(x, algorithm="ring")
    if ctx.rank == 0:
        plans.ExecutionPlan.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RemoteError) as caught:
        comm.all_reduce(x, algorithm="ring")
    with pytest.raises(CollectivesError):
        comm.all_reduce(x, algorithm="direct")
    comm.abort()
    return caught.value.peers, caught.value.op


def test_a_peer_that_dies_between_steps():
    results = run_ranks(killed_between_steps, 3, deaths={0}, timeout=40, fresh=True)
    assert [r for r in results if r != KILLED] == [((0,), "all_reduce by ring")] * 2


def fails_in_a_step(ctx):
    """A kernel that fails on one rank: the others don't wait for it, and all say so from then on."""
    comm = ctx.new_communicator()
    x = torch.ones(5000)
    comm.all_reduce(x, algorithm="ring")
    real = plans.run_kernel

    def fails(*_):
        raise MemoryError("made up")

    if ctx.rank == 1:
        plans.run_kernel = fails
    try:
        with pytest.raises(MemoryError if ctx.rank == 1 else RemoteError) as caught:
            comm.all_reduce(x, algorithm="ring")
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        with pytest.raises(InvalidUsage, match="out of use since an earlier call failed"):
            work.wait(20)
    finally:
        plans.run_kernel = real
    y = torch.ones(5)
    comm.all_reduce(y)  # the communicator itself goes on
    comm.close()
    return [] if y.tolist() == [ctx.size] * 5 and caught else ["native"]


def test_a_step_that_fails_on_one_rank():
    check(fails_in_a_step, "host", 3)


def times_out(ctx, async_op):
    comm = ctx.new_communicator(timeout=1.0)
    x = torch.ones(100)
    comm.all_reduce(x, "max", algorithm="ring")
    told = None
    if ctx.rank == 0:
        with pytest.raises(CollectiveTimeout) as caught:
            work = comm.all_reduce(x, algorithm="ring", async_op=async_op)
            work.wait()
        told = caught.value.peers
        with pytest.raises(CollectivesError):
            comm.all_reduce(x, algorithm="ring")
    ctx.barrier()
    comm.abort()
    return told


@pytest.mark.parametrize("async_op", [False, True])
def test_the_time_limit_holds(async_op):
    assert run_ranks(times_out, 2, async_op)[0] == (1,)


def aborted(ctx):
    """An abort ends a step that waits: rank 1 has met rank 0 and does no step."""
    comm = ctx.new_communicator()
    x = torch.ones(100)
    comm.all_reduce(x, "max", algorithm="ring")
    real = plans.ExecutionPlan.run
    if ctx.rank == 1:
        plans.ExecutionPlan.run = lambda *_: None
    try:
        work = comm.all_reduce(x, algorithm="ring", async_op=True)
        if ctx.rank == 0:
            while comm._native.pending() or not comm._algorithms.pending():
                time.sleep(0.01)
            comm.abort()
            with pytest.raises((Aborted, CollectivesError)) as caught:
                work.wait(10)
            assert isinstance(caught.value, Aborted), repr(caught.value)
        ctx.barrier()
        if ctx.rank:
            work.wait(10)
            comm.abort()
    finally:
        plans.ExecutionPlan.run = real
    return []


def test_abort_ends_a_step():
    check(aborted, "host", 2)


def error_in_a_child(ctx):
    comm = ctx.new_communicator()
    comm.all_reduce(torch.ones(8), algorithm="ring")
    child = os.fork()
    if not child:
        try:
            with comm:
                raise KeyError
        except KeyError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    comm.close()
    return os.waitstatus_to_exitcode(status)


def test_an_error_in_a_forked_child_comes_out_of_the_block():
    assert run_ranks(error_in_a_child, 2) == [0, 0]
