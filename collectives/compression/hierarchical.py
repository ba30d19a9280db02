"""Hierarchical compressor: reduce-scatter inside each node, reduce shards between the nodes,
all-gather inside.
"""

from __future__ import annotations

import weakref

import torch

from ..comm.multinode.topology import get_host_hash, group_ranks_by_node
from ..errors import InvalidUsage
from .base import Compressor, NoCompression
from .bucket import Bucket, Scaling

__all__ = ["Hierarchical"]


class Hierarchical(Compressor):
    """Reduces between nodes by another compressor, after a reduce-scatter inside each node.

    All nodes must have the same number of ranks, m; then each byte crosses the network once for m
    ranks instead of m times. On one node, and with one rank per node, this is the other compressor
    alone.
    """

    def __init__(self, inter_node: Compressor):
        self.inter_node = inter_node
        self._levels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> (intra, inter)

    def begin_backward(self):
        self.inter_node.begin_backward()

    def state_dict(self):
        return self.inter_node.state_dict()

    def load_state_dict(self, state):
        self.inter_node.load_state_dict(state)

    def _split_by_node(self, comm):
        """Return the communicators inside this node and between the nodes.

        The first call is a collective.
        """
        if comm not in self._levels:
            own = torch.tensor([get_host_hash()], dtype=torch.int64, device=comm.device)
            nodes = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
            comm.all_gather(nodes, own, algorithm="native")
            nodes = group_ranks_by_node(nodes.tolist())
            sizes = {len(ranks) for ranks in nodes}
            if len(sizes) > 1:
                raise InvalidUsage(
                    f"hierarchical=True needs as many ranks on each machine, and there are {sorted(sizes)}: leave it "
                    "out, or start the job evenly",
                    rank=comm.rank,
                )
            if sizes == {1} or sizes == {comm.size}:
                self._levels[comm] = (None, None)
            else:
                intra = comm.split(next(n for n, ranks in enumerate(nodes) if comm.rank in ranks), comm.rank)
                self._levels[comm] = (intra, comm.split(intra.rank, comm.rank))
        return self._levels[comm]

    def reduce(self, comm, bucket, scaling, *, grad_stats=None):
        intra, inter = self._split_by_node(comm)
        if intra is None:
            return self.inter_node.reduce(comm, bucket, scaling, grad_stats=grad_stats)
        flat = bucket.flat
        shard_numel = flat.numel() // intra.size // 16 * 16
        own = flat[intra.rank * shard_numel : (intra.rank + 1) * shard_numel]
        sent = NoCompression().reduce_scatter(intra, bucket, Scaling(prescale=scaling.prescale), shard_numel)
        after_sum = Scaling(divisor=scaling.divisor, postscale=scaling.postscale)
        if shard_numel:
            sent += self.inter_node.reduce(inter, _part(bucket, own), after_sum, grad_stats=grad_stats)
            intra.all_gather(flat[: intra.size * shard_numel], own)
            sent += (intra.size - 1) * own.nbytes
        remainder = flat[intra.size * shard_numel :]
        if remainder.numel():
            stats = grad_stats if intra.rank == 0 else None
            sent += NoCompression().reduce(inter, _part(bucket, remainder), after_sum, grad_stats=stats)
        return sent


def _part(bucket: Bucket, flat) -> Bucket:
    return Bucket(flat, bucket.params[:1], [0], bucket.index)
