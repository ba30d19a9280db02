"""Hierarchical compressor: another compressor between the nodes, the engine's sums inside of each."""

from __future__ import annotations

import weakref

from ..comm.multinode.hierarchical import LevelReduction
from ..comm.multinode.levels import NodeLevels, split_by_node
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
        self._levels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> NodeLevels or None

    def begin_backward(self):
        self.inter_node.begin_backward()

    def state_dict(self):
        return self.inter_node.state_dict()

    def load_state_dict(self, state):
        self.inter_node.load_state_dict(state)

    def reduce(self, comm, bucket, scaling, *, grad_stats=None):
        if comm not in self._levels:
            self._levels[comm] = split_by_node(comm)
        levels = self._levels[comm]
        if levels is None:
            return self.inter_node.reduce(comm, bucket, scaling, grad_stats=grad_stats)
        inter_node = _CompressedInterNode(self.inter_node, levels, bucket, scaling, grad_stats)
        levels.all_reduce(comm, bucket.flat, scaling.prescale, inter_node)
        return inter_node.nbytes_sent


class _CompressedInterNode:
    """The level between nodes of one bucket's all-reduce: a compressor on this rank's part of it."""

    def __init__(self, compressor: Compressor, levels: NodeLevels, bucket: Bucket, scaling: Scaling, grad_stats):
        self.nbytes_sent = 0
        self._compressor = compressor
        self._levels = levels
        self._bucket = bucket
        self._scaling = Scaling(divisor=scaling.divisor, postscale=scaling.postscale)
        self._grad_stats = grad_stats

    def all_reduce(self, send: int, recv: int, count: int, what: LevelReduction, stream: int) -> None:
        """Reduce a part of the bucket, in place; all of a short bucket is sent unrounded."""
        flat, intra = self._bucket.flat, self._levels.intra
        start = (recv - flat.data_ptr()) // flat.element_size()
        part = Bucket(flat[start : start + count], self._bucket.params[:1], [0], self._bucket.index)
        whole = count == flat.numel()
        compressor = NoCompression() if whole else self._compressor
        stats = None if whole and intra.rank else self._grad_stats
        self.nbytes_sent += compressor.reduce(self._levels.inter, part, self._scaling, grad_stats=stats)
        self.nbytes_sent += 2 * (intra.size - 1) * part.flat.nbytes // (intra.size if whole else 1)
