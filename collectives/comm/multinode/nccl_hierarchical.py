"""Hierarchical all-reduce, reduce-scatter and all-gather on NCCL.

This is opt-in (``collectives.init(hierarchical=True)``), since NCCL knows the nodes by itself.
`HierarchicalComm` stands in for the binding's communicator, its parent. The parent does what isn't
done in two levels: other operations, groups, short arrays, averages of integers, and reduce-scatter
and all-gather of ranks that aren't numbered node by node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE
from ..closing import call_all
from .comm import NoFastPath
from .hierarchical import HierarchicalCollectives, LevelReduction
from .scratch import Scratch
from .topology import Topology, verify_even

__all__ = ["HierarchicalComm", "enable_hierarchical"]

_AVG, _SUM = OPS["avg"], OPS["sum"]
_INTEGERS = {code for name, code in DTYPES.items() if "int" in name}
_UINT8 = DTYPES["uint8"]


def enable_hierarchical(comm) -> None:
    """Make a communicator reduce and gather in two levels from now on.

    Does nothing where there is one level.
    """
    topology = Topology(comm.machines, comm.rank)
    if 1 < len(topology.nodes) < comm.size:
        with comm._device_guard():
            comm._native = HierarchicalComm(comm._native, topology, comm.device)
        comm._fast_path = NoFastPath()


class _NcclInterNode:
    """The level between nodes: NCCL's own collectives among the ranks with one local rank.

    ``native``: their communicator. The reductions are those of `HierarchicalCollectives`' level.
    """

    def __init__(self, native, scratch: Scratch):
        self._native = native
        self._scratch = scratch

    def all_reduce(self, send: int, recv: int, count: int, what: LevelReduction, stream: int) -> None:
        self._native.all_reduce(send, recv, count, what.dtype, what.inter_op, stream)

    def reduce_scatter(self, send: int, recv: int, counts: Sequence[int], what: LevelReduction, stream: int) -> None:
        self._native.reduce_scatter(send, recv, counts[0], what.dtype, what.inter_op, stream)

    def all_gather(
        self, recv: int, nbytes: int, served: Sequence[Sequence[int]], stream: int
    ) -> tuple[dict[int, int], torch.Tensor]:
        """Gather the blocks in scratch, since they are not side by side in ``recv``."""
        ranks = [rank for (rank,) in served]
        memory = self._scratch.get("blocks", nbytes * len(ranks), stream)
        self._native.all_gather(recv + ranks[self._native.rank] * nbytes, memory.data_ptr(), nbytes, _UINT8, stream)
        return {rank: memory.data_ptr() + node * nbytes for node, rank in enumerate(ranks)}, memory


class HierarchicalComm:
    """Communicator of three of the binding's: of all ranks, inside of each node, between nodes.

    ``topology``: each node must have the same number of ranks, else `InvalidUsage`.
    """

    def __init__(self, parent, topology: Topology, device: torch.device):
        verify_even(topology)
        self.parent = parent
        self._topology = topology
        self._intra_node = parent.split(topology.node, topology.local_rank)
        try:
            self._inter_node = parent.split(topology.local_rank, topology.node)
        except BaseException:
            self._intra_node.abort()
            raise
        self._levels = (self._intra_node, self._inter_node, parent)
        self._intra_node_ops: dict[int, int] = {}  # premultiplied sums of `parent` -> those of `_intra_node`
        self._scratch = Scratch(device)
        between = _NcclInterNode(self._inter_node, self._scratch)
        self._collectives = HierarchicalCollectives(self._intra_node, between, topology, self._scratch)

    def __getattr__(self, name: str):
        return getattr(self.parent, name)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self._topology.nodes)

    def all_reduce(self, send, recv, count, dtype, op, stream=0, config=None) -> None:
        """Reduce inside of nodes, between them, and gather inside; see `HierarchicalCollectives`."""
        if not self._topology.shard_numel(count) or (op == _AVG and dtype in _INTEGERS):
            self.parent.all_reduce(send, recv, count, dtype, op, stream)
        else:
            self._collectives.all_reduce(send, recv, recv, count, self._on_levels(dtype, op), stream)

    def reduce_scatter(self, send, recv, recvcount, dtype, op, stream=0, config=None) -> None:
        """Reduce-scatter inside of nodes, once for each node's ranks, then between the nodes."""
        if not self._topology.is_contiguous or not recvcount or (op == _AVG and dtype in _INTEGERS):
            self.parent.reduce_scatter(send, recv, recvcount, dtype, op, stream)
        else:
            self._collectives.reduce_scatter(send, recv, recvcount, self._on_levels(dtype, op), stream)

    def all_gather(self, send, recv, sendcount, dtype, stream=0, config=None) -> None:
        """All-gather inside of nodes, between them, and what has come inside of nodes."""
        if not self._topology.is_contiguous or not sendcount:
            self.parent.all_gather(send, recv, sendcount, dtype, stream)
        else:
            self._collectives.all_gather(send, recv, sendcount * ITEMSIZE[dtype], stream)

    def _on_levels(self, dtype: int, op: int) -> LevelReduction:
        premul = self._intra_node_ops.get(op)
        return LevelReduction(dtype, dtype, op if premul is None else premul, op if premul is None else _SUM)

    def create_premul_sum(self, value, dtype) -> int:
        """Create the op on both levels."""
        op = self.parent.create_premul_sum(value, dtype)
        self._intra_node_ops[op] = self._intra_node.create_premul_sum(value, dtype)
        return op

    def destroy_op(self, op: int) -> None:
        """Free an op of `create_premul_sum`."""
        self._intra_node.destroy_op(self._intra_node_ops.pop(op))
        self.parent.destroy_op(op)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit operations on all levels. Host engine only."""
        for native in self._levels:
            native.set_timeout(seconds)

    def wait_for_calls(self) -> None:
        """Wait for the calls of other threads on all levels."""
        for native in self._levels:
            native.wait_for_calls()

    def async_error(self) -> int:
        """Return the first level's error code, or 0 if there is no error."""
        return next((code for native in self._levels if (code := native.async_error())), 0)

    def abort(self) -> None:
        """End everything in flight on all levels."""
        for native in self._levels:
            if native.handle:
                native.abort()

    def destroy(self) -> None:
        """Free all levels, then raise the first error."""
        call_all([*(native.destroy for native in self._levels), self._scratch.clear])
