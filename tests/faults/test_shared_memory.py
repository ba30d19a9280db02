"""Errors in the middle of work on shared memory: a rank that gives up must not look as if it had done its part."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import numpy as np

from tests.rank_process import open_ranks
from tests.ranks import run_ranks
from tests.stopping import give_up, outcome_of

F32, SUM = 7, 0


def shared_array(ctx, count):
    pointer = ctx.library.mem_alloc(count * 4)
    return np.frombuffer((ctypes.c_char * (count * 4)).from_address(pointer), np.float32)


def no_address_space(ctx):
    """Rank 1 can't map rank 0's memory. Gives the error of each rank."""
    comm = ctx.new_comm()
    x = shared_array(ctx, 40 << 20)  # no window that is there already holds it
    x[:] = ctx.rank + 1
    if ctx.rank == 1:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), before[1]))
    try:
        comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        if ctx.rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, before)
    return "success", np.unique(x[:: 1 << 16]).tolist()


def test_memory_that_can_not_be_mapped():
    # In processes that have not mapped each other's memory yet, as those of other tests may have.
    results = run_ranks(no_address_space, 2, fresh=True)
    assert results[1][0] == "TransportError" and "could not be mapped" in results[1][1], results
    assert results[0][0] == "RemoteError", results


def stopped_while_it_writes(ctx, count):
    """Rank 1 is stopped while it reduces; rank 0 runs out of time, and then uses its memory for something else."""
    comm = ctx.new_comm()
    x, y = shared_array(ctx, count), shared_array(ctx, count)
    x[:] = 1
    y[:] = 0
    ctx.barrier()

    def call():
        comm.all_reduce(x.ctypes.data, y.ctypes.data, count, F32, SUM)

    if ctx.rank == 1:
        outcome = outcome_of(call)
        ctx.barrier()
        return outcome

    def reuse():
        x[:] = 5
        y[:] = 7

    comm.set_timeout(1.5)
    outcome = give_up(ctx, call, lambda: y[count // 2], reuse)  # where rank 1 begins to write
    ctx.barrier()
    return outcome, int((y != 7).sum())


def test_stopped_while_it_writes():
    (outcome, written), other = run_ranks(stopped_while_it_writes, 2, 48 << 20)
    assert outcome == "CollectiveTimeout", (outcome, other)
    assert other == "RemoteError", (outcome, written, other)
    assert written <= 1 << 18, written  # what it was about to write when it was stopped


def many_ranks(ctx):
    """More ranks than share memory need no more descriptors than before."""
    n = 80
    used = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * n + 40, before[1]))
    try:
        comms = open_ranks(ctx.library, n)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for comm in comms:
        comm.abort()
    return len(comms)


def test_many_ranks_and_few_descriptors():
    assert run_ranks(many_ranks, 1) == [80]
