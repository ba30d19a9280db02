"""Communicator on real ranks: what each operation gives, in and out of place, and what goes wrong between ranks."""

import gc
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


def every_operation(comm, count, name_of_dtype, use_async):
    """Make each call, blocking or not, in place too; on whatever device the communicator has."""
    dtype = getattr(torch, name_of_dtype)
    size, rank = comm.size, comm.rank
    mine = [whole(r, count, dtype).to(comm.device) for r in range(size)]
    large = [whole(r, count * size, dtype).to(comm.device) for r in range(size)]

    def zeros(*shape):
        return torch.zeros(shape, dtype=dtype, device=comm.device)

    parts = [x.view(size, count) for x in large]

    def do(name, *args, **options):
        work = getattr(comm, name)(*args, async_op=use_async, **options)
        assert (work is not None) == use_async
        if work is not None:
            assert work.wait()

    reduces = dtype not in (torch.bool, torch.complex64, torch.int16)
    if reduces:
        total = sum(x.double() for x in mine)
        t = mine[rank].clone()
        do("all_reduce", t)
        assert torch.equal(t, total.to(dtype))
        for root in range(size):
            t = mine[rank].clone()
            do("reduce", t, root, "max")
            assert torch.equal(t, torch.stack(mine).amax(0) if rank == root else mine[rank])
        expected = sum(x.double() for x in parts)[rank]
        out = zeros(count)
        do("reduce_scatter", out, large[rank].clone())
        assert torch.equal(out, expected.to(dtype))
        inp = large[rank].clone()
        out = inp.view(size, count)[rank]
        do("reduce_scatter", out, inp)  # in place
        assert torch.equal(out, expected.to(dtype))
    gathered = torch.stack(mine)
    out = zeros(size, count)
    do("all_gather", out, mine[rank])
    assert torch.equal(out, gathered)
    out = zeros(size, count)
    out[rank] = mine[rank]
    do("all_gather", out, out[rank])  # in place
    assert torch.equal(out, gathered)
    for root in range(size):
        t = mine[rank].clone()
        do("broadcast", t, root)
        assert torch.equal(t, mine[root])
        out = zeros(size, count) if rank == root else None
        do("gather", out, mine[rank], root)
        assert rank != root or torch.equal(out, gathered)
        out = zeros(count)
        do("scatter", out, large[root] if rank == root else None, root)
        assert torch.equal(out, parts[root][rank])
    out = zeros(size, count)
    do("all_to_all", out, large[rank])
    assert torch.equal(out, torch.stack([parts[r][rank] for r in range(size)]))
    # Rank r sends r + p rows to rank p.
    width = 3
    rows = [sum(r + p for p in range(size)) for r in range(size)]
    sends = [whole(r, rows[r] * width, dtype).view(rows[r], width).to(comm.device) for r in range(size)]
    receives = [r + rank for r in range(size)]
    out = zeros(sum(receives), width)
    do("all_to_all", out, sends[rank], receives, [rank + p for p in range(size)])
    wanted = [sends[r].split([r + p for p in range(size)])[rank] for r in range(size)]
    assert torch.equal(out, torch.cat(wanted))
    to, of = (rank + 1) % size, (rank - 1) % size
    out = zeros(count)
    with comm.group():
        works = [
            comm.send(mine[rank], to, async_op=use_async),
            comm.recv(out, of, async_op=use_async),
        ]
    if use_async:
        assert all(work.wait() for work in works)
    assert torch.equal(out, mine[of])
    comm.barrier()


def operations_on_the_host(ctx, *args):
    every_operation(ctx.communicator(), *args)


@RANKS
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64", "bfloat16", "float8_e5m2"])
def test_every_operation(ranks, dtype, use_async):
    if dtype == "float8_e5m2":
        run_ranks(moves_float8, ranks, use_async)
        return
    for count in (0, 1, 5):
        run_ranks(operations_on_the_host, ranks, count, dtype, use_async)


def moves_float8(ctx, use_async):
    comm = ctx.communicator()
    mine = torch.tensor([1.0, 2.0, -0.5]).to(torch.float8_e5m2)
    out = torch.zeros(3 * comm.size, dtype=torch.float8_e5m2)
    work = comm.all_gather(out, mine, async_op=use_async)
    if work is not None:
        work.wait()
    assert out.float().tolist() == [1.0, 2.0, -0.5] * comm.size
    comm.all_reduce(mine, "sum")
    assert mine.float().tolist() == [comm.size * 1.0, comm.size * 2.0, comm.size * -0.5]


def premultiplied(ctx):
    comm = ctx.communicator()
    arrays = [torch.ones(4), np.ones(4, np.float32), torch.ones(4, dtype=torch.float16)]
    for array in arrays:
        comm.all_reduce(array, comm.rank + 1)  # each rank has its own scalar
    with comm.group():
        comm.all_reduce(arrays[0], 0.5)
        comm.all_reduce(arrays[1], 0.25)
    work = comm.all_reduce(arrays[2], 2.0, async_op=True)
    return [arrays[0].tolist(), arrays[1].tolist(), work.result().tolist()]


