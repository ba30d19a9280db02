"""Getting out of a tangle: aborts while several things wait for each other, groups given up half way, shrinks and
splits after partial failures, deaths while ranks meet again.
"""

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
SOON = 5.0
CASES = [Case("all_reduce", "float32", 100)]


def all_reduce(comm, x, stream=0):
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM, stream)


def error_of(call):
    try:
        call()
    except BaseException as error:
        return error
    return None


def split_given_up(ctx):
    """A split inside a group that is dropped leaves nothing behind in the parent."""
    library, found = ctx.library, []
    for how in ("cancel", "refused call", "with an operation"):
        comm = ctx.new_comm()
        x = np.ones(10, np.float32)
        library.group_start()
        comm.split(0, 0)
        if how == "cancel":
            library.group_cancel()
        elif how == "refused call":
            assert error_of(lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, 99, SUM)) is not None  # noqa: B023
            assert error_of(library.group_end) is not None
        else:
            all_reduce(comm, x)
            error_of(library.group_end)  # communicators and operations in one group: refused, or both are carried out
            x[:] = 1
        all_reduce(comm, x)
        part = comm.split(0, 0)
        found += run_cases(ctx, CASES, part) + ([] if x[0] == ctx.size else [f"{how}: {x[0]}"])
        part.destroy()
        comm.destroy()
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_split_in_a_group_that_is_given_up(n):
    assert run_ranks(split_given_up, n, timeout=30) == [[]] * n


def aborts_in_any_order(ctx):
    """Operations of two communicators wait, one behind the other; both can be aborted, the one behind first."""
    library, found = ctx.library, []
    x, y = np.ones(10, np.float32), np.ones(10, np.float32)
    for how in ("one queue", "one group", "group behind a queue"):
        a, b = open_ranks(library, 2), open_ranks(library, 2)
        queue, ended = library.queue_create(), []

        def group():
            library.group_start()
            all_reduce(a[0], x)  # noqa: B023
            all_reduce(b[0], y)  # noqa: B023
            library.group_end()

        waits = [group]
        if how != "one group":
            all_reduce(b[0], x, queue.handle)
        if how == "one queue":
            all_reduce(a[0], y, queue.handle)
            waits = [lambda ticket=ticket: queue.wait(ticket) for ticket in (1, 2)]  # noqa: B023
        waiter = threading.Thread(target=lambda: ended.extend(map(error_of, waits)))  # noqa: B023
        waiter.start()
        time.sleep(0.2)
        start = time.monotonic()
        a[0].abort()
        b[0].abort()
        waiter.join(10)
        assert not waiter.is_alive() and time.monotonic() - start < 3, how
        for comm in (a[1], b[1]):
            comm.abort()
        queue.close()
        found.append(repr(ended))
    return found


def test_abort_of_what_waits_behind_something_else():
    (found,) = run_ranks(aborts_in_any_order, 1, timeout=30, fresh=True)
    assert len(found) == 3 and all("Aborted" in ended for ended in found), found


def partial_failures(ctx):
    """A shrink that leaves out a living rank is no reason why the parent can't be split any more. Then rank 2 is gone;
    rank 0 notices it in a split, rank 1 in an all-reduce: they can still shrink together.
    """
    comm = ctx.new_comm()
    ctx.library.set_init_timeout(8.0)
    if ctx.rank != 2:
        comm.shrink([2]).destroy()
    part = comm.split(0, 0)
    found = run_cases(ctx, CASES, part)
    part.destroy()
    if ctx.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.ones(10, np.float32)
    error = error_of((lambda: comm.split(0, 0)) if ctx.rank == 0 else (lambda: all_reduce(comm, x)))
    smaller = comm.shrink([2])
    found += run_cases(ctx, CASES, smaller)
    smaller.destroy()
    comm.abort()
    ctx.library.set_init_timeout(60.0)
    return type(error).__name__, found


def test_shrink_and_split_after_partial_failures():
    results = run_ranks(partial_failures, 3, timeout=30, deaths={2})
    # Unlike calls and a death at once: a rank reports what it sees first.
    assert all(name in ("RemoteError", "Mismatch") and found == [] for name, found in results[:2]), results


def second_death(ctx):
    """Rank 3 is dead, rank 2 dies instead of shrinking: the others' shrink fails soon, and the next one works."""
    comm = ctx.new_comm()
    if ctx.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(lambda: all_reduce(comm, np.ones(10, np.float32)))
    ctx.barrier(ranks=[0, 1, 2])
    if ctx.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    second = error_of(lambda: comm.shrink([3]))
    spent = time.monotonic() - start
    smaller = comm.shrink([2, 3])
    found = run_cases(ctx, CASES, smaller)
    smaller.destroy()
    comm.abort()
    return type(first).__name__, type(second).__name__, spent, found


def test_second_death_during_a_shrink():
    results = run_ranks(second_death, 4, timeout=30, deaths={2, 3})
    for first, second, spent, found in results[:2]:
        assert (first, second, found) == ("RemoteError", "RemoteError", [])
        assert spent < SOON
