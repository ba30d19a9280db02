"""Communicator on real ranks: what each operation gives, in and out of place, and what goes wrong between ranks."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from collectives.comm import fingerprint
from collectives.comm.fingerprint import fingerprint_of
from collectives.errors import CollectivesError, CollectiveTimeout, InvalidArgument, Mismatch
from tests.ranks import run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 3])


def whole(rank, count, dtype=torch.float32):
    return (torch.arange(count) * 7 + rank * 3 + 1).to(dtype)


def plain_operations(do, rank, mine, large, reduces=True):
    """Make each call, in place too, by ``do(name, ...)``. `mine`: each rank's array; `large`: its row for each rank."""
    size, dtype = len(mine), mine[0].dtype

    def zeros(*shape):
        return mine[0].new_zeros(shape)

    if reduces:
        total = sum(each.double() for each in mine).to(dtype)
        t = mine[rank].clone()
        do("all_reduce", t)
        assert torch.equal(t, total)
        for root in range(size):
            for op, wanted in (("sum", total), ("max", torch.stack(mine).amax(0))):
                t = mine[rank].clone()
                do("reduce", t, root, op)
                assert torch.equal(t, wanted if rank == root else mine[rank])
        expected = sum(each.double() for each in large)[rank].to(dtype)
        out, rows = zeros(*mine[0].shape), large[rank].clone()
        do("reduce_scatter", out, rows)
        assert torch.equal(out, expected) and torch.equal(rows, large[rank])
        do("reduce_scatter", rows[rank], rows, "sum")  # in place
        assert torch.equal(rows[rank], expected)
    gathered = torch.stack(mine)
    for in_place in (False, True):
        out = zeros(*gathered.shape)
        out[rank] = mine[rank]
        do("all_gather", out, out[rank] if in_place else mine[rank])
        assert torch.equal(out, gathered)
    for root in range(size):
        t = mine[rank].clone()
        do("broadcast", t, root=root)
        assert torch.equal(t, mine[root])
        for in_place in (False, True):
            out = zeros(*gathered.shape) if rank == root else None
            if in_place and rank == root:
                out[rank] = mine[rank]
            do("gather", out, out[rank] if in_place and rank == root else mine[rank], root)
            assert rank != root or torch.equal(out, gathered)
        out = zeros(*mine[0].shape)
        do("scatter", out, large[root] if rank == root else None, root)
        assert torch.equal(out, large[root][rank])
    out = zeros(*gathered.shape)
    do("all_to_all", out, large[rank])
    assert torch.equal(out, torch.stack([each[rank] for each in large]))


def every_operation(comm, count, name_of_dtype, use_async):
    """Make each call, blocking or not, in place too; on whatever device the communicator has."""
    dtype = getattr(torch, name_of_dtype)
    size, rank = comm.size, comm.rank
    mine = [whole(r, count, dtype).to(comm.device) for r in range(size)]
    large = [whole(r, count * size, dtype).view(size, count).to(comm.device) for r in range(size)]

    def do(name, *args, **options):
        work = getattr(comm, name)(*args, async_op=use_async, **options)
        assert (work is not None) == use_async
        if work is not None:
            assert work.wait()

    plain_operations(do, rank, mine, large, dtype not in (torch.bool, torch.complex64, torch.int16))
    # Rank r sends r + p rows to rank p.
    width = 3
    rows = [sum(r + p for p in range(size)) for r in range(size)]
    sends = [whole(r, rows[r] * width, dtype).view(rows[r], width).to(comm.device) for r in range(size)]
    receives = [r + rank for r in range(size)]
    out = mine[0].new_zeros(sum(receives), width)
    do("all_to_all", out, sends[rank], receives, [rank + p for p in range(size)])
    wanted = [sends[r].split([r + p for p in range(size)])[rank] for r in range(size)]
    assert torch.equal(out, torch.cat(wanted))
    to, of = (rank + 1) % size, (rank - 1) % size
    out = mine[0].new_zeros(count)
    with comm.group():
        works = [
            comm.send(mine[rank], to, async_op=use_async),
            comm.recv(out, of, async_op=use_async),
        ]
    if use_async:
        assert all(work.wait() for work in works)
    assert torch.equal(out, mine[of])
    comm.barrier()


def operations_on_the_host(ctx, dtype):
    for use_async in (False, True):
        for count in (0, 1, 5):
            every_operation(ctx.communicator(), count, dtype, use_async)


@RANKS
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64", "bfloat16"])
def test_every_operation(ranks, dtype):
    run_ranks(operations_on_the_host, ranks, dtype)


