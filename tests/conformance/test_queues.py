"""The host engine's queues: order with the NULL stream and with each other, tickets, errors, callbacks."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from collectives.errors import CollectivesError
from tests.buffers import memory_of
from tests.conformance.cases import Case, PreMulOps, Prepared, run_cases
from tests.conformance.worlds import check

F32 = 7
SUM = 0


def take_turns(ctx):
    """One array goes through calls on two queues and the NULL stream: each must see what the one before left."""
    comm, n = ctx.comm(), ctx.size
    queues = [ctx.library.queue_create(), ctx.library.queue_create()]
    x = np.full(3000, float(ctx.rank + 1), np.float32)
    want = np.full(3000, n * (n + 1) / 2, np.float32)
    rng = np.random.default_rng(4)
    for step in range(30):
        stream = [queues[0].handle, queues[1].handle, 0][rng.integers(3)]
        if step % 3 == 2:
            comm.broadcast(x.ctypes.data, x.ctypes.data, x.size, F32, step % n, stream)
        else:
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, 4 if step % 2 else SUM, stream)
            if step > 0 and step % 2 == 0:
                want *= n
        if want[0] > 1e6:  # the NULL stream waits for the queued calls before it
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, 2, 0)
            x /= want[0]
            want /= want[0]
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, 2, 0)
    for queue in queues:
        assert queue.wait(queue.record(), 20)  # its operations are done; its own bookkeeping may follow a moment later
        queue.close()
    return [] if np.allclose(x, want, rtol=1e-5) else [f"rank {ctx.rank}: got {x[:3]}, want {want[:3]}"]


def wait_runs_out(ctx):
    """A wait that runs out says False and leaves the operation in flight; it ends well when the peer comes."""
    comm, queue = ctx.comm(), ctx.library.queue_create()
    x = np.full(10, ctx.rank + 1.0, np.float32)
    if ctx.rank != 0:
        ctx.barrier()
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM, queue.handle)
    ticket = queue.record()
    if ctx.rank == 0:
        start = time.monotonic()
        assert queue.wait(ticket, 0.3) is False
        assert 0.25 < time.monotonic() - start < 3
        assert not queue.done(ticket)
        assert queue.get(0) == 1
        pending = comm.pending()
        assert pending is not None
        assert pending.op in ("all_reduce", "ncclAllReduce")
        assert list(pending.peers) == list(range(1, ctx.size)), pending
        assert pending.nbytes == 40
        ctx.barrier()
    assert queue.wait(ticket, 30) is True
    assert comm.pending() is None
    assert np.all(x == sum(range(1, ctx.size + 1)))
    queue.close()
    return []


def callbacks(ctx):
    """They run in order in the queue's thread; closing a queue runs what is in it to its end."""
    comm, queue = ctx.comm(), ctx.library.queue_create()
    core = sorted(os.sched_getaffinity(0))[0]
    assert queue.get(1) == -1
    queue.set(1, core)
    assert queue.get(1) == core and os.sched_getaffinity(queue.get(2)) == {core}
    x = np.ones(5000, np.float32)
    seen = []
    for _ in range(3):
        comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM, queue.handle)
        queue.call(lambda: seen.append((float(x[-1]), threading.get_native_id())))
    thread = queue.get(2)
    queue.close()
    assert seen == [(float(ctx.size) ** k, thread) for k in (1, 2, 3)]
    return []


def not_a_queue(ctx):
    comm = ctx.comm()
    p = Prepared(Case("all_reduce", "float32", 10), comm, memory_of("host"), PreMulOps([comm]), True)
    decoy = np.zeros(4096, np.uint8)  # readable memory that is no queue
    with pytest.raises(CollectivesError, match="(?i)queue|stream"):
        p.issue(decoy.ctypes.data)
    queue = ctx.library.queue_create()
    handle = queue.handle
    queue.close()
    with pytest.raises(CollectivesError, match="(?i)queue|stream"):
        p.issue(handle)
    return run_cases(ctx, [Case("all_reduce", "float32", 10)])


PROGRAMS = [
    (take_turns, 1), (take_turns, 2), (take_turns, 3), (wait_runs_out, 2), (wait_runs_out, 3), (callbacks, 1),
    (callbacks, 3), (not_a_queue, 1), (not_a_queue, 2),
]  # fmt: skip


@pytest.mark.parametrize(("program", "n"), PROGRAMS, ids=lambda value: getattr(value, "__name__", None))
def test_queues(program, n):
    check(program, "host", n)
