"""A rank's process ends in the middle of things: the survivors get RemoteError naming it, soon, and can go on.

Deaths in the midst of random programs: test_campaign.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.ranks import Died, run_ranks

F32, SUM = 7, 0
SOON = 5.0  # seconds: what the project promises


def remote_error(call):
    """Make the call, which must raise RemoteError; how long that took, and the error."""
    from collectives.errors import RemoteError

    start = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        call()
    return time.monotonic() - start, caught.value


def all_reduce(comm, x, stream=0):
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM, stream)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def expect(found, rank, victim, op=None):
    """A rank has been told soon that the victim, and no other rank, is dead."""
    elapsed, error = found
    assert elapsed < SOON, f"rank {rank} noticed after {elapsed:.1f} s"
    assert error.peers == (victim,), f"rank {rank}: peers {error.peers}: {error}"
    assert error.rank == rank and f"rank {victim}" in str(error)
    assert op is None or error.op == op, error.op


def killed_while_others_wait(ctx, victim):
    """Each call waits on a communicator and in a thread of its own. Gives what was raised, by the call."""
    library = ctx.library
    x, y = np.ones(9000, np.float32), np.ones(9000 * ctx.size, np.float32)
    a, b, n = x.ctypes.data, y.ctypes.data, 9000
    turned = ctx.new_comm().split(0, -ctx.rank)
    queue = library.queue_create()

    def queued(comm):
        for _ in range(3):
            all_reduce(comm, x, queue.handle)
        first = remote_error(lambda: queue.wait(1))
        for ticket in (2, 3):  # what was queued behind it fails too
            remote_error(lambda t=ticket: queue.wait(t))
        raise first[1]

    def group(comm):
        """Over two communicators, with transfers: the death is seen whatever the group is waiting for."""
        library.group_start()
        turned.send(a, n, F32, (turned.rank + 1) % turned.size)
        turned.recv(b, n, F32, (turned.rank - 1) % turned.size)
        all_reduce(comm, x)
        library.group_end()

    calls = {
        "all_reduce": lambda comm: all_reduce(comm, x),
        "broadcast": lambda comm: comm.broadcast(a, a, n, F32, victim),
        "all_gather": lambda comm: comm.all_gather(a, b, n, F32),
        "recv": lambda comm: comm.recv(a, n, F32, victim),
        "send": lambda comm: comm.send(a, n, F32, victim),
        "comm_split": lambda comm: comm.split(0, 0),
        "queued": queued,
        "group": group,
    }
    comms = {what: ctx.new_comm() for what in calls}
    ctx.barrier()
    if ctx.rank == victim:
        time.sleep(0.3)
        kill_myself()
    found = {}

    def make(what):
        found[what] = remote_error(lambda: calls[what](comms[what]))

    threads = [threading.Thread(target=make, args=[what]) for what in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for comm in comms.values():  # and every call after it, at once
        assert remote_error(lambda c=comm: all_reduce(c, x))[0] < 1.0
    queue.close()
    return found


def test_killed_while_others_wait():
    results = run_ranks(killed_while_others_wait, 3, 1, deaths={1})
    for rank in (0, 2):
        assert len(results[rank]) == 8, results[rank].keys()
        for what, found in results[rank].items():
            op = {"queued": "all_reduce", "group": None}.get(what, what)
            if what == "group":  # the victim is rank 1 of both communicators, of which one has the ranks turned
                assert found[0] < SOON and found[1].peers == (1,)
            else:
                expect(found, rank, 1, op)


def leaves_early(ctx, victim, how, flags):
    comm = ctx.new_comm()
    x = np.ones(10, np.float32)
    all_reduce(comm, x)
    if ctx.rank == victim:
        if how == "destroy":
            comm.destroy()
            time.sleep(2)
        if how == "kill":
            kill_myself()
        os._exit(3)
    error = remote_error(lambda: all_reduce(comm, x))
    smaller = comm.shrink([victim], flags=flags)
    found = run_cases(ctx, [Case("all_reduce", "float32", 5000, op="avg"), Case("all_gather", "int8", 7)], smaller)
    facts = smaller.rank, smaller.size, found
    smaller.destroy()
    comm.abort()
    return error, facts


@pytest.mark.parametrize(("n", "victim", "how", "flags"), [(2, 1, "exit", 1), (4, 0, "destroy", 0), (3, 2, "kill", 0)])
def test_a_rank_that_leaves_early(n, victim, how, flags):
    """Then the others shrink. flags=1 is NCCL_SHRINK_ABORT: end what the parent has in flight first."""
    results = run_ranks(leaves_early, n, victim, how, flags, deaths={victim})
    assert results[victim] == (Died(signal=9, exitcode=0) if how == "kill" else Died(signal=0, exitcode=3))
    for number, rank in enumerate(rank for rank in range(n) if rank != victim):
        error, facts = results[rank]
        expect(error, rank, victim, "all_reduce")
        assert facts == (number, n - 1, [])


def death_elsewhere(ctx):
    """A death in one part of a split is nothing to the other part."""
    comm = ctx.new_comm()
    part = comm.split(ctx.rank // 2, 0)
    if ctx.rank == 3:
        kill_myself()
    if ctx.rank == 2:
        return remote_error(lambda: all_reduce(part, np.ones(10, np.float32)))
    time.sleep(0.5)
    return run_cases(ctx, [Case("all_reduce", "float32", 5000)] * 20, part)


def test_the_other_part_of_a_split_goes_on():
    results = run_ranks(death_elsewhere, 4, deaths={3})
    assert results[0] == results[1] == []
    elapsed, error = results[2]
    assert elapsed < SOON
    assert error.peers == (1,)  # in the numbers of the part


def stopped_is_not_dead(ctx):
    """A process that was stopped (Ctrl-Z, a debugger) is waited for, however long it takes."""
    comm = ctx.new_comm()
    x = np.ones(10, np.float32)
    if ctx.rank == 0:
        os.kill(ctx.pids[1], signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (ctx.pids[1], signal.SIGCONT)).start()
    else:
        time.sleep(0.3)  # stopped in here
    all_reduce(comm, x)
    comm.destroy()
    return x[0].item()


def test_a_stopped_process_is_not_a_dead_one():
    assert run_ranks(stopped_is_not_dead, 2) == [2.0, 2.0]


def two_deaths(ctx):
    comm = ctx.new_comm()
    if ctx.rank in (1, 3):
        kill_myself()
    time.sleep(0.5)
    return remote_error(lambda: all_reduce(comm, np.ones(10, np.float32)))


def test_two_deaths_are_both_named():
    results = run_ranks(two_deaths, 4, deaths={1, 3})
    for rank in (0, 2):
        elapsed, error = results[rank]
        assert elapsed < SOON
        assert error.peers == (1, 3)


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
