"""Ranks that do not make the same call: Mismatch on every rank with a table, nothing written, and the work goes on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.buffers import Guarded, memory_of
from tests.conformance.cases import Case, run_cases
from tests.ranks import run_ranks

F32, F64, I32 = 7, 8, 2
SUM, MAX, AVG = 0, 2, 4
COUNT = 24


def calls(comm, send, recv):
    """Name -> (what the odd rank calls, what all others call, words that its table must hold)."""
    a, b = send, recv
    return {
        "op": (
            lambda: comm.all_reduce(a, b, COUNT, F32, MAX),
            lambda: comm.all_reduce(a, b, COUNT, F32, SUM),
            ["max", "sum"],
        ),
        "dtype": (
            lambda: comm.all_reduce(a, b, COUNT, I32, SUM),
            lambda: comm.all_reduce(a, b, COUNT, F32, SUM),
            ["int32", "float32"],
        ),
        "count": (
            lambda: comm.all_reduce(a, b, COUNT - 1, F32, SUM),
            lambda: comm.all_reduce(a, b, COUNT, F32, SUM),
            [str(COUNT - 1), str(COUNT)],
        ),
        "count 0": (
            lambda: comm.all_reduce(a, b, 0, F32, SUM),
            lambda: comm.all_reduce(a, b, COUNT, F32, SUM),
            ["=0", f"={COUNT}"],
        ),
        "count of many rounds": (
            lambda: comm.all_reduce(a, b, COUNT, F32, SUM),
            lambda: comm.all_reduce(a, b, 9000, F32, SUM),
            [str(COUNT), "9000"],
        ),
        "root": (
            lambda: comm.broadcast(a, b, COUNT, F32, 1),
            lambda: comm.broadcast(a, b, COUNT, F32, 0),
            ["root=1", "root=0"],
        ),
        "root of reduce": (
            lambda: comm.reduce(a, b, COUNT, F32, SUM, 1),
            lambda: comm.reduce(a, b, COUNT, F32, SUM, 0),
            ["root=1", "root=0"],
        ),
        "collective": (
            lambda: comm.all_gather(a, b, COUNT, F32),
            lambda: comm.reduce_scatter(a, b, COUNT, F32, SUM),
            ["allgather", "reducescatter"],
        ),
        "op of reduce_scatter": (
            lambda: comm.reduce_scatter(a, b, COUNT, F32, SUM),
            lambda: comm.reduce_scatter(a, b, COUNT, F32, AVG),
            ["sum", "avg"],
        ),
        "dtype of all_to_all": (
            lambda: comm.all_to_all(a, b, COUNT, F32),
            lambda: comm.all_to_all(a, b, COUNT, F64),
            ["float32", "float64"],
        ),
    }


NAMES = list(calls(None, 0, 0))


def mismatch(ctx, name, odd_rank, queued):
    from collectives.errors import InvalidUsage, Mismatch

    comm = ctx.comm()
    memory = memory_of("host")
    send, recv = Guarded(memory, 40_000 * ctx.size), Guarded(memory, 40_000 * ctx.size)
    queue = ctx.library.queue_create()
    odd, others, words = calls(comm, send.address, recv.address)[name]
    with pytest.raises(Mismatch) as caught:
        (odd if ctx.rank == odd_rank else others)()
    error = caught.value
    found = []
    table = error.message.lower().replace("_", "").replace(" ", "")
    if missing := [w for w in words if w not in table]:
        found.append(f"the table lacks {missing}: {error.message}")
    if any(f"rank{r}" not in table for r in range(ctx.size)):
        found.append(f"the table lacks a rank: {error.message}")
    wrong = [odd_rank] if ctx.rank != odd_rank else [r for r in range(ctx.size) if r != odd_rank]
    if list(error.peers) != wrong or error.rank != ctx.rank or not isinstance(error, InvalidUsage):
        found.append(f"rank {error.rank}, peers {error.peers}")
    if not recv.still_poisoned():
        found.append("the receive buffer was written to")
    queue.close()
    return found + run_cases(ctx, [Case("all_reduce", "float32", 5000, op="avg"), Case("all_gather", "int8", 3)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "odd_rank"), [(2, 1), (4, 2)])
def test_mismatch_of(name, n, odd_rank):
    env = {"COLLECTIVES_HOST_CHUNK": "4096"}
    results = run_ranks(mismatch, n, name, odd_rank, False, env=env)
    assert not any(results), results


def everyone_differs(ctx):
    from collectives.errors import Mismatch

    comm = ctx.comm()
    x = np.ones(64, np.float32)
    with pytest.raises(Mismatch) as caught:
        comm.all_reduce(x.ctypes.data, x.ctypes.data, 10 + ctx.rank, F32, SUM)
    assert all(f"count={10 + r}" in caught.value.message for r in range(ctx.size)), caught.value.message
    return run_cases(ctx, [Case("all_reduce", "float32", 50)])


def test_everyone_differs():
    assert run_ranks(everyone_differs, 4) == [[]] * 4


def premul_and_sum(ctx):
    from collectives.errors import Mismatch

    comm = ctx.comm()
    x = np.ones(64, np.float32)
    op = comm.create_premul_sum(2.0, F32)
    with pytest.raises(Mismatch):
        comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, op if ctx.rank else SUM)
    comm.destroy_op(op)
    return run_cases(ctx, [Case("all_reduce", "float32", 50)])


def test_premul_against_sum():
    assert run_ranks(premul_and_sum, 2) == [[]] * 2


def transfer_mismatch(ctx, field):
    from collectives.errors import Mismatch

    comm = ctx.comm()
    memory = memory_of("host")
    buffer = Guarded(memory, 800_000)
    big = 100_000
    wrong = {"count": (COUNT + 1, F32), "dtype": (COUNT, I32), "longer send": (big, F32)}[field]
    with pytest.raises(Mismatch) as caught:
        if ctx.rank == 0:
            comm.send(buffer.address, *wrong, 1)
        else:
            comm.recv(buffer.address, COUNT, F32, 0)
    error = caught.value
    found = [] if list(error.peers) == [1 - ctx.rank] else [f"peers {error.peers}"]
    if str(wrong[0]) not in error.message or str(COUNT) not in error.message:
        found.append(error.message)
    if not buffer.still_poisoned():
        found.append("the receive buffer was written to")
    after = [
        Case("transfer", "float32", 3000, root=0, peer=1),
        Case("transfer", "float32", 3000, root=1, peer=0),
        Case("all_reduce", "float32", 9),
    ]
    return found + run_cases(ctx, after)


@pytest.mark.parametrize("field", ["count", "dtype", "longer send"])
def test_mismatch_of_send_and_recv(field):
    assert run_ranks(transfer_mismatch, 2, field) == [[], []]


def mismatch_in_a_group(ctx):
    """One call of a group of three differs: the group fails on every rank, and the next group works."""
    from collectives.errors import Mismatch

    comm = ctx.comm()
    x = np.ones(64, np.float32)
    with pytest.raises(Mismatch):
        ctx.library.group_start()
        comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)
        comm.all_reduce(x.ctypes.data, x.ctypes.data, 10 + (ctx.rank == 1), F32, SUM)
        comm.all_reduce(x.ctypes.data, x.ctypes.data, 10, F32, SUM)
        ctx.library.group_end()
    return run_cases(ctx, [Case("all_reduce", "float32", 50), Case("all_to_all", "int8", 50)])


def test_mismatch_in_a_group():
    assert run_ranks(mismatch_in_a_group, 3) == [[]] * 3


def mismatch_in_a_queue(ctx):
    from collectives.errors import Mismatch

    comm, queue = ctx.comm(), ctx.library.queue_create()
    x, y = np.ones(64, np.float32), np.ones(64, np.float32)
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 10 + ctx.rank, F32, SUM, queue.handle)
    comm.all_reduce(y.ctypes.data, y.ctypes.data, 10, F32, SUM, queue.handle)
    with pytest.raises(Mismatch):
        queue.wait(1)
    assert queue.wait(2, 20)
    with pytest.raises(Mismatch):  # still known, however often it is asked for
        queue.done(1)
    queue.close()
    return [] if y[0] == ctx.size and x[0] == 1 else [f"{x[0]} {y[0]}"]


def test_mismatch_in_a_queue():
    assert run_ranks(mismatch_in_a_queue, 3) == [[]] * 3


def high_level(ctx):
    import torch

    from collectives.errors import Mismatch

    comm = ctx.communicator()
    a = torch.ones(10 + ctx.rank)
    with pytest.raises(Mismatch) as caught:
        comm.all_reduce(a)
    assert caught.value.op == "all_reduce"
    with pytest.raises(Mismatch):
        comm.all_reduce(a, async_op=True).wait()
    t = torch.ones(3)
    comm.all_reduce(t)
    return a.tolist() == [1.0] * a.numel() and t.tolist() == [float(ctx.size)] * 3


def test_communicator_raises_mismatch_too():
    assert run_ranks(high_level, 2) == [True, True]
