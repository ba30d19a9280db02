"""Sends and receives of plain arrays in a group: on their own they are issued in C, among other calls as these are."""

import gc
import os
import signal
import threading

import numpy as np
import pytest
import torch

from collectives import _nccl, errors
from tests.ranks import run_ranks


def full(value, n=100):
    return torch.full((n,), float(value))


def exchange(comm, send, recv, *, peer=None):
    peer = 1 - comm.rank if peer is None else peer
    with comm.group():
        comm.send(send, peer)
        comm.recv(recv, peer)


def plain(ctx):
    comm = ctx.communicator()
    for n in (0, 1, 1000, 3_000_000):
        mine, other = full(comm.rank, n), full(-1, n)
        exchange(comm, mine, other)
        assert torch.equal(other, full(1 - comm.rank, n)) and torch.equal(mine, full(comm.rank, n))
    mine, other = np.arange(5) + comm.rank, np.zeros(5, dtype=int)
    exchange(comm, mine, other)
    assert (other == np.arange(5) + 1 - comm.rank).all()
    with comm.group() as group:  # several for one peer keep their order
        for value in range(4):
            comm.send(full(10 * comm.rank + value), 1 - comm.rank)
        received = [full(-1) for _ in range(4)]
        for each in received:
            comm.recv(each, 1 - comm.rank)
        assert all(type(call) is _nccl.GroupedTransfer for call in group._calls)
    assert [int(each[0]) for each in received] == [10 * (1 - comm.rank) + value for value in range(4)]


def held(ctx):
    """Neither an array that nobody else holds nor memory that a tensor has let go is freed before the end."""
    comm = ctx.communicator()
    with comm.group():
        mine = full(comm.rank, 100_000)
        comm.send(mine, 1 - comm.rank)
        mine.data = torch.empty(0)
        comm.send(full(comm.rank + 5, 100_000), 1 - comm.rank)
        gc.collect()
        junk = [full(77, 100_000) for _ in range(4)]
        received = [torch.empty(100_000) for _ in range(2)]
        for each in received:
            comm.recv(each, 1 - comm.rank)
    assert all(torch.equal(a, full(1 - comm.rank + b, 100_000)) for a, b in zip(received, (0, 5), strict=True)), junk


def mixed(ctx):
    """Calls of every kind in one group, in order."""
    comm = ctx.communicator()
    peer, rank = 1 - comm.rank, comm.rank
    flags, got_flags = torch.tensor([rank == 0, True]), torch.zeros(2, dtype=torch.bool)  # travels as bytes
    total, own, to_self = full(rank + 1), full(rank), full(-1)
    first, second = full(-1), full(-1)
    with comm.group():
        comm.send(full(rank), peer)
        comm.send(flags, peer)
        comm.send(full(rank + 10), peer)
        comm.all_reduce(total)
        comm.send(own, rank)
        comm.recv(first, peer)
        comm.recv(got_flags, peer)
        comm.recv(second, peer)
        comm.recv(to_self, rank)
    assert torch.equal(first, full(peer)) and torch.equal(second, full(peer + 10)) and torch.equal(to_self, own)
    assert got_flags.tolist() == [peer == 0, True] and torch.equal(total, full(3))
    other = torch.empty(100)
    with comm.group():  # all of them asynchronous: never in C
        sent = comm.send(full(rank), peer, async_op=True)
        received = comm.recv(other, peer, async_op=True)
    assert sent.wait() and received.wait() and torch.equal(other, full(peer))
    for first_async in (True, False):
        with pytest.raises(errors.InvalidUsage, match="all blocking or all async_op"):  # noqa: SIM117
            with comm.group():
                comm.send(full(rank), peer, async_op=first_async)
                comm.recv(other, peer, async_op=not first_async)
    exchange(comm, full(rank), other)
    assert torch.equal(other, full(peer))


def left_out(ctx):
    """What a block that raises holds is dropped, and of an inner one only its own."""
    comm = ctx.communicator()
    peer, other = 1 - comm.rank, full(-1)
    with pytest.raises(KeyError):  # noqa: SIM117
        with comm.group():
            comm.send(full(50), peer)
            raise KeyError
    with comm.group():
        comm.send(full(comm.rank), peer)
        with pytest.raises(errors.InvalidArgument):  # noqa: SIM117
            with comm.group():
                comm.send(full(60), peer)
                comm.recv(other, 7)
        with comm.group():
            comm.recv(other, peer)
    assert torch.equal(other, full(peer))
    group = comm.group()
    with group, pytest.raises(errors.InvalidUsage, match="open already"):
        group.__enter__()
    with group:  # again, when it has ended
        comm.send(full(comm.rank), peer)
        comm.recv(other, peer)
    assert torch.equal(other, full(peer))
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with pytest.raises(errors.InvalidArgument, match="read-only|writ"), comm.group():
        comm.recv(read_only, peer)


