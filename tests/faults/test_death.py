"""A rank's process ends in the middle of things: the survivors get RemoteError naming it, soon, and can go on."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.ranks import Died, run_ranks

F32, SUM, MAX = 7, 0, 2
SOON = 5.0  # seconds: what the project promises
KILLED = Died(signal=9, exitcode=0)


def remote_error(call):
    """Make the call, which must raise RemoteError; how long that took, and the error."""
    from collectives.errors import RemoteError

    start = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        call()
    return time.monotonic() - start, caught.value


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def expect(results, victim, op=None, who=None):
    for rank, result in enumerate(results):
        if rank == victim:
            assert isinstance(result, Died)
            continue
        if who is not None and rank not in who:
            continue
        elapsed, error = result
        assert elapsed < SOON, f"rank {rank} noticed after {elapsed:.1f} s"
        assert error.peers == (victim,), f"rank {rank}: peers {error.peers}: {error}"
        assert error.rank == rank
        assert f"rank {victim}" in str(error)
        assert op is None or error.op == op, error.op


def killed_in_the_middle(ctx, victim, nbytes):
    """The victim is killed from outside of the call by a timer while all ranks reduce a large array again and again."""
    comm = ctx.new_comm()
    x = np.ones(nbytes // 4, np.float32)

    def forever():
        while True:
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, MAX)

    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, MAX)
    if ctx.rank == victim:
        threading.Timer(0.4, kill_myself).start()
        forever()
    begin = time.monotonic()
    _, error = remote_error(forever)
    return max(0.0, time.monotonic() - begin - 0.4), error


@pytest.mark.parametrize("nbytes", [64, 8 << 20])
@pytest.mark.parametrize(("n", "victim"), [(2, 0), (4, 2)])
def test_killed_in_the_middle_of_all_reduces(n, victim, nbytes):
    results = run_ranks(killed_in_the_middle, n, victim, nbytes, deaths={victim})
    assert results[victim] == KILLED
    expect(results, victim, "all_reduce")


def killed_while_others_wait(ctx, victim, what):
    comm = ctx.new_comm()
    x, y = np.ones(1000, np.float32), np.ones(1000 * ctx.size, np.float32)
    a, b = x.ctypes.data, y.ctypes.data
    if ctx.rank == victim:
        time.sleep(0.3)
        kill_myself()
    calls = {
        "all_reduce": lambda: comm.all_reduce(a, a, 1000, F32, SUM),
        "broadcast": lambda: comm.broadcast(a, a, 1000, F32, victim),
        "all_gather": lambda: comm.all_gather(a, b, 1000, F32),
        "recv": lambda: comm.recv(a, 1000, F32, victim),
        "send": lambda: comm.send(a, 1000, F32, victim),
        "split": lambda: comm.split(0, 0),
    }
    result = remote_error(calls[what])
    again, _ = remote_error(calls["all_reduce"])  # and every call after it, at once
    assert again < 1.0
    return result


@pytest.mark.parametrize("what", ["all_reduce", "broadcast", "all_gather", "recv", "send", "split"])
def test_killed_while_others_wait(what):
    results = run_ranks(killed_while_others_wait, 3, 1, what, deaths={1})
    expect(results, 1, "comm_split" if what == "split" else what)


def killed_while_queued(ctx, victim):
    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    if ctx.rank == victim:
        time.sleep(0.3)
        kill_myself()
    x = np.ones(1000, np.float32)
    for _ in range(3):
        comm.all_reduce(x.ctypes.data, x.ctypes.data, 1000, F32, SUM, queue.handle)
    result = remote_error(lambda: queue.wait(1))
    for ticket in (2, 3):  # what was queued behind it fails too
        remote_error(lambda t=ticket: queue.wait(t))
    queue.close()
    return result


def test_killed_while_others_wait_for_a_queue():
    results = run_ranks(killed_while_queued, 3, 2, deaths={2})
    expect(results, 2, "all_reduce")


def ends_early(ctx, victim, how):
    comm = ctx.new_comm()
    x = np.ones(10, np.float32)
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)
    if ctx.rank == victim:
        if how == "destroy":
            comm.destroy()
            time.sleep(2)
        os._exit(3 if how == "exit" else 0)
    return remote_error(lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM))


@pytest.mark.parametrize("how", ["exit", "destroy"])
@pytest.mark.parametrize(("n", "victim"), [(2, 0), (3, 2)])
def test_a_rank_that_leaves_early(n, victim, how):
    results = run_ranks(ends_early, n, victim, how, deaths={victim})
    expect(results, victim, "all_reduce")


def go_on_without(ctx, victim, flags):
    comm = ctx.new_comm()
    x = np.ones(10, np.float32)
    if ctx.rank == victim:
        kill_myself()
    remote_error(lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM))
    smaller = comm.shrink([victim], flags=flags)
    found = run_cases(ctx, [Case("all_reduce", "float32", 5000, op="avg"), Case("all_gather", "int8", 7)], smaller)
    facts = smaller.rank, smaller.size
    smaller.destroy()
    comm.abort()
    return facts, found


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize(("n", "victim"), [(2, 1), (4, 0)])
def test_shrink_after_a_death(n, victim, flags):
    """flags=1 is NCCL_SHRINK_ABORT: end what the parent has in flight first."""
    results = run_ranks(go_on_without, n, victim, flags, deaths={victim})
    survivors = [r for r in range(n) if r != victim]
    for number, rank in enumerate(survivors):
        facts, found = results[rank]
        assert facts == (number, n - 1)
        assert not found


def death_elsewhere(ctx):
    """A death in one part of a split is nothing to the other part."""
    comm = ctx.new_comm()
    part = comm.split(ctx.rank // 2, 0)
    if ctx.rank == 3:
        kill_myself()
    if ctx.rank == 2:
        return remote_error(lambda: run_cases_raising(ctx, part))
    time.sleep(0.5)
    return run_cases(ctx, [Case("all_reduce", "float32", 5000)] * 20, part)


def run_cases_raising(ctx, comm):
    x = np.ones(10, np.float32)
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)


def test_the_other_part_of_a_split_goes_on():
    results = run_ranks(death_elsewhere, 4, deaths={3})
    assert results[0] == results[1] == []
    elapsed, error = results[2]
    assert elapsed < SOON
    assert error.peers == (1,)  # in the numbers of the part


def killed_in_a_group(ctx, victim):
    """A group over two communicators, with transfers: the death is seen whatever the group is waiting for."""
    whole = ctx.new_comm()
    turned = whole.split(0, -ctx.rank)
    if ctx.rank == victim:
        time.sleep(0.3)
        kill_myself()
    x, y = np.ones(9000, np.float32), np.ones(9000, np.float32)
    me = turned.rank

    def group():
        ctx.library.group_start()
        turned.send(x.ctypes.data, 9000, F32, (me + 1) % turned.size)
        turned.recv(y.ctypes.data, 9000, F32, (me - 1) % turned.size)
        whole.all_reduce(x.ctypes.data, x.ctypes.data, 9000, F32, SUM)
        ctx.library.group_end()

    elapsed, error = remote_error(group)
    return elapsed, error.peers


def test_killed_while_others_wait_in_a_group():
    results = run_ranks(killed_in_a_group, 3, 1, deaths={1})
    for rank in (0, 2):  # the victim is rank 1 of both communicators
        elapsed, peers = results[rank]
        assert elapsed < SOON
        assert peers == (1,)


def stopped_is_not_dead(ctx):
    """A process that was stopped (Ctrl-Z, a debugger) is waited for, however long it takes."""
    comm = ctx.new_comm()
    x = np.ones(10, np.float32)
    pids = ctx.exchange(os.getpid())
    if ctx.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (pids[1], signal.SIGCONT)).start()
    else:
        time.sleep(0.3)  # stopped in here
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)
    comm.destroy()
    return x[0].item()


def test_a_stopped_process_is_not_a_dead_one():
    assert run_ranks(stopped_is_not_dead, 2) == [2.0, 2.0]


def two_deaths(ctx):
    comm = ctx.new_comm()
    if ctx.rank in (1, 3):
        kill_myself()
    time.sleep(0.5)
    x = np.ones(10, np.float32)
    return remote_error(lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM))


def test_two_deaths_are_both_named():
    results = run_ranks(two_deaths, 4, deaths={1, 3})
    for rank in (0, 2):
        elapsed, error = results[rank]
        assert elapsed < SOON
        assert error.peers == (1, 3)


def high_level(ctx, victim):
    import torch

    from collectives.errors import RemoteError

    comm = ctx.new_communicator()
    t = torch.ones(1000)
    comm.all_reduce(t)
    if ctx.rank == victim:
        kill_myself()
    start = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        comm.all_reduce(t)
    with pytest.raises(RemoteError):
        comm.all_reduce(t, async_op=True).wait()
    comm.abort()
    return time.monotonic() - start, caught.value


def test_communicator_names_the_dead_rank():
    results = run_ranks(high_level, 3, 1, deaths={1})
    expect(results, 1, "all_reduce")


def leave_early(ctx):
    """Ranks that have done their part of a gather go at once, while its root still waits for others."""
    comm = ctx.comm()
    count = 100_000
    x, out = np.full(count, ctx.rank, np.float32), np.empty(count * ctx.size, np.float32)
    for _ in range(30):
        child = comm.split(0, ctx.rank)
        child.gather(x.ctypes.data, out.ctypes.data, count, 7, 2)
        child.destroy()
        assert ctx.rank != 2 or (out.reshape(ctx.size, count)[:, 0] == np.arange(ctx.size)).all()


def test_who_has_done_its_part_may_leave():
    run_ranks(leave_early, 4, timeout=60)
