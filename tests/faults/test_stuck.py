"""Getting out of a tangle: aborts and interrupts while several things wait for each other, groups given up half way,
shrinks and splits after partial failures, deaths while ranks meet again."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.rank_process import open_ranks
from tests.ranks import Died, run_ranks

F32, SUM = 7, 0
SOON = 5.0


def all_reduce(comm, x, stream=0):
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM, stream)


def timed(call) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def error_of(call):
    try:
        call()
    except BaseException as error:
        return error
    return None


def split_given_up(ctx, how):
    """A split inside a group that is dropped leaves nothing behind in the parent."""
    comm, library = ctx.new_comm(), ctx.library
    x = np.ones(10, np.float32)
    library.group_start()
    comm.split(0, 0)
    if how == "cancel":
        library.group_cancel()
    elif how == "refused call":
        assert error_of(lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, 99, SUM)) is not None
        assert error_of(library.group_end) is not None
    else:
        all_reduce(comm, x)
        error_of(library.group_end)  # communicators and operations in one group: refused, or both are carried out
        x[:] = 1
    all_reduce(comm, x)
    part = comm.split(0, 0)
    found = run_cases(ctx, [Case("all_reduce", "float32", 100)], part)
    part.destroy()
    comm.destroy()
    return found if x[0] == ctx.size else [f"{x[0]}"]


@pytest.mark.parametrize("how", ["cancel", "refused call", "with an operation"])
@pytest.mark.parametrize("n", [1, 2])
def test_split_in_a_group_that_is_given_up(n, how):
    assert run_ranks(split_given_up, n, how, timeout=30) == [[]] * n


def aborts_in_any_order(ctx, how):
    """Operations of two communicators wait, one behind the other; both can be aborted, the one behind first."""
    library = ctx.library
    a, b = open_ranks(library, 2), open_ranks(library, 2)
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    queue = library.queue_create()
    ended = []
    if how == "one queue":
        all_reduce(b[0], x, queue.handle)
        all_reduce(a[0], y, queue.handle)
        waiter = threading.Thread(target=lambda: ended.extend(error_of(lambda t=t: queue.wait(t)) for t in (1, 2)))
    else:
        if how == "group behind a queue":
            all_reduce(b[0], x, queue.handle)

        def group():
            library.group_start()
            all_reduce(a[0], x)
            all_reduce(b[0], y)
            ended.append(error_of(library.group_end))

        waiter = threading.Thread(target=group)
    waiter.start()
    time.sleep(0.2)
    spent = [timed(comm.abort) for comm in (a[0], b[0])]
    waiter.join(10)
    alive = waiter.is_alive()
    for comm in (a[1], b[1]):
        comm.abort()
    queue.close()
    return max(spent), alive, repr(ended)


@pytest.mark.parametrize("how", ["one queue", "one group", "group behind a queue"])
def test_abort_of_what_waits_behind_something_else(how):
    ((spent, alive, ended),) = run_ranks(aborts_in_any_order, 1, how, timeout=30, fresh=True)
    assert spent < 3
    assert not alive
    assert "Aborted" in ended


def interrupted_once(ctx, how):
    """One Ctrl-C is enough, however many communicators the call waits for, and also while it waits for its turn."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    library = ctx.library
    library.set_interrupt_check(True)
    a, b = open_ranks(library, 2), open_ranks(library, 2)
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    queue = library.queue_create()
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        if how == "group":
            library.group_start()
            all_reduce(a[0], x)
            all_reduce(b[0], y)
            library.group_end()
        else:
            all_reduce(a[0], x, queue.handle)
            all_reduce(a[0], y)
    spent = time.monotonic() - start
    for comm in (*a, *b):
        comm.abort()
    queue.close()
    return spent


@pytest.mark.parametrize("how", ["group", "turn"])
def test_one_interrupt_is_enough(how):
    (spent,) = run_ranks(interrupted_once, 1, how, timeout=20, fresh=True)
    assert spent < 3


def shrink_after_different_failures(ctx):
    """Rank 2 is gone; rank 0 notices it in a split, rank 1 in an all-reduce: they can still shrink together."""
    comm = ctx.new_comm()
    if ctx.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(10, np.float32)
    ctx.library.set_init_timeout(8.0)
    error = error_of((lambda: comm.split(0, 0)) if ctx.rank == 0 else (lambda: all_reduce(comm, x)))
    smaller = comm.shrink([2])
    found = run_cases(ctx, [Case("all_reduce", "float32", 100)], smaller)
    smaller.destroy()
    comm.abort()
    ctx.library.set_init_timeout(60.0)
    return type(error).__name__, found