def two_communicators(ctx):
    one, two = ctx.communicator(), ctx.communicator().split(0)
    peer = 1 - one.rank
    got = [full(-1), full(-1)]
    with one.group():
        two.send(full(20 + one.rank), peer)
        one.send(full(10 + one.rank), peer)
        one.recv(got[0], peer)
        two.recv(got[1], peer)
    assert torch.equal(got[0], full(10 + peer)) and torch.equal(got[1], full(20 + peer))
    totals = full(1), full(2)
    with two.group():
        works = [each.all_reduce(total, async_op=True) for each, total in zip((one, two), totals, strict=True)]
    assert all(work.wait(10) for work in works) and [total[0].item() for total in totals] == [2, 4]
    third = one.split(0)
    ends = (third.close, "inside a group that holds calls"), (third.abort, "send.*aborted"), (int, "aborted")
    for end, text in ends:
        with pytest.raises(errors.InvalidUsage, match=text):  # noqa: SIM117
            with one.group():
                one.send(full(1), peer)
                third.send(full(2), peer)
                end()
                one.recv(got[0], peer)
    exchange(one, full(one.rank), got[0])
    assert torch.equal(got[0], full(peer))
    two.close()


def other_thread(ctx):
    """A thread's call doesn't join another thread's group."""
    comm, second = ctx.communicator(), ctx.communicator().split(0)
    peer, got = 1 - comm.rank, [full(-1), full(-1)]

    def alone():
        if comm.rank:
            second.recv(got[1], peer)
        else:
            second.send(full(30), peer)

    with comm.group():
        comm.send(full(comm.rank), peer)
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join()
        comm.recv(got[0], peer)
    assert torch.equal(got[0], full(peer)) and (comm.rank == 0 or torch.equal(got[1], full(30)))
    second.close()


def differ(ctx):
    """Both ranks get the error, with both sides of it, and can go on."""
    comm = ctx.communicator()
    peer, other = 1 - comm.rank, full(-1)
    for mine in (full(1, 50 + 50 * comm.rank), full(1).to(torch.float64 if comm.rank else torch.float32)):
        with pytest.raises(errors.Mismatch, match="send and receive do not match") as raised:
            exchange(comm, mine, torch.empty_like(mine))
        assert raised.value.peers == (peer,) and raised.value.op in ("send", "recv")
        exchange(comm, full(comm.rank), other)
        assert torch.equal(other, full(peer))


def killed(ctx):
    comm = ctx.new_communicator()
    other = full(-1)
    exchange(comm, full(1), other)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.RemoteError) as raised:
        for _ in range(2):  # the first may find what the other rank has sent
            exchange(comm, full(1), other)
    assert raised.value.peers == (1,)
    comm.abort()


def test_a_rank_that_was_killed():
    run_ranks(killed, 2, deaths=(1,))


def left_by_a_generator(ctx):
    """A generator that is closed in another thread, or a block left twice: no group stays open, and none is started."""
    comm = ctx.communicator()

    def half():
        with comm.group():
            comm.send(full(99), 1 - comm.rank)
            yield

    for ends in (lambda each: each.close(), lambda each: next(each, None)):
        each, raised = half(), []
        next(each)

        def end(each=each, ends=ends, raised=raised):
            try:
                ends(each)
            except errors.InvalidUsage as error:
                raised.append(str(error))

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        other = full(-1)
        if comm.rank == 0:  # in no group: they take place here
            comm.send(full(5), 1)
        else:
            comm.recv(other, 0)
            assert torch.equal(other, full(5))
        assert not _nccl.open_groups
    assert len(raised) == 1 and "entered in another thread" in raised[0]
    ended = comm.group()
    with ended:
        pass
    with comm.group():
        with pytest.raises(errors.InvalidUsage, match="isn't open"):
            ended.__exit__(None, None, None)
        comm.send(full(comm.rank), 1 - comm.rank)
        comm.recv(other, 1 - comm.rank)
    assert torch.equal(other, full(1 - comm.rank))


def every_way(ctx):
    for way in (plain, held, mixed, left_out, two_communicators, other_thread, differ, left_by_a_generator):
        way(ctx)


def test_sends_and_receives_in_groups():
    run_ranks(every_way, 2)
