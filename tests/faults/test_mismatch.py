"""Ranks that do not make the same call: Mismatch on every rank with a table, nothing written, and the work goes on.

Calls of random programs in which one rank deviates: test_campaign.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.buffers import Guarded, memory_of
from tests.conformance.cases import Case, run_cases
from tests.ranks import run_ranks

F32, I32 = 7, 2
SUM, MAX = 0, 2
COUNT = 24


def mismatches(ctx):
    """Another reduction; no elements; other counts on all; a factor and none; one call of a group; one in a queue.

    Each time the work goes on.
    """
    from collectives.errors import Mismatch

    comm, queue = ctx.comm(), ctx.library.queue_create()
    x, y = np.ones(64, np.float32), np.ones(64, np.float32)

    def all_reduce(count, op=SUM, array=x, stream=0):
        comm.all_reduce(array.ctypes.data, array.ctypes.data, count, F32, op, stream)

    found = []
    for odd, usual, words in (((COUNT, MAX), (COUNT, SUM), ["max", "sum"]), ((0,), (COUNT,), ["=0", f"={COUNT}"])):
        with pytest.raises(Mismatch) as caught:
            all_reduce(*(odd if ctx.rank == 1 else usual))
        assert all(word in caught.value.message for word in words), caught.value.message
        found += run_cases(ctx, [Case("all_reduce", "float32", 50)])

    with pytest.raises(Mismatch) as caught:
        all_reduce(10 + ctx.rank)
    assert all(f"count={10 + r}" in caught.value.message for r in range(ctx.size)), caught.value.message
    found += run_cases(ctx, [Case("all_reduce", "float32", 50)])

    op = comm.create_premul_sum(2.0, F32)
    with pytest.raises(Mismatch):
        all_reduce(10, op if ctx.rank else SUM)
    comm.destroy_op(op)
    found += run_cases(ctx, [Case("all_reduce", "float32", 50)])

    with pytest.raises(Mismatch):
        ctx.library.group_start()
        for count in (10, 10 + (ctx.rank == 1), 10):
            all_reduce(count)
        ctx.library.group_end()
    found += run_cases(ctx, [Case("all_reduce", "float32", 50), Case("all_to_all", "int8", 50)])

    x[:] = 1
    all_reduce(10 + ctx.rank, stream=queue.handle)
    all_reduce(10, array=y, stream=queue.handle)
    with pytest.raises(Mismatch):
        queue.wait(1)
    assert queue.wait(2, 20)
    with pytest.raises(Mismatch):  # still known, however often it is asked for
        queue.done(1)
    queue.close()
    return found + ([] if y[0] == ctx.size and x[0] == 1 else [f"{x[0]} {y[0]}"])


def test_on_all_ranks_with_a_factor_in_a_group_and_in_a_queue():
    assert run_ranks(mismatches, 3) == [[]] * 3


def transfer_mismatch(ctx):
    from collectives.errors import Mismatch

    comm, found = ctx.comm(), []
    buffer = Guarded(memory_of("host"), 800_000)
    after = [
        Case("transfer", "float32", 3000, root=0, peer=1),
        Case("transfer", "float32", 3000, root=1, peer=0),
        Case("all_reduce", "float32", 9),
    ]
    for wrong in ((COUNT + 1, F32), (COUNT, I32), (100_000, F32)):
        with pytest.raises(Mismatch) as caught:
            if ctx.rank == 0:
                comm.send(buffer.address, *wrong, 1)
            else:
                comm.recv(buffer.address, COUNT, F32, 0)
        error = caught.value
        if list(error.peers) != [1 - ctx.rank] or any(str(n) not in error.message for n in (wrong[0], COUNT)):
            found.append(f"peers {error.peers}: {error.message}")
        if not buffer.still_poisoned():
            found.append("the receive buffer was written to")
        found += run_cases(ctx, after)
    return found


def test_mismatch_of_send_and_recv():
    assert run_ranks(transfer_mismatch, 2) == [[], []]
