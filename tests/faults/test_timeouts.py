"""Waits that run out, and calls ended from outside: time limits, abort, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.rank_process import open_ranks
from tests.ranks import run_ranks

F32, SUM = 7, 0


def all_reduce(comm, x, stream=0):
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM, stream)


def raised(kind, call):
    """Make the call, which must raise an error of this kind; give the seconds and the error."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    return time.monotonic() - start, caught.value


def late_rank(ctx, late):
    """Rank ``late`` never comes to the third collective: all others learn who, which call, and its size."""
    from collectives.errors import CollectivesError, CollectiveTimeout

    comm = ctx.new_comm()
    x = np.ones(250, np.float32)
    all_reduce(comm, x)
    all_reduce(comm, x)
    comm.set_timeout(0.7)
    found = None
    if ctx.rank != late:
        found = raised(CollectiveTimeout, lambda: all_reduce(comm, x))
        # The communicator is out of use: this rank has contributed already.
        raised(CollectivesError, lambda: all_reduce(comm, x))
    ctx.barrier()
    comm.abort()
    return found


def test_time_limit_of_a_communicator():
    for rank, result in enumerate(run_ranks(late_rank, 4, 2)):
        if rank != 2:
            elapsed, error = result
            assert 0.6 < elapsed < 4 and isinstance(error, TimeoutError)
            assert (error.op, error.seq, error.nbytes, error.rank) == ("all_reduce", 2, 1000, rank)
            assert 2 in error.peers and ("rank 2" in str(error) or "ranks 2" in str(error))


def other_limits(ctx):
    """A limit that is taken back; one of a queued call; and one of a wait, whose operation stays in flight."""
    import torch

    from collectives.errors import CollectiveTimeout

    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    x = np.ones(4, np.float32)
    comm.set_timeout(0.2)
    comm.set_timeout(None)
    time.sleep(0.8 * ctx.rank)
    all_reduce(comm, x)
    assert x.tolist() == [2.0] * 4
    found = []
    comm.set_timeout(0.5)
    if ctx.rank == 0:
        all_reduce(comm, x, queue.handle)
        found.append(raised(CollectiveTimeout, lambda: queue.wait(queue.record()))[1])
    ctx.barrier()
    queue.close()
    comm.abort()

    comm = ctx.communicator()
    t = torch.full((100,), ctx.rank + 1.0)
    if ctx.rank == 0:
        work = comm.all_reduce(t, async_op=True)
        elapsed, error = raised(CollectiveTimeout, lambda: work.wait(timeout=0.4))
        assert 0.3 < elapsed < 3 and not work.done() and error.nbytes == 400
        found.append(error)
    ctx.barrier()
    if ctx.rank == 1:
        work = comm.all_reduce(t, async_op=True)
    work.wait(timeout=20)
    assert work.done() and t[0].item() == 3.0
    return [(error.op, error.peers) for error in found]


def test_limits_of_queued_calls_and_of_waits():
    assert run_ranks(other_limits, 2) == [[("all_reduce", (1,))] * 2, []]


def aborts(ctx):
    """Rank 0 waits in a call; another of its threads aborts. Its peers learn who did it, later or while they wait."""
    from collectives.errors import Aborted, RemoteError

    queue, found = ctx.library.queue_create(), []
    x = np.ones(1000, np.float32)
    calls = {
        "all_reduce": all_reduce,
        "recv": lambda comm, x: comm.recv(x.ctypes.data, 1000, F32, 1),
        "queued": lambda comm, x: (all_reduce(comm, x, queue.handle), queue.wait(queue.record())),
    }
    for call in calls.values():
        comm = ctx.new_comm()
        if ctx.rank == 0:
            threading.Timer(0.3, comm.abort).start()
            found.append(raised(Aborted, lambda: call(comm, x)))  # noqa: B023
            ctx.barrier()
            continue
        ctx.barrier()
        # Rank 0 may have given its share to the first one before it was aborted.
        found.append(raised(RemoteError, lambda: (all_reduce(comm, x), all_reduce(comm, x))))  # noqa: B023
    queue.close()
    comm = ctx.new_comm()
    if ctx.rank == 0:
        time.sleep(0.3)
        comm.abort()
        # A communicator whose ranks never come, opened without blocking, can be given up.
        alone = ctx.library.comm_init_rank(2, ctx.library.get_unique_id(), 0, config={"blocking": 0})
        assert alone.async_error() == 7
        alone.abort()
    else:
        found.append(raised(RemoteError, lambda: all_reduce(comm, x)))
    return found


def test_abort_from_another_thread_and_of_a_waiting_peer():
    results = run_ranks(aborts, 3)
    assert [len(result) for result in results] == [3, 4, 4]
    assert all(elapsed < 2 for result in results for elapsed, _ in result)
    for _, error in results[1] + results[2]:
        assert error.peers == (0,)
        assert any(word in str(error).lower() for word in ("abort", "revoke"))


class Alarm(Exception):
    pass


