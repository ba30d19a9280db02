"""Small sends and receives on the host engine: their fast path beside the full one, the order, and errors."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from collectives.errors import CollectivesError, CollectiveTimeout, Mismatch, RemoteError
from tests.conformance.cases import Case, run_cases
from tests.conformance.worlds import check
from tests.ranks import run_ranks

F32, I32, I64, SUM = 7, 2, 4, 0
SIZES = (0, 1, 13, 128, 1025, 30_000, 70_000)  # int64: within a chunk of a channel, and beyond it


def unlike(ctx, way):
    """Rank 0 sends, rank 1 receives something else: an error on both, nothing is written, and the next ones work."""
    comm, peer = ctx.comm(), 1 - ctx.rank
    send, recv = np.full(100_000, 3, np.float32), np.full(100_000, 9, np.float32)
    queue, found = ctx.library.queue_create(), []
    stream = queue.handle if way == "queued" and ctx.rank else 0
    for sent, wanted in (
        ((256, F32), (255, F32)),
        ((256, F32), (256, I32)),
        ((0, F32), (1, F32)),
        ((1, F32), (0, F32)),
        ((100_000, F32), (256, F32)),  # several chunks
    ):
        for _ in range(6):  # more often than a channel has slots
            with pytest.raises(Mismatch) as caught:
                if way == "group":
                    ctx.library.group_start()
                    comm.send(send.ctypes.data, *(sent if ctx.rank == 0 else (4, F32)), peer)
                    comm.recv(recv.ctypes.data, *(wanted if ctx.rank else (4, F32)), peer)
                    ctx.library.group_end()
                elif ctx.rank == 0:
                    comm.send(send.ctypes.data, *sent, peer)
                else:
                    comm.recv(recv.ctypes.data, *wanted, peer, stream)
                    if stream:
                        queue.wait(queue.record(), 60)
            error = caught.value
            assert (tuple(error.peers), error.rank, error.op) == ((peer,), ctx.rank, "recv" if ctx.rank else "send")
            for text in (f"rank 0: ncclSend count={sent[0]}", f"rank 1: ncclRecv count={wanted[0]}"):
                assert text in str(error), str(error)
            assert way == "group" or (recv == 9).all()
        cases = [Case("transfer", "float32", count, root=r, peer=1 - r) for count in (0, 256, 100_000) for r in (0, 1)]
        found += run_cases(ctx, [*cases, Case("all_reduce", "float32", 16)])
    queue.close()
    return found


@pytest.mark.parametrize("way", ["alone", "queued", "group"])
def test_a_mismatch_is_an_error_on_both(way):
    check(unlike, "host", 2, way, chunk=None)


def threads_send(ctx, messages):
    """Two threads of rank 0 send to two threads of rank 1: each message arrives once, and whole."""
    comm, peer = ctx.comm(), 1 - ctx.rank
    found = [[], []]

    def work(t):
        x = np.zeros(100, np.int64)
        for i in range(messages):
            if ctx.rank == 0:
                x[:] = 10_000 * t + i
                comm.send(x.ctypes.data, 100, I64, peer)
            else:
                comm.recv(x.ctypes.data, 100, I64, peer)
                assert (x == x[0]).all()
                found[t].append(int(x[0]))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = sorted(found[0] + found[1])
    wanted = [10_000 * t + i for t in range(2) for i in range(messages)] if ctx.rank else []
    return [] if got == wanted else [f"rank {ctx.rank}: {len(got)} messages"]


def test_threads_of_both_ranks():
    check(threads_send, "host", 2, 200, chunk=None)


def wait_for(condition):
    while not condition():
        time.sleep(0.005)


def ended_with_data_in_the_slot(ctx, how):
    """Rank 0's send waits for a receive, and is given up; what lies in the slot isn't received by rank 1 later."""
    comm, x = ctx.new_comm(), np.full(16, 5.0, np.float32)
    if how == "timeout":
        comm.set_timeout(0.3)
    raised = []

    def send():
        try:
            comm.send(x.ctypes.data, 16, F32, 1)
        except CollectivesError as error:
            raised.append((type(error).__name__, tuple(error.peers)))

    if ctx.rank == 0:
        thread = threading.Thread(target=send)
        thread.start()
        ctx.barrier()
        if how == "abort":
            comm.abort()
        thread.join()
        ctx.barrier()
    else:
        wait_for(lambda: comm.probe(0))
        ctx.barrier()
        ctx.barrier()
        try:
            comm.recv(x.ctypes.data, 16, F32, 0)
        except CollectivesError as error:
            raised.append((type(error).__name__, tuple(error.peers)))
        assert (x == 5.0).all()
    if ctx.rank or how != "abort":
        comm.abort()
    return raised


@pytest.mark.parametrize(
    ("how", "sender"),
    [("timeout", ("CollectiveTimeout", (1,))), ("abort", ("Aborted", ()))],
)
def test_a_send_that_is_given_up(how, sender):
    (first,), (second,) = run_ranks(ended_with_data_in_the_slot, 2, how)
    assert first == sender
    assert second == ("RemoteError", (0,))


def killed_with_data_in_the_slot(ctx):
    """Rank 0 is killed in its send: rank 1 has the data whole, or an error; then all calls raise."""
    comm, x = ctx.new_comm(), np.full(16, float(ctx.rank), np.float32)
    pid = ctx.exchange(os.getpid())[0]
    if ctx.rank == 0:
        comm.send(x.ctypes.data, 16, F32, 1)
        raise AssertionError("a send has ended without its receive")
    wait_for(lambda: comm.probe(0))
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    try:
        comm.recv(x.ctypes.data, 16, F32, 0)
        assert (x == 0).all()
    except RemoteError as error:
        assert tuple(error.peers) == (0,) and (x == 1).all()
    for call in (comm.send, comm.recv):
        with pytest.raises(RemoteError) as caught:
            call(x.ctypes.data, 16, F32, 0)
        assert tuple(caught.value.peers) == (0,)
    comm.abort()


def test_a_sender_that_is_killed():
    run_ranks(killed_with_data_in_the_slot, 2, deaths={0})


def before_a_collective(ctx):
    """A send before a collective, received behind it: both wait for each other until the time limit; the later one
    of them finds the other gone."""
    comm, x = ctx.new_comm(), np.zeros(16, np.float32)
    comm.set_timeout(0.5)
    with pytest.raises((CollectiveTimeout, RemoteError)) as caught:
        if ctx.rank == 0:
            comm.send(x.ctypes.data, 16, F32, 1)
        else:
            comm.all_reduce(x.ctypes.data, x.ctypes.data, 16, F32, SUM)
    assert tuple(caught.value.peers) == (1 - ctx.rank,)
    comm.abort()
    return type(caught.value).__name__


def test_a_send_whose_receive_comes_too_late():
    assert "CollectiveTimeout" in run_ranks(before_a_collective, 2)
