"""The host engine's fast path of small blocking calls beside its full path: the same results, order and errors."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from collectives.errors import CollectivesError, Mismatch
from tests.conformance.cases import Case, run_cases
from tests.conformance.worlds import check
from tests.ranks import run_ranks

F32, I64, SUM, MAX, AVG = 7, 4, 0, 2, 4


def call_in_turn(ctx, calls):
    """Make short and long calls, a group and queued calls in one order that the ranks draw; each rank its own way."""
    comm, n = ctx.comm(), ctx.size
    queue = ctx.library.queue_create()
    kinds = np.random.default_rng(7).integers(0, 5, calls)  # on all ranks the same
    ways = np.random.default_rng(ctx.rank).integers(0, 3, calls)  # of this rank: blocking, queued, in a group
    x, long = np.zeros(256, np.int64), np.zeros(100_000, np.int64)
    before = comm.sequence()
    for i, (kind, way) in enumerate(zip(kinds, ways, strict=True)):
        array = long if kind == 4 and i % 8 == 0 else x
        array[:] = i + ctx.rank
        at, stream = array.ctypes.data, queue.handle if way == 1 else 0
        if way == 2:
            ctx.library.group_start()
        if kind < 2:
            root, want = int(i % n), int(i + i % n)
            comm.broadcast(at, at, array.size, I64, root, stream)
        else:
            want = n * i + n * (n - 1) // 2
            comm.all_reduce(at, at, array.size, I64, SUM, stream)
        if way == 2:
            ctx.library.group_end()
        if way == 1:
            queue.wait(queue.record(), 60)
        assert (array == want).all(), (i, kind, way, array[:4], want)
    queue.close()
    return [] if comm.sequence() - before == calls else ["the calls are not counted"]


@pytest.mark.parametrize("n", [2, 3])
def test_short_long_grouped_and_queued_calls_in_turn(n):
    check(call_in_turn, "host", n, 1500, chunk=None)


def several_threads(ctx, calls):
    """Several threads make the same small calls on one communicator, one of them through a queue."""
    comm = ctx.comm()
    wrong = []

    def work(queue):
        x = np.zeros(64, np.int64)
        for _ in range(calls):
            x[:] = ctx.rank + 1
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, I64, SUM, queue.handle if queue else 0)
            if queue:
                queue.wait(queue.record(), 60)
            if not (x == ctx.size * (ctx.size + 1) // 2).all():
                wrong.append(f"rank {ctx.rank}: {x[:4]}")

    queue = ctx.library.queue_create()
    before = comm.sequence()
    threads = [threading.Thread(target=work, args=(queue if t == 0 else None,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    return wrong[:5] if comm.sequence() - before == 3 * calls else ["the calls are not counted"]


@pytest.mark.parametrize("n", [2, 3])
def test_threads_on_one_communicator(n):
    check(several_threads, "host", n, 300, chunk=None)


def calls_that_differ(ctx, queued):
    """Rank 0 makes a short call, the others make another one; ``queued``: on the full path."""
    comm, found = ctx.comm(), []
    send, recv = np.full(4 * 5000, 3, np.float32), np.full(4 * 5000, 9, np.float32)
    a, b = send.ctypes.data, recv.ctypes.data
    queue = ctx.library.queue_create()
    stream = queue.handle if queued else 0
    premul = comm.create_premul_sum(2.0, F32)
    others = {
        "op": lambda: comm.all_reduce(a, b, 16, F32, MAX, stream),
        "dtype": lambda: comm.all_reduce(a, b, 16, 2, SUM, stream),
        "count": lambda: comm.all_reduce(a, b, 17, F32, SUM, stream),
        "no element": lambda: comm.all_reduce(a, b, 0, F32, SUM, stream),
        "a long one": lambda: comm.all_reduce(a, b, 5000, F32, SUM, stream),
        "kind": lambda: comm.all_gather(a, b, 16, F32, stream),
        "rooted": lambda: comm.broadcast(a, b, 16, F32, 0, stream),
        "pre-multiplied": lambda: comm.all_reduce(a, b, 16, F32, premul, stream),
    }
    for name, other in others.items():
        with pytest.raises(Mismatch) as caught:
            if ctx.rank == 0:
                comm.all_reduce(a, b, 16, F32, SUM)
            else:
                other()
                queue.wait(queue.record(), 60)
        table = str(caught.value)
        words = [f"rank {r}: " for r in range(ctx.size)] + ["ncclAllReduce count=16 dtype=float32 op=sum"]
        found += [f"{name}: the table lacks {word!r}: {table}" for word in words if word not in table]
        found += [f"{name}: the receive buffer was written to"] * bool((recv != 9).any())
        found += run_cases(ctx, [Case("all_reduce", "float32", 16), Case("all_gather", "float32", 5000)])
    comm.destroy_op(premul)
    queue.close()
    return found


@pytest.mark.parametrize("queued", [False, True], ids=["blocking", "queued"])
def test_a_short_call_beside_another_one(queued):
    check(calls_that_differ, "host", 3, queued, chunk=None)


def ended_by_another_thread(ctx, delay):
    """Rank 0 ends its communicator while one of its threads makes small calls; return what the calls raised."""
    comm = ctx.new_comm()
    x = np.ones(64, np.float32)
    raised = []

    def work():
        try:
            while True:
                comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, MAX)
        except CollectivesError as error:
            raised.append(type(error).__name__)

    thread = threading.Thread(target=work)
    thread.start()
    if ctx.rank == 0:
        time.sleep(delay)
        comm.abort()
    thread.join()
    if ctx.rank:
        comm.abort()
    return raised


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_ended_while_a_thread_makes_small_calls(delay):
    for _ in range(3):
        (first,), *others = run_ranks(ended_by_another_thread, 3, delay)
        assert first in ("Aborted", "InvalidUsage")  # InvalidUsage: it was closed between two calls
        assert others == [["RemoteError"]] * 2


def late(ctx, seconds):
    """Rank 1 comes late to a small call: rank 0 waits for it past all spins, and both get the result."""
    comm, x = ctx.comm(), np.ones(64, np.float32)
    if ctx.rank == 1:
        time.sleep(seconds)
    pending = []
    watcher = threading.Timer(seconds / 2, lambda: pending.append(comm.pending()))
    watcher.start()
    comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, SUM)
    watcher.join()
    assert (x == ctx.size).all()
    assert comm.pending() is None
    return pending[0] and (pending[0].op, list(pending[0].peers))


def test_a_late_peer_is_waited_for_and_named():
    assert run_ranks(late, 2, 0.4)[0] == ("all_reduce", [1])
