"""Two levels of any communicator: one inside of each node, one between the nodes."""

from __future__ import annotations

import torch

from ..._nccl import OPS
from ...arrays import TORCH_CODES
from ..arguments import parse_reduction, stream_handle
from ..fingerprint import PREMUL, check_calls, fingerprint_of
from .hierarchical import HierarchicalCollectives, LevelReduction
from .scratch import Scratch
from .topology import Topology, get_host_hash, group_ranks_by_node, verify_even

__all__ = ["NodeLevels", "split_by_node"]

_SUM = OPS["sum"]


class NodeLevels:
    """The communicators of one rank's levels.

    ``comm``: of all ranks; ``intra``: of this node's ranks; ``inter``: of the ranks with this local
    rank; ``topology``: who is where.
    """

    def __init__(self, comm, topology: Topology):
        self.topology = topology
        self.intra = comm.split(topology.node, comm.rank)
        self.inter = comm.split(topology.local_rank, comm.rank)
        self._scratch = Scratch(comm.device)

    def all_reduce(self, comm, array: torch.Tensor, factor: float, inter_node) -> None:
        """Sum an array over the ranks of ``comm``, which has these levels, in place.

        ``factor``: by which this rank's array is multiplied first; ``inter_node``: a level between
        nodes, see `hierarchical`. Blocks on the host, and is ordered on the current stream on CUDA.
        """
        native, dtype, count, address = self.intra._native, TORCH_CODES[array.dtype], array.numel(), array.data_ptr()
        _, scalar = parse_reduction(comm, "sum" if factor == 1.0 else factor, dtype, "all_reduce")
        kind = _SUM if scalar is None else PREMUL
        check_calls(comm, [fingerprint_of("all_reduce", dtype=dtype, count=count, op=kind)])
        collectives = HierarchicalCollectives(native, inter_node, self.topology, self._scratch)
        with comm._device_guard():
            op = _SUM if scalar is None else native.create_premul_sum(*scalar)
            try:
                what = LevelReduction(dtype, dtype, op, _SUM)
                collectives.all_reduce(address, address, address, count, what, stream_handle(comm, None))
            finally:
                if scalar is not None:
                    native.destroy_op(op)


def split_by_node(comm) -> NodeLevels | None:
    """Return the levels of a communicator; None where its ranks are on one node, or one on each.

    A collective. Raises `InvalidUsage` unless each node has the same number of ranks.
    """
    own = torch.tensor([get_host_hash()], dtype=torch.int64, device=comm.device)
    nodes = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather(nodes, own)
    topology = Topology(group_ranks_by_node(nodes.tolist()), comm.rank)
    verify_even(topology)
    return NodeLevels(comm, topology) if 1 < len(topology.nodes) < comm.size else None