def signals(ctx):
    """Ctrl-C while rank 0 waits is KeyboardInterrupt, about as soon as the person lets go of the keys, and one is
    enough, however many communicators the call waits for. Gives the seconds of each.
    """
    from collectives.errors import RemoteError

    signal.signal(signal.SIGINT, signal.default_int_handler)
    library = ctx.library
    library.set_interrupt_check(True)
    comms, queue = [ctx.new_comm() for _ in range(3)], library.queue_create()
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    a, b = open_ranks(library, 2), open_ranks(library, 2)  # of this process alone

    def in_a_group():
        library.group_start()
        all_reduce(a[0], x)
        all_reduce(b[0], y)
        library.group_end()

    calls = {
        "blocking": lambda: all_reduce(comms[0], x),
        "queued": lambda: (all_reduce(comms[1], y, queue.handle), queue.wait(queue.record())),
        "init": lambda: library.comm_init_rank(2, library.get_unique_id(), 0),
        "group": in_a_group,
        "its turn": lambda: (all_reduce(a[0], x, queue.handle), all_reduce(a[0], y)),
    }
    seconds = {}
    if ctx.rank == 0:
        for what, call in calls.items():
            if what == "its turn":  # the communicators of a group that was interrupted are out of use
                for comm in (*a, *b):
                    comm.abort()
                a = open_ranks(library, 2)
            threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
            seconds[what] = raised(KeyboardInterrupt, call)[0]
            if what in ("blocking", "queued"):
                ctx.barrier()
            if what == "queued":  # what is queued goes on after the interrupt
                assert queue.wait(queue.record(), 20) and y[0] == 2
    else:
        ctx.barrier()
        # Rank 0 is out, after giving its share to the first call: this rank must not hang.
        assert raised(RemoteError, lambda: (all_reduce(comms[0], x), all_reduce(comms[0], x)))[0] < 5
        ctx.barrier()
        all_reduce(comms[1], y)
    for comm in (*a, *b):
        if comm.handle:
            comm.abort()
    queue.close()
    other_handlers(ctx, comms[2])
    return seconds


def other_handlers(ctx, comm):
    """A handler that raises something else: that is what the waiting call raises; one that only counts ends nothing."""
    counted, x = [], np.ones(4, np.float32)

    def raise_alarm(*_):
        raise Alarm("time is up")

    signal.signal(signal.SIGALRM, lambda *_: counted.append(1))
    ctx.barrier()
    if ctx.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    else:
        time.sleep(0.8)
    all_reduce(comm, x)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert x[0] == 2 and (ctx.rank == 1 or len(counted) >= 2)
    ctx.barrier()
    if ctx.rank == 0:
        signal.signal(signal.SIGALRM, raise_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        raised(Alarm, lambda: all_reduce(comm, x))
    ctx.barrier()


def test_signals_end_waits():
    seconds, _ = run_ranks(signals, 2, fresh=True)
    assert len(seconds) == 5 and max(seconds.values()) < 2, seconds


def all_interrupted(ctx, gaps):
    """Rank 2 sends both the signal. Rank 0, which computes, ends the communicator at once; rank 1 waits for it."""
    kinds = []
    for gap in gaps:
        comm = ctx.new_communicator()
        if ctx.rank == 2:
            ctx.barrier()
            time.sleep(0.2)
            for pid in ctx.pids[:2]:
                os.kill(pid, signal.SIGINT)
                time.sleep(gap)
        else:
            try:
                ctx.barrier()
                if ctx.rank == 0:
                    time.sleep(20)
                comm.all_reduce(np.ones(10, dtype="float32"))
            except BaseException as error:
                kinds.append(type(error).__name__)
                comm.abort()
        ctx.barrier()
        comm.abort()
    return kinds


def test_ctrl_c_on_all_ranks_is_an_interrupt_on_each():
    gaps = [0.0, 0.001, 0.0, 0.02]
    assert run_ranks(all_interrupted, 3, gaps)[:2] == [["KeyboardInterrupt"] * len(gaps)] * 2


def on_threads(count, work) -> list:
    """Call ``work(number, wrong)`` on some threads at once; give what they have found wrong."""
    wrong = []

    def run(number):
        try:
            work(number, wrong)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def threads_on_one_communicator(ctx):
    """Calls on one communicator from several threads: each is whole, whichever comes first."""
    comm, turn, order = ctx.new_comm(), threading.Condition(), []

    def in_turn(number, wrong):
        # The threads of all ranks must call in one order: the ranks agree on it by a lock that hands over in turn.
        for step in range(50):
            with turn:
                turn.wait_for(lambda place=step * 2 + number: len(order) == place, timeout=20)
                x = np.full(2000, ctx.rank + 1.0 + number, np.float32)
                order.append(number)
                turn.notify_all()
                all_reduce(comm, x)
            if not np.all(x == sum(rank + 1.0 + number for rank in range(ctx.size))):
                wrong.append((number, step, x[0]))

    def the_same(number, wrong):
        for _ in range(100):
            x = np.full(3000, 1.0, np.float32)
            all_reduce(comm, x)
            if not np.all(x == ctx.size):
                wrong.append(x[:3].tolist())

    wrong = on_threads(2, in_turn) + on_threads(3, the_same)
    return wrong + run_cases(ctx, [Case("all_reduce", "float32", 10)], comm)


@pytest.mark.parametrize("n", [1, 3])
def test_threads_on_one_communicator(n):
    assert run_ranks(threads_on_one_communicator, n) == [[]] * n


def late(ctx):
    """Rank 0 gives up waiting for rank 1, which comes a moment later and must not get rank 0's stale part."""
    from collectives.errors import CollectivesError

    found = []
    for count in (3, 300_000):
        for how in ("time limit", "abort"):
            comm = ctx.new_comm()
            x = np.ones(count, np.float32)
            if ctx.rank == 0 and how == "abort":
                threading.Timer(0.3, comm.abort).start()
            elif ctx.rank == 0:
                comm.set_timeout(0.3)
            else:
                ctx.barrier()
            _, error = raised(CollectivesError, lambda: all_reduce(comm, x))  # noqa: B023
            if ctx.rank == 0:
                ctx.barrier()
            else:
                assert (x == 1).all()
            found.append((type(error).__name__, error.peers if ctx.rank else None))
            if comm.handle:
                comm.abort()
    return found


def test_who_comes_late_is_told():
    first, second = run_ranks(late, 2, timeout=30)
    assert first == [("CollectiveTimeout", None), ("Aborted", None)] * 2
    assert second == [("RemoteError", (0,))] * 4