def arguments_between_ranks(ctx):
    """What only several ranks can do, or get wrong: float8, scalars of their own, overlaps, roots."""
    comm = ctx.communicator()
    for use_async in (False, True):
        mine = torch.tensor([1.0, 2.0, -0.5]).to(torch.float8_e5m2)
        out = torch.zeros(3 * comm.size, dtype=torch.float8_e5m2)
        work = comm.all_gather(out, mine, async_op=use_async)
        if work is not None:
            work.wait()
        assert out.float().tolist() == [1.0, 2.0, -0.5] * comm.size
        comm.all_reduce(mine, "sum")
        assert mine.float().tolist() == [comm.size * 1.0, comm.size * 2.0, comm.size * -0.5]
    premultiplied(comm)
    roots_only(comm)


def premultiplied(comm):
    arrays = [torch.ones(4), np.ones(4, np.float32), torch.ones(4, dtype=torch.float16)]
    for array in arrays:
        comm.all_reduce(array, comm.rank + 1)  # each rank has its own scalar
    with comm.group():
        comm.all_reduce(arrays[0], 0.5)
        comm.all_reduce(arrays[1], 0.25)
    total = comm.size * (comm.size + 1) / 2
    assert arrays[0].tolist() == [total * 0.5 * comm.size] * 4 and arrays[1].tolist() == [total * 0.25 * comm.size] * 4
    work = comm.all_reduce(arrays[2], 2.0, async_op=True)
    assert work.result().tolist() == [total * 2 * comm.size] * 4


def roots_only(comm):
    for use in (
        lambda whole: comm.gather(whole, torch.ones(1), 0),
        lambda whole: comm.scatter(torch.ones(1), whole, 0),
    ):
        kind = InvalidArgument if comm.rank == 1 else Mismatch
        with pytest.raises(kind, match="pass None on the other ranks"):
            use(torch.ones(comm.size) if comm.rank < 2 else None)
    with pytest.raises(InvalidArgument, match=f"0 to {comm.size - 1}"):
        comm.broadcast(torch.ones(1), comm.size)
    with pytest.raises(InvalidArgument, match="share evenly"):
        comm.all_to_all(torch.ones(comm.size + 1), torch.ones(comm.size + 1))
    comm.barrier()


@RANKS
def test_arguments_between_ranks(ranks):
    run_ranks(arguments_between_ranks, ranks)


def checked_rows(ctx):
    """The check that NCCL's engine gets from COLLECTIVES_CHECK=1, over the host engine."""
    comm = ctx.communicator()

    def check(rows, grouped=False):
        comm._checks_calls = True
        try:
            fingerprint.check_calls(comm, rows, grouped)
        finally:
            comm._checks_calls = False

    same = fingerprint_of("all_reduce", dtype=7, count=3, op=0)
    check([same])
    check([same, fingerprint_of("barrier")], grouped=True)
    check([], grouped=True)
    texts = []
    for rows, grouped in (
        ([fingerprint_of("all_reduce", dtype=7, count=3 + comm.rank, op=0)], False),
        ([fingerprint_of("broadcast", dtype=7, count=3, root=comm.rank)], False),
        ([same, fingerprint_of("reduce", dtype=9, count=1, op=comm.rank, root=0)], True),
        ([same] * (1 + comm.rank), True),
    ):
        with pytest.raises(Mismatch) as caught:
            check(rows, grouped)
        texts.append(str(caught.value))
    comm._checks_calls = True
    try:
        array = torch.ones(3)
        with comm.group():
            comm.all_reduce(array)
            comm.all_reduce(array, "max")
    finally:
        comm._checks_calls = False
    return texts


def test_checked_rows():
    for count, root, op, number in run_ranks(checked_rows, 2):
        assert "rank 0: all_reduce float32 count=3 op=sum" in count and "rank 1: all_reduce float32 count=4" in count
        assert "rank 1: broadcast float32 count=3 root=1" in root
        assert "call 1 of the group" in op and "rank 1: reduce bfloat16 count=1 op=prod root=0" in op
        assert "rank 0: a group of 1 collectives" in number and "rank 1: a group of 2 collectives" in number


def late(ctx):
    comm = ctx.new_communicator()
    array = torch.ones(1000)
    told = None
    if comm.rank == 0:
        comm.barrier()
        work = comm.all_reduce(array, async_op=True)
        with pytest.raises(CollectiveTimeout) as caught:
            work.wait(0.3)
        assert not work.done() and work.exception() is None and "in flight" in repr(work)
        with pytest.raises(TimeoutError):
            work.wait(0)
        error = caught.value
        told = (error.op, error.peers, error.nbytes, error.seq, str(error))
        ctx.barrier()
        assert work.wait(30)  # it stayed in flight
    else:
        comm.barrier()
        ctx.barrier()
        comm.all_reduce(array)
    assert array[0].item() == comm.size
    comm.close()
    return told


