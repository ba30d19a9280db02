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

F32, I64, SUM, MAX = 7, 4, 0, 2
SIZES = (0, 1, 13, 128, 1024, 1025, 30_000, 70_000)  # int64: short calls, longer ones, and beyond a chunk


def call_in_turn(ctx, calls):
    """Make short and long calls and transfers in one order that the ranks draw, each blocking, queued or in a group."""
    comm, n, rank = ctx.comm(), ctx.size, ctx.rank
    queue, draw = ctx.library.queue_create(), np.random.default_rng(7)  # on all ranks the same
    ways = np.random.default_rng(rank).integers(0, 3, calls)  # of this rank: blocking, queued, in a group
    rooms = {size: (np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)) for size in SIZES}
    before, counted = comm.sequence(), 0
    for i, way in enumerate(ways):
        size, kind, step = int(draw.choice(SIZES)), int(draw.integers(0, 6)), int(draw.integers(1, n))
        mine, got = rooms[size]
        mine[:], got[:] = 1000 * rank + i, -1
        a, b, stream = mine.ctypes.data, got.ctypes.data, queue.handle if way == 1 else 0
        source, target = (rank - step) % n, (rank + step) % n
        pair, want = sorted((i % n, (i + step) % n)), 1000 * source + i
        if way == 2 or kind > 3:
            ctx.library.group_start()
        if kind == 0:
            want = 1000 * (i % n) + i
            comm.broadcast(a, b, size, I64, i % n, stream)
        elif kind < 3:
            want = n * i + 500 * n * (n - 1)
            comm.all_reduce(a, b, size, I64, SUM, stream)
        elif kind == 3:  # the ranks of a pair take turns
            want = 1000 * pair[rank == pair[0]] + i if rank in pair else -1
            turns = [(comm.send, a), (comm.recv, b)] if rank == pair[0] else [(comm.recv, b), (comm.send, a)]
            for call, at in turns if rank in pair else ():
                call(at, size, I64, pair[rank == pair[0]], stream)
        elif kind == 4:  # two messages for one peer, and one to oneself
            own, half = np.full(size, -1), size // 2
            comm.send(a, half, I64, target, stream)
            comm.send(a, size, I64, rank, stream)
            comm.recv(b, half, I64, source, stream)
            comm.recv(own.ctypes.data, size, I64, rank, stream)
            comm.send(a + 8 * half, size - half, I64, target, stream)
            comm.recv(b + 8 * half, size - half, I64, source, stream)
        else:
            comm.send(a, size, I64, target, stream)
            comm.recv(b, size, I64, source, stream)
        if way == 2 or kind > 3:
            ctx.library.group_end()
        if way == 1:
            queue.wait(queue.record(), 60)
        counted += kind < 3
        assert (got[:size] == want).all() and got[size] == -1, (i, kind, way, size, got[:4], want)
    queue.close()
    return [] if comm.sequence() - before == counted else ["the calls are not counted"]


@pytest.mark.parametrize("n", [2, 3])
def test_short_long_grouped_and_queued_calls_in_turn(n):
    check(call_in_turn, "host", n, 1200, chunk=None)


def several_threads(ctx, calls):
    """Threads make the same small calls on one communicator, one of them through a queue; another has its own."""
    comm, other, wrong = ctx.comm(), ctx.new_comm(), []

    def work(comm, queue=None):
        x = np.zeros(64, np.int64)
        for _ in range(calls):
            x[:] = ctx.rank + 1
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, I64, SUM, queue.handle if queue else 0)
            if queue:
                queue.wait(queue.record(), 60)
            if not (x == ctx.size * (ctx.size + 1) // 2).all():
                wrong.append(f"rank {ctx.rank}: {x[:4]}")

    queue, before = ctx.library.queue_create(), comm.sequence()
    threads = [threading.Thread(target=work, args=args) for args in ((comm,), (comm,), (comm, queue), (other,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    other.destroy()
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
