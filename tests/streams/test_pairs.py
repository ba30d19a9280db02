"""Sends and receives of the backend on the simulated GPU: a communicator for each direction between two ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from collectives.comm.lifetime import open_comms
from collectives.errors import Aborted, CollectiveTimeout, InvalidUsage
from tests.backend.groups import over
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

pytestmark = needs_simulation


@over("collectives")
def ring(ctx, rounds):
    """Every rank begins to receive before it sends; tags grow, and open nothing."""
    after, before = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    found, others = [], list(open_comms.values())
    for number in range(rounds):
        got = torch.zeros(3, device=ctx.device)
        works = [dist.irecv(got, before, tag=number)]
        works.append(dist.isend(torch.full((3,), 10.0 * number + ctx.rank, device=ctx.device), after, tag=number))
        for work in works:
            work.wait()
        found.append(got.tolist() == [10.0 * number + before] * 3)
    pairs = [each for each in open_comms.values() if each.device.type == "cuda" and each not in others]
    return all(found), len(pairs), {each.size for each in pairs}


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_that_receives_first(size, tmp_path):
    found = run_ranks(ring, size, tmp_path / "store", 4, device="simulated")
    assert found == [(True, 2, {2})] * size  # one to each neighbour and one from it, and none of all ranks


@over("collectives")
def unlike(ctx):
    """Blocking ones, ones beside a collective, a batch, one that comes late, one that never comes."""
    peer = 1 - ctx.rank
    got = torch.zeros(2, device=ctx.device)
    if ctx.rank == 0:
        dist.send(torch.ones(2, device=ctx.device), peer)
    else:
        dist.recv(got, peer)
        assert got.tolist() == [1, 1]
    unwaited = dist.isend(torch.full((2,), 5.0, device=ctx.device), peer)  # issued by what comes next
    total = torch.ones(1, device=ctx.device)
    dist.all_reduce(total)
    batch = [dist.P2POp(dist.irecv, got, peer), dist.P2POp(dist.isend, total, peer)]
    one = torch.zeros(1, device=ctx.device)
    batch[0].tensor = one
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    dist.recv(got, peer)
    assert (total.item(), one.item(), got.tolist()) == (2, 2, [5, 5])
    unwaited.wait()
    with pytest.raises(InvalidUsage, match="any source"):
        dist.recv(got)
    if ctx.rank == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1") as caught:
            dist.irecv(got, peer).wait(timedelta(seconds=0.2))
        assert (caught.value.op, caught.value.rank, caught.value.peers) == ("recv", 0, (1,))
    dist.barrier()
    return True


def test_other_orders(tmp_path):
    assert all(run_ranks(unlike, 2, tmp_path / "store", device="simulated"))


def destroyed(ctx, path):
    """A receive that never gets its send, and whose communicator the other rank never opens."""
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    dist.all_reduce(torch.ones(1, device=ctx.device))
    work = dist.irecv(torch.zeros(2, device=ctx.device), 1 - ctx.rank) if ctx.rank == 0 else None
    dist.destroy_process_group()
    if work is not None:
        with pytest.raises(Aborted):
            work.wait()
    return True


def test_destroyed_before_it_is_open(tmp_path):
    assert all(run_ranks(destroyed, 2, tmp_path / "store", device="simulated"))