@RANKS
def test_premultiplied_sum(ranks):
    total = ranks * (ranks + 1) / 2
    expected = [[total * 0.5 * ranks] * 4, [total * 0.25 * ranks] * 4, [total * 2 * ranks] * 4]
    assert run_ranks(premultiplied, ranks) == [expected] * ranks


def roots_only(ctx):
    comm = ctx.communicator()
    if comm.rank == 1:
        for use in (
            lambda: comm.gather(torch.ones(comm.size), torch.ones(1), 0),
            lambda: comm.scatter(torch.ones(1), torch.ones(comm.size), 0),
        ):
            with pytest.raises(InvalidArgument, match="pass None on the other ranks"):
                use()
    comm.barrier()
    with pytest.raises(InvalidArgument, match=f"0 to {comm.size - 1}"):
        comm.broadcast(torch.ones(1), comm.size)
    with pytest.raises(InvalidArgument, match="share evenly"):
        comm.all_to_all(torch.ones(comm.size + 1), torch.ones(comm.size + 1))
    comm.barrier()


@RANKS
def test_roots_only(ranks):
    run_ranks(roots_only, ranks)


def mismatch(ctx, kind):
    comm = ctx.new_communicator()
    odd = comm.rank == 1
    with pytest.raises(Mismatch) as caught:
        if kind == "count":
            comm.all_reduce(torch.ones(3 + odd))
        elif kind == "op":
            comm.all_reduce(torch.ones(3), "max" if odd else "sum")
        elif kind == "root":
            comm.broadcast(torch.ones(3), int(odd))
        elif kind == "dtype":
            comm.all_reduce(torch.ones(3, dtype=torch.int32 if odd else torch.float32))
        else:
            comm.all_gather(torch.ones(3 * comm.size), torch.ones(3)) if odd else comm.all_reduce(torch.ones(3))
    comm.abort()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["count", "op", "root", "dtype", "kind"])
def test_mismatch(kind):
    for text in run_ranks(mismatch, 2, kind):
        assert "rank 0" in text and "rank 1" in text


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


def past_the_limit(ctx):
    comm = ctx.new_communicator(timeout=0.5)
    assert comm.timeout == 0.5
    if comm.rank == 0:
        started = time.monotonic()
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(torch.ones(3))
        assert 0.4 < time.monotonic() - started < 10 and 1 in caught.value.peers
        with pytest.raises(CollectivesError):
            comm.barrier()  # out of use
    ctx.barrier()
    comm.abort()


def test_operation_past_the_limit():
    run_ranks(past_the_limit, 2)


def dropped(ctx):
    comm = ctx.communicator()
    comm.barrier()
    if comm.rank == 0:
        for _ in range(20):
            comm.all_reduce(torch.ones(1 << 16), async_op=True)  # nobody keeps the tensor or the Work
        gc.collect()
        filler = [torch.full((1 << 16,), 7.0) for _ in range(20)]
        ctx.barrier()
        comm.barrier()
        assert all((t == 7.0).all() for t in filler)
        return None
    ctx.barrier()
    tensors = [torch.zeros(1 << 16) for _ in range(20)]
    for tensor in tensors:
        comm.all_reduce(tensor)
    comm.barrier()
    return [t.unique().tolist() for t in tensors]


def test_dropped_works_keep_their_memory():
    assert run_ranks(dropped, 2)[1] == [[1.0]] * 20


def many_failures(ctx):
    comm = ctx.new_communicator()
    comm.barrier()
    ctx.barrier()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [comm.all_reduce(torch.ones(10), async_op=True) for _ in range(200)]
    names = set()
    for work in works:
        with pytest.raises(CollectivesError) as caught:
            work.wait(20)
        names.add(type(caught.value).__name__)
    comm.abort()
    return names


def test_every_queued_operation_fails_when_a_rank_dies():
    assert run_ranks(many_failures, 2, deaths=(1,))[0] == {"RemoteError"}


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


def own_memory(ctx):
    comm = ctx.communicator()
    t = comm.empty(100_003, torch.float64)
    t.fill_(comm.rank + 1)
    comm.all_reduce(t)
    again = comm.empty(100_003).fill_(comm.rank + 1)
    registration = comm.register(again)
    comm.all_reduce(again)
    comm.deregister(registration)
    return t.unique().tolist() + again.unique().tolist()


@RANKS
def test_own_memory(ranks):
    assert run_ranks(own_memory, ranks) == [[ranks * (ranks + 1) / 2] * 2] * ranks


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


@pytest.mark.parametrize("how", ["wait", "turn", "call", "call with a queue"])
def test_abort_in_a_signal_handler(how):
    assert run_ranks(aborted_by_a_handler, 2, how, timeout=30, fresh=True)[1] == ("Aborted", True, True)


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
