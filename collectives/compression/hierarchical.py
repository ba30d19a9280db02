"""Two levels: reduce inside of each machine, send between machines only parts of that, and gather inside again."""

from __future__ import annotations

import weakref

import torch

from ..comm.multinode.topology import get_host_hash, group_ranks_by_node
from ..errors import InvalidUsage
from .base import Bucket, Factor, Plain, Wire

__all__ = ["Hierarchical"]


class Hierarchical(Wire):
    """Reduces over machines by another wire, after a reduce-scatter inside of each; all have the same number of ranks.

    So with m ranks a machine, each byte crosses the network once for m ranks and not m times. On one machine, and with
    one rank a machine, it is the other wire alone.
    """

    def __init__(self, between: Wire):
        self.between = between
        self._levels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> (inside, between)

    def begin(self):
        self.between.begin()

    def state_dict(self):
        return self.between.state_dict()

    def load_state_dict(self, state):
        self.between.load_state_dict(state)

    def _over(self, comm):
        """Give the communicators inside of this machine and between the machines; a collective at first."""
        if comm not in self._levels:
            mine = torch.tensor([get_host_hash()], dtype=torch.int64, device=comm.device)
            machines = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
            comm.all_gather(machines, mine, algorithm="native")
            machines = group_ranks_by_node(machines.tolist())
            sizes = {len(ranks) for ranks in machines}
            if len(sizes) > 1:
                raise InvalidUsage(
                    f"hierarchical=True needs as many ranks on each machine, and there are {sorted(sizes)}: leave it "
                    "out, or start the job evenly",
                    rank=comm.rank,
                )
            if sizes == {1} or sizes == {comm.size}:
                self._levels[comm] = (None, None)
            else:
                inside = comm.split(next(m for m, ranks in enumerate(machines) if comm.rank in ranks), comm.rank)
                self._levels[comm] = (inside, comm.split(inside.rank, comm.rank))
        return self._levels[comm]

    def reduce(self, comm, bucket, factor, *, health=None):
        inside, between = self._over(comm)
        if inside is None:
            return self.between.reduce(comm, bucket, factor, health=health)
        flat = bucket.flat
        share = flat.numel() // inside.size // 16 * 16
        own = flat[inside.rank * share : (inside.rank + 1) * share]
        sent = Plain().scatter(inside, bucket, Factor(before=factor.before), share)
        rest = Factor(over=factor.over, after=factor.after)
        if share:
            sent += self.between.reduce(between, _part(bucket, own), rest, health=health)
            inside.all_gather(flat[: inside.size * share], own)
            sent += (inside.size - 1) * own.nbytes
        behind = flat[inside.size * share :]
        if behind.numel():
            sent += Plain().reduce(between, _part(bucket, behind), rest, health=health if inside.rank == 0 else None)
        return sent


def _part(bucket: Bucket, flat) -> Bucket:
    return Bucket(flat, bucket.params[:1], [0], bucket.index)
