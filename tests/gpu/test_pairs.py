"""Sends and receives of the backend outside of a batch on every device: a communicator for each direction of a pair."""

import torch.distributed as dist

from tests.gpu.devices import check, everywhere, in_group

COUNT = 1000


@in_group(backend="collectives")
def ring(rank):
    """Every rank begins to receive before it sends."""
    after, before = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    total = rank.full(0.0, COUNT)
    for number in range(3 if rank.size > 1 else 0):
        got = rank.full(0.0, COUNT)
        works = [dist.irecv(got, before), dist.isend(rank.random(COUNT, seed=number), after)]
        for work in works:
            work.wait()
        total += got
    return total


@everywhere()
def test_a_ring_that_receives_first(device, ranks):
    check(device, ring, ranks, same=False)
