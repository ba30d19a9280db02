"""Sends and receives on the backend "collectives": any order, tags, any source."""

import os
import random
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from collectives.errors import CollectiveTimeout, InvalidArgument, Mismatch, RemoteError
from tests.backend.groups import over
from tests.ranks import Died, run_ranks


def exchanged(ctx):
    """In any order, with tags and from any source."""
    after, before = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    for count in (0, 1, 3, 1 << 20):
        got = torch.empty(count)
        works = [dist.irecv(got, before), dist.isend(torch.full((count,), float(ctx.rank)), after)]
        for work in works:
            work.wait()
        assert (got == before).all()
    tagged = [torch.full((3,), float(10 * ctx.rank + tag)) for tag in range(3)]
    works = [dist.isend(tagged[tag], after, tag=tag) for tag in (2, 0, 1)]
    for tag in (1, 2, 0):
        got = torch.zeros(3)
        dist.recv(got, before, tag=tag)
        assert got.tolist() == [10.0 * before + tag] * 3
    for work in works:
        work.wait()
    if ctx.rank == 0:
        got = torch.zeros(2, 2).t()[:, :1]  # not contiguous
        sources = {dist.recv(got) for _ in range(2 * (ctx.size - 1))}
        assert sources == set(range(1, ctx.size))
    else:
        for _ in range(2):
            dist.send(torch.full((2, 1), float(ctx.rank)), 0)
    dist.barrier()  # or a receive from any rank could take the next message
    got = torch.empty(5)
    operations = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, torch.full((5,), float(ctx.rank)), after)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert (got == before).all()
    # A send that nobody waits for must not keep collectives from going on.
    work = dist.isend(torch.full((1 << 20,), 1.0), after)
    total = torch.ones(1)
    dist.all_reduce(total)
    got = torch.empty(1 << 20)
    future = dist.irecv(got, before).get_future()
    assert (future.wait()[0] == 1).all() and work.wait() and total.item() == ctx.size


def many(ctx, count=200):
    """Random messages of random tags; those of a pair and tag arrive in order."""
    peer, order = 1 - ctx.rank, random.Random(ctx.rank)
    plan = [random.Random(9).randrange(4) for _ in range(count)]
    sends = [dist.isend(torch.tensor([float(i)]), peer, tag=tag) for i, tag in enumerate(plan)]
    posted = [(i, tag) for tag in order.sample(range(4), 4) for i, each in enumerate(plan) if each == tag]
    for i, tag in posted:
        got = torch.zeros(1)
        dist.recv(got, peer, tag=tag)
        assert got.item() == i
    for work in sends:
        work.wait()


def wrong(ctx):
    with pytest.raises((InvalidArgument, ValueError)):
        dist.send(torch.ones(1), ctx.rank)
    with pytest.raises((InvalidArgument, ValueError)):
        dist.group.WORLD.send([torch.ones(1)], 9, 0)
    with pytest.raises(Mismatch, match="count"):
        (dist.send if ctx.rank == 0 else dist.recv)(torch.ones(2 + ctx.rank), 1 - ctx.rank)
    with pytest.raises(CollectiveTimeout, match="tag 5"):
        dist.irecv(torch.ones(1), 1 - ctx.rank, tag=5).wait(timedelta(seconds=0.2))
    got = torch.zeros(1)
    (dist.send if ctx.rank == 0 else dist.recv)(torch.ones(1) if ctx.rank == 0 else got, 1 - ctx.rank)
    dist.barrier()


def alone(ctx):
    """Rank 2 sends to rank 0, which does not receive; rank 1 receives from rank 2, which does not send."""
    group = dist.new_group()
    if ctx.rank:
        group.set_timeout(timedelta(seconds=1))
        text, peer = ("from rank 2 to rank 0", 0) if ctx.rank == 2 else ("from rank 2 to rank 1", 2)
        with pytest.raises(CollectiveTimeout, match=text) as caught:
            dist.send(torch.ones(1), 0, group) if ctx.rank == 2 else dist.recv(torch.ones(1), 2, group)
        assert caught.value.peers == (peer,)
    dist.barrier()


@over("collectives")
def of_three_ranks(ctx):
    exchanged(ctx)
    alone(ctx)


def test_on_three_ranks(tmp_path):
    run_ranks(of_three_ranks, 3, tmp_path / "store")


def killed(ctx, path):
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    tensor = torch.ones(1)
    (dist.send if ctx.rank == 0 else dist.recv)(tensor, 1 - ctx.rank)
    if ctx.rank == 1:
        time.sleep(0.2)
        os._exit(7)
    with pytest.raises(RemoteError, match="rank 1") as caught:
        dist.recv(tensor, 1)
    with pytest.raises(RemoteError):
        dist.recv(tensor, 1, tag=3)  # a channel that the dead rank never opened
    dist.destroy_process_group()
    return caught.value.peers


def test_a_dead_peer_is_named(tmp_path):
    alive, dead = run_ranks(killed, 2, tmp_path / "store", deaths=[1])
    assert alive == (1,) and isinstance(dead, Died)


def both_ways(ctx, rounds, peer):
    """Send and receive by blocking calls, this rank's first; return the sum of what has come."""
    total = 0.0
    for number in range(rounds):
        got = torch.empty(2)
        for call in ("send", "recv") if ctx.rank == 0 else ("recv", "send"):
            if call == "send":
                dist.send(tensor=torch.full((2,), float(number)), dst=peer)
            else:
                dist.recv(got, src=peer)
        total += got[0].item()
    return total


def blocking(ctx):
    """Blocking calls wake no thread."""
    peer = 1 - ctx.rank
    before = set(threading.enumerate())  # a group that is gone may still wait for a peer that never came
    total = both_ways(ctx, 3, peer)
    threads = [
        each.name
        for each in set(threading.enumerate()) - before
        if each.name.startswith(("collectives-send", "collectives-recv"))
    ]
    # Two threads of one channel: who waits behind another caller's transfer isn't left alone.
    sums = []
    callers = [threading.Thread(target=lambda: sums.append(both_ways(ctx, 10, peer))) for _ in range(2)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    # After it, a non-blocking one goes on by itself.
    got = torch.zeros(1)
    works = [dist.irecv(got, peer), dist.isend(torch.ones(1), peer)]
    while not all(each.is_completed() for each in works):
        time.sleep(0.001)
    assert total == 0.0 + 1 + 2 and threads == [] and got.item() == 1
    return sum(sums)


@over("collectives")
def of_two_ranks(ctx):
    found = blocking(ctx)
    many(ctx)
    wrong(ctx)
    return found


def test_on_two_ranks(tmp_path):
    assert sum(run_ranks(of_two_ranks, 2, tmp_path / "store")) == 4 * sum(range(10))