@RANKS
def test_a_wait_that_runs_out_names_the_missing(ranks):
    op, peers, nbytes, seq, text = run_ranks(late, ranks)[0]
    assert (op, peers, nbytes, seq) == ("all_reduce", tuple(range(1, ranks)), 4000, 2)  # number 0 is of the opening
    assert "ranks that have not arrived: 1" in text


def unseen_failure(ctx):
    comm = ctx.new_communicator()
    comm.barrier()
    if ctx.rank == 1:
        comm.abort()
        ctx.barrier()
        return
    ctx.barrier()
    comm.all_reduce(torch.ones(1), async_op=True)  # nobody keeps the Work
    with pytest.warns(RuntimeWarning, match="all_reduce failed and nobody waited for it") as warned:
        until = time.monotonic() + 20
        while not warned and time.monotonic() < until:  # the queue's thread may not have come to it yet
            with pytest.raises(CollectivesError):
                comm.all_reduce(torch.ones(1), async_op=True).wait()
            time.sleep(0.01)
    comm.abort()


def test_an_error_that_nobody_waits_for_is_warned_of():
    run_ranks(unseen_failure, 2)


def children(ctx):
    comm = ctx.communicator()
    evens = comm.split(comm.rank % 2, key=-comm.rank)
    members = sorted((r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True)
    out = torch.zeros(evens.size, dtype=torch.int64)
    evens.all_gather(out, torch.tensor([comm.rank]))
    assert out.tolist() == members and evens.rank == members.index(comm.rank)
    part = comm.split(None if comm.rank == 0 else 0)
    assert (part is None) == (comm.rank == 0)
    if part is not None:
        assert (part.rank, part.size, part.local_rank, part.local_size) == (comm.rank - 1, comm.size - 1) * 2
        part.close()
    evens.close()
    if comm.rank:
        rest = comm.shrink([0])
        t = torch.ones(2)
        rest.all_reduce(t)
        assert t.tolist() == [comm.size - 1] * 2
        rest.close()
    comm.barrier()


def test_children():
    run_ranks(children, 3)


END = """
import collectives, torch, os, time
comm = collectives.init()
t = torch.ones(2)
comm.all_reduce(t)
assert t.tolist() == [2, 2]
if comm.rank == 0:
    work = comm.all_reduce(t, async_op=True)  # rank 1 never joins
"""


def test_exit_with_work_that_the_others_never_join():
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", END],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert time.monotonic() - started < 40


def aborted_by_a_handler(ctx, how):
    """A handler that aborts, as one for pre-emption does, while the main thread is in a wait."""
    comm = ctx.new_communicator()
    tensor = torch.ones(4)
    if how == "call with a queue":  # whose thread the abort ends
        comm.all_reduce(tensor, async_op=True).wait()
    if ctx.rank == 0:
        ctx.barrier()
        comm.abort()
        return None
    signal.signal(signal.SIGUSR1, lambda *_: comm.abort())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    start = time.monotonic()
    with pytest.raises(CollectivesError) as caught:
        if how == "wait":
            comm.all_reduce(tensor, async_op=True).wait()
        elif how == "turn":
            comm.all_reduce(tensor, async_op=True)
            comm.all_reduce(tensor)
        else:
            comm.all_reduce(tensor)
    spent = time.monotonic() - start
    ctx.barrier()
    return type(caught.value).__name__, spent < 5, comm.closed


def aborted_by_handlers(ctx):
    return [aborted_by_a_handler(ctx, how) for how in ("wait", "turn", "call", "call with a queue")]


def test_abort_in_a_signal_handler():
    assert run_ranks(aborted_by_handlers, 2, timeout=30, fresh=True)[1] == [("Aborted", True, True)] * 4


def closed_beside_a_call(ctx):
    """close() in one thread while another one's call on registered memory waits for its peer."""
    comm = ctx.new_communicator()
    array = comm.empty(1 << 24).fill_(ctx.rank + 1.0)
    comm.register(array)
    threads = []
    if ctx.rank == 0:
        threads.append(threading.Thread(target=comm.all_reduce, args=(array,)))
        threads[0].start()
        while comm._native.pending() is None:
            time.sleep(0.01)
        threads.append(threading.Thread(target=comm.close))
        threads[1].start()
        while not comm.closed:
            time.sleep(0.01)
        time.sleep(0.1)
    ctx.barrier()
    if ctx.rank:
        comm.all_reduce(array)
        comm.close()
    for thread in threads:
        thread.join(20)
    return torch.all(array == 3.0).item()


def test_close_waits_for_the_calls_of_other_threads():
    assert run_ranks(closed_beside_a_call, 2, timeout=30) == [True, True]
