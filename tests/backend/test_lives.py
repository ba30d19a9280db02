"""Process groups that are created, destroyed and created again over one store."""

import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives.errors import CollectivesError, CollectiveTimeout
from tests.ranks import run_ranks

LIMIT = datetime.timedelta(seconds=30)


@pytest.fixture
def port():
    """Return the port of a store that outlives the ranks' process groups."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def connect(port):
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)


def lives(ctx, port, plan, backends, beside):
    """Initialise torch.distributed once for each entry of `plan`, the members of a sub-group, and use both."""
    store, default, sub = connect(port), *backends
    for members in plan:
        dist.init_process_group(default, store=store, rank=ctx.rank, world_size=ctx.size, timeout=LIMIT)
        group = dist.new_group(members, backend=sub, timeout=LIMIT)
        count = len(members or range(ctx.size))
        for pg, size in ((dist.group.WORLD, ctx.size), (group, count)):
            if pg is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            x = torch.ones(1)
            dist.all_reduce(x, group=pg)
            assert x.item() == size
            if sub == "collectives" and pg is group:
                dist.monitored_barrier(group=pg)
        if beside:
            with collectives.init() as comm:
                x = torch.ones(1)
                comm.all_reduce(x)
                assert x.item() == ctx.size
        dist.barrier()
        dist.destroy_process_group()


PLANS = {
    "more members": [[0, 1], None],
    "fewer": [None, [0, 1], None],
    "others": [[0, 1], [1, 2], [0, 2], [0, 1]],
    "one": [[1], [0, 1], [2]],
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_another_group_under_the_same_name(port, plan):
    run_ranks(lives, 3, port, plan, ("collectives", "collectives"), False, timeout=60)


def test_beside_the_jobs_communicator(port):
    run_ranks(lives, 2, port, [[0, 1], None], ("collectives", "collectives"), True, timeout=60)


def restarted(ctx, port):
    """Rank 0 lives on; rank 1 is another process in each life of the default group, late in the second one."""
    for life, process in enumerate((1, 2)):
        if ctx.rank in (0, process):
            rank = min(ctx.rank, 1)
            dist.init_process_group("collectives", store=connect(port), rank=rank, world_size=2, timeout=LIMIT)
            for openings in range(2 + life):
                if rank and life and not openings:
                    time.sleep(1)
                with collectives.init(timeout=20) as comm:
                    x = torch.ones(1)
                    comm.all_reduce(x)
                    assert x.item() == 2
            dist.destroy_process_group()
        if life == 0:
            ctx.barrier()
            if ctx.rank == 1:
                os._exit(3)


def test_the_jobs_communicator_with_a_restarted_rank(port):
    run_ranks(restarted, 3, port, timeout=60, deaths={1})


def late_monitored_barrier(ctx, port):
    """In the second life a barrier waits, whatever those of the first one have left in the store."""
    store = connect(port)
    for life in range(2):
        dist.init_process_group("collectives", store=store, rank=ctx.rank, world_size=ctx.size, timeout=LIMIT)
        if life and ctx.rank == 1:
            ctx.barrier()  # it doesn't come
        elif life:
            with pytest.raises(CollectivesError, match="[Rr]ank 1 failed to pass"):
                dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
            ctx.barrier()
        else:
            dist.monitored_barrier()
        dist.destroy_process_group()


def test_monitored_barriers_are_of_one_life(port):
    run_ranks(late_monitored_barrier, 2, port)


def came_in_vain(ctx, port):
    """A rank gives up a group for which the other one comes later; then both begin its life."""
    from collectives.rendezvous.group_life import begin_life

    store = dist.PrefixStore("group", connect(port))
    for first in (1, 0):
        if ctx.rank == first:
            late = f"rank {1 - first} of 2 did not come within 1 s to test"
            with pytest.raises(CollectiveTimeout, match=late) as found:
                begin_life(store, ctx.rank, 2, 1.0, "to test")
            assert found.value.peers == (1 - first,)
        ctx.barrier()
        if ctx.rank == first:
            ctx.barrier()  # the other one comes first, and doesn't take the old request for a new one
            own = begin_life(store, ctx.rank, 2, 30.0, "to test")
        else:
            threading.Timer(0.5, ctx.barrier).start()
            own = begin_life(store, ctx.rank, 2, 30.0, "to test")
        own.set(f"rank{ctx.rank}", str(first))
        assert own.get(f"rank{1 - ctx.rank}") == str(first).encode()
        ctx.barrier()


def test_a_rank_that_came_in_vain(port):
    run_ranks(came_in_vain, 2, port)


def killed_while_it_waits(ctx, port):
    """Rank 1 is killed while it waits for the other one, which does not come to this life."""
    from collectives.rendezvous.group_life import begin_life

    if ctx.rank == 1:
        threading.Timer(0.5, os._exit, (7,)).start()
        begin_life(dist.PrefixStore("group", connect(port)), 1, 2, 30.0, "to test")


def after_it(ctx, port):
    from collectives.rendezvous.group_life import begin_life

    if ctx.rank == 1:
        time.sleep(1)  # rank 0 doesn't begin a life with the process that has ended, and doesn't give this one up
    own = begin_life(dist.PrefixStore("group", connect(port)), ctx.rank, 2, 15.0, "to test")
    own.set(f"rank{ctx.rank}", "x")
    return own.get(f"rank{1 - ctx.rank}")


def test_the_request_of_a_process_that_has_ended(port):
    run_ranks(killed_while_it_waits, 2, port, deaths=[1])
    assert run_ranks(after_it, 2, port) == [b"x", b"x"]


def new_processes(ctx, port, round_number):
    store = connect(port)
    dist.init_process_group("collectives", store=store, rank=ctx.rank, world_size=ctx.size, timeout=LIMIT)
    x = torch.full((1,), float(round_number))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def test_another_number_of_processes(port):
    for number, size in enumerate((3, 2, 4), start=1):
        assert run_ranks(new_processes, size, port, number) == [float(number * size)] * size