def test_shrink_after_ranks_failed_in_different_calls():
    results = run_ranks(shrink_after_different_failures, 3, timeout=30, deaths={2})
    # Unlike calls and a death at once: a rank reports what it sees first.
    assert all(name in ("RemoteError", "Mismatch") and found == [] for name, found in results[:2]), results


def second_death(ctx):
    """Rank 3 is dead, rank 2 dies instead of shrinking: the others' shrink fails soon, and the next one works."""
    comm = ctx.new_comm()
    x = np.ones(10, np.float32)
    if ctx.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(lambda: all_reduce(comm, x))
    ctx.barrier(ranks=[0, 1, 2])
    if ctx.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    second = error_of(lambda: comm.shrink([3]))
    spent = time.monotonic() - start
    smaller = comm.shrink([2, 3])
    found = run_cases(ctx, [Case("all_reduce", "float32", 100)], smaller)
    smaller.destroy()
    comm.abort()
    return type(first).__name__, type(second).__name__, spent, found


def test_second_death_during_a_shrink():
    results = run_ranks(second_death, 4, timeout=30, deaths={2, 3})
    for first, second, spent, found in results[:2]:
        assert (first, second, found) == ("RemoteError", "RemoteError", [])
        assert spent < SOON


def split_after_shrink(ctx):
    """A shrink that leaves out a living rank is no reason why the parent can't be split any more."""
    comm = ctx.new_comm()
    ctx.library.set_init_timeout(8.0)
    if ctx.rank != 2:
        comm.shrink([2]).destroy()
    part = comm.split(0, 0)
    found = run_cases(ctx, [Case("all_reduce", "float32", 100)], part)
    part.destroy()
    comm.destroy()
    ctx.library.set_init_timeout(60.0)
    return found


def test_split_after_a_shrink():
    assert run_ranks(split_after_shrink, 3, timeout=30) == [[]] * 3


def killed_among_splits(ctx, victim, delay):
    """A rank is killed at some moment while all split again and again: mostly while the parts' ranks meet."""
    from collectives.errors import RemoteError

    comm = ctx.new_comm()
    comm.split(0, 0).destroy()
    if ctx.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    while True:
        try:
            part = comm.split(0, ctx.rank)
            part.destroy()
        except RemoteError as error:
            assert victim in error.peers, error
            return time.monotonic() - start - delay


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_killed_while_others_split(seed, victim):
    delay = random.Random(seed).uniform(0.2, 0.3)
    results = run_ranks(killed_among_splits, 3, victim, delay, timeout=30, deaths={victim})
    assert isinstance(results[victim], Died)
    assert all(spent < SOON for rank, spent in enumerate(results) if rank != victim)


def no_descriptors(ctx):
    """Rank 0 has no file descriptor left to let the others in: an error on all, within the time limit."""
    library = ctx.library
    unique_id = ctx.unique_id()
    library.set_init_timeout(3.0)
    if ctx.rank == 0:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            for fd in taken[-2:]:
                os.close(fd)
    start = time.monotonic()
    error = error_of(lambda: library.comm_init_rank(ctx.size, unique_id, ctx.rank))
    spent = time.monotonic() - start
    if ctx.rank == 0:
        for fd in taken[:-2]:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ctx.barrier()
    comm = ctx.new_comm()
    return spent, type(error).__name__, str(error), run_cases(ctx, [Case("all_reduce", "float32", 10)], comm)


def test_no_descriptor_left_for_the_meeting():
    results = run_ranks(no_descriptors, 3, timeout=30, fresh=True)
    for spent, name, _, found in results:
        assert spent < 8
        assert name in ("TransportError", "CollectiveTimeout", "RemoteError")
        assert found == []
    assert any(word in results[0][2].lower() for word in ("descriptor", "open files")), results[0][2]


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
    gaps = [0.0, 0.001, 0.0, 0.02, 0.0, 0.02]
    assert run_ranks(all_interrupted, 3, gaps)[:2] == [["KeyboardInterrupt"] * len(gaps)] * 2
