"""Waits that run out, and calls ended from outside: time limits, abort, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.ranks import run_ranks

F32, SUM = 7, 0


def all_reduce(comm, x, stream=0):
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM, stream)


def late_rank(ctx, late):
    """Rank ``late`` never comes to the third collective: all others learn who, which call, and its size."""
    from collectives.errors import CollectiveTimeout

    comm = ctx.new_comm()
    x = np.ones(250, np.float32)
    all_reduce(comm, x)
    all_reduce(comm, x)
    comm.set_timeout(0.7)
    if ctx.rank == late:
        ctx.barrier()
        return None
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        all_reduce(comm, x)
    elapsed = time.monotonic() - start
    with pytest.raises(Exception) as after:  # the communicator is out of use: this rank has contributed already
        all_reduce(comm, x)
    ctx.barrier()
    comm.abort()
    return elapsed, caught.value, after.value


@pytest.mark.parametrize(("n", "late"), [(2, 1), (4, 2)])
def test_time_limit_of_a_communicator(n, late):
    from collectives.errors import CollectivesError

    for rank, result in enumerate(run_ranks(late_rank, n, late)):
        if rank == late:
            continue
        elapsed, error, after = result
        assert 0.6 < elapsed < 4
        assert error.op == "all_reduce"
        assert error.seq == 2
        assert error.nbytes == 1000
        assert error.rank == rank
        assert late in error.peers
        assert isinstance(error, TimeoutError)
        assert f"rank {late}" in str(error) or f"ranks {late}" in str(error)
        assert isinstance(after, CollectivesError)


def limit_taken_back(ctx):
    comm = ctx.new_comm()
    comm.set_timeout(0.2)
    comm.set_timeout(None)
    x = np.ones(4, np.float32)
    if ctx.rank == 1:
        time.sleep(0.8)
    all_reduce(comm, x)
    return x.tolist()


def test_no_limit_after_set_timeout_none():
    assert run_ranks(limit_taken_back, 2) == [[2.0] * 4] * 2


def queued_limit(ctx):
    from collectives.errors import CollectiveTimeout

    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    comm.set_timeout(0.5)
    x = np.ones(4, np.float32)
    if ctx.rank == 1:
        ctx.barrier()
        queue.close()
        return None
    all_reduce(comm, x, queue.handle)
    with pytest.raises(CollectiveTimeout) as caught:
        queue.wait(queue.record())
    ctx.barrier()
    queue.close()
    comm.abort()
    return caught.value


def test_time_limit_of_a_queued_call():
    error, _ = run_ranks(queued_limit, 2)
    assert error.peers == (1,)
    assert error.op == "all_reduce"


def work_wait_runs_out(ctx):
    """Work.wait(timeout) names who is missing, and the operation goes on and ends well."""
    import torch

    from collectives.errors import CollectiveTimeout

    comm = ctx.communicator()
    t = torch.full((100,), ctx.rank + 1.0)
    if ctx.rank == 1:
        ctx.barrier()
        work = comm.all_reduce(t, async_op=True)
        work.wait()
        return None, t[0].item()
    work = comm.all_reduce(t, async_op=True)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        work.wait(timeout=0.4)
    assert 0.3 < time.monotonic() - start < 3
    assert not work.done()
    ctx.barrier()
    work.wait(timeout=20)
    assert work.done()
    return caught.value, t[0].item()


def test_work_wait_that_runs_out_leaves_the_operation_in_flight():
    (error, first), (_, second) = run_ranks(work_wait_runs_out, 2)
    assert first == second == 3.0
    assert error.op == "all_reduce"
    assert error.peers == (1,)
    assert error.nbytes == 400


def abort_from_a_thread(ctx, what):
    """Rank 0 waits in a call; another of its threads aborts. Its peers learn who did it."""
    from collectives.errors import Aborted, RemoteError

    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    x = np.ones(1000, np.float32)
    calls = {
        "all_reduce": lambda: all_reduce(comm, x),
        "recv": lambda: comm.recv(x.ctypes.data, 1000, F32, 1),
        "queued": lambda: (all_reduce(comm, x, queue.handle), queue.wait(queue.record())),
    }
    if ctx.rank == 0:
        threading.Timer(0.3, comm.abort).start()
        start = time.monotonic()
        with pytest.raises(Aborted) as caught:
            calls[what]()
        elapsed = time.monotonic() - start
        ctx.barrier()
        queue.close()
        return elapsed, caught.value
    ctx.barrier()
    start = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        all_reduce(comm, x)  # rank 0 may have given its share to this one before it was aborted
        all_reduce(comm, x)
    queue.close()
    return time.monotonic() - start, caught.value


@pytest.mark.parametrize("what", ["all_reduce", "recv", "queued"])
def test_abort_from_another_thread(what):
    results = run_ranks(abort_from_a_thread, 3, what)
    elapsed, _ = results[0]
    assert elapsed < 2
    for elapsed, error in results[1:]:
        assert elapsed < 2
        assert error.peers == (0,)
        assert any(word in str(error).lower() for word in ("abort", "revoke"))


def abort_of_a_waiting_peer(ctx):
    """A peer that is already waiting is woken by the abort of another rank."""
    from collectives.errors import RemoteError

    comm = ctx.new_comm()
    if ctx.rank == 0:
        time.sleep(0.5)
        comm.abort()
        return 0.0
    start = time.monotonic()
    with pytest.raises(RemoteError):
        all_reduce(comm, np.ones(4, np.float32))
    return time.monotonic() - start


@pytest.mark.parametrize("n", [2, 4])
def test_abort_wakes_the_peers(n):
    assert max(run_ranks(abort_of_a_waiting_peer, n)) < 3


def abort_during_init(ctx):
    """A communicator whose ranks never come, opened without blocking, can be given up."""
    comm = ctx.library.comm_init_rank(2, ctx.library.get_unique_id(), 0, config={"blocking": 0})
    assert comm.async_error() == 7
    start = time.monotonic()
    comm.abort()
    return time.monotonic() - start


def test_abort_of_an_init_under_way():
    (elapsed,) = run_ranks(abort_during_init, 1)
    assert elapsed < 3


def interrupted(ctx, how):
    """SIGINT while waiting inside a call: KeyboardInterrupt, about as soon as the person lets go of the keys."""
    from collectives.errors import RemoteError

    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctx.library.set_interrupt_check(True)
    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    x = np.ones(10, np.float32)
    if ctx.rank == 1:
        ctx.barrier()
        if how == "blocking":  # rank 0 is out, after giving its share to the first call: this rank must not hang
            start = time.monotonic()
            with pytest.raises(RemoteError):
                all_reduce(comm, x)
                all_reduce(comm, x)
            assert time.monotonic() - start < 5
        else:  # what is queued goes on after the interrupt
            all_reduce(comm, x)
        return None
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        if how == "blocking":
            all_reduce(comm, x)
        else:
            all_reduce(comm, x, queue.handle)
            queue.wait(queue.record())
    elapsed = time.monotonic() - start
    ctx.barrier()
    if how == "queued":
        assert queue.wait(queue.record(), 20)
        assert x[0] == 2
    queue.close()
    return elapsed


@pytest.mark.parametrize("how", ["blocking", "queued"])
def test_ctrl_c_ends_a_waiting_rank(how):
    elapsed, _ = run_ranks(interrupted, 2, how, fresh=True)
    assert elapsed < 2


def interrupted_init(ctx):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctx.library.set_interrupt_check(True)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ctx.library.comm_init_rank(2, ctx.library.get_unique_id(), 0)
    return time.monotonic() - start


def test_ctrl_c_ends_an_init_that_waits():
    (elapsed,) = run_ranks(interrupted_init, 1, fresh=True)
    assert elapsed < 2


class Alarm(Exception):
    pass


def other_signal(ctx):
    """A handler that raises something else: that is what the waiting call raises; one that only counts ends nothing."""
    ctx.library.set_interrupt_check(True)
    counted = []
    comm = ctx.new_comm()
    x = np.ones(4, np.float32)

    def count(*_):
        counted.append(1)

    signal.signal(signal.SIGALRM, count)
    if ctx.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    else:
        time.sleep(0.8)
    all_reduce(comm, x)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if ctx.rank == 0:
        assert len(counted) >= 2
    assert x[0] == 2

    def raise_alarm(*_):
        raise Alarm("time is up")

    ctx.barrier()
    if ctx.rank == 1:
        ctx.barrier()
        return
    signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Alarm):
        all_reduce(comm, x)
    ctx.barrier()


def test_other_signal_handlers_run_too():
    run_ranks(other_signal, 2, fresh=True)


def serialised(ctx):
    """Calls on one communicator from two threads: each is whole, whichever comes first."""
    comm = ctx.new_comm()
    errors = []
    order = []

    def work(k):
        try:
            # The threads of all ranks must call in one order: the ranks agree on it by a lock that hands over in turn.
            for step in range(50):
                with turn:
                    turn.wait_for(lambda place=step * 2 + k: len(order) == place, timeout=20)
                    x = np.full(2000, ctx.rank + 1.0 + k, np.float32)
                    order.append(k)
                    turn.notify_all()
                    all_reduce(comm, x)
                want = sum(r + 1.0 + k for r in range(ctx.size))
                if not np.all(x == want):
                    errors.append((k, step, x[0], want))
        except Exception as error:
            errors.append(repr(error))

    turn = threading.Condition()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("n", [1, 3])
def test_two_threads_take_turns_on_one_communicator(n):
    assert run_ranks(serialised, n) == [[]] * n


def same_call_from_two_threads(ctx):
    """The same call from both threads without any order: the engine serialises, so every sum is whole."""
    comm = ctx.new_comm()
    wrong = []

    def work():
        for _ in range(200):
            x = np.full(3000, 1.0, np.float32)
            all_reduce(comm, x)
            if not np.all(x == ctx.size):
                wrong.append(x[:3].tolist())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong + run_cases(ctx, [Case("all_reduce", "float32", 10)], comm)


@pytest.mark.parametrize("n", [1, 3])
def test_the_same_call_from_three_threads(n):
    assert run_ranks(same_call_from_two_threads, n) == [[]] * n


def error_of(call):
    from collectives.errors import CollectivesError

    try:
        call()
    except CollectivesError as error:
        return error
    return None


def late(ctx, count, how):
    """Rank 0 gives up waiting for rank 1, which comes a second later and must not get rank 0's stale part."""
    comm = ctx.new_comm()
    x = np.ones(count, np.float32)
    if ctx.rank == 0:
        if how == "abort":
            threading.Timer(0.3, comm.abort).start()
        else:
            comm.set_timeout(0.3)
        error = error_of(lambda: all_reduce(comm, x))
        ctx.barrier()
    else:
        ctx.barrier()
        error = error_of(lambda: all_reduce(comm, x))
        assert (x == 1).all()
    if comm.handle:
        comm.abort()
    return type(error).__name__, getattr(error, "peers", None)


@pytest.mark.parametrize("count", [3, 300_000])
@pytest.mark.parametrize(("how", "raised"), [("time limit", "CollectiveTimeout"), ("abort", "Aborted")])
def test_who_comes_late_is_told(how, raised, count):
    first, second = run_ranks(late, 2, count, how, timeout=30)
    assert first[0] == raised
    assert second == ("RemoteError", (0,))
