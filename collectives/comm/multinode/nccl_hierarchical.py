"""Hierarchical all-reduce, reduce-scatter and all-gather on NCCL: inside of nodes and between them.

This is opt-in (``collectives.init(hierarchical=True)``), since NCCL knows the nodes by itself.
`HierarchicalComm` stands in for the binding's communicator, its parent. The parent does what isn't
done in two levels: other operations, groups, averages of integers, and reduce-scatter and
all-gather of ranks that aren't numbered node by node.
"""

from __future__ import annotations

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE
from ...cuda_state import stream_from_address
from ...errors import CollectivesError, InvalidUsage
from ..group import run_grouped
from .comm import NoFastPath
from .topology import Topology

__all__ = ["HierarchicalComm", "enable_hierarchical"]

_AVG, _SUM = OPS["avg"], OPS["sum"]
_INTEGERS = {code for name, code in DTYPES.items() if "int" in name}


def enable_hierarchical(comm) -> None:
    """Make a communicator reduce and gather in two levels from now on.

    Does nothing where there is one level.
    """
    topology = Topology(comm.machines, comm.rank)
    if 1 < len(topology.nodes) < comm.size:
        with comm._device_guard():
            comm._native = HierarchicalComm(comm._native, topology, comm.device)
        comm._fast_path = NoFastPath()


class HierarchicalComm:
    """Communicator of three of the binding's: of all ranks, inside of each node, between nodes.

    ``topology``: each node must have the same number of ranks, else `InvalidUsage`.
    """

    def __init__(self, parent, topology: Topology, device: torch.device):
        if len({len(ranks) for ranks in topology.nodes}) > 1:
            sizes = ", ".join(str(len(ranks)) for ranks in topology.nodes)
            raise InvalidUsage(
                f"hierarchical=True needs as many ranks on each machine, and there are {sizes}: leave it out, or start "
                "the job evenly",
                op="init", rank=parent.rank,
            )  # fmt: skip
        self.parent = parent
        self._topology = topology
        self._device = device
        self._intra_node = parent.split(topology.node, topology.local_rank)
        try:
            self._inter_node = parent.split(topology.local_rank, topology.node)
        except BaseException:
            self._intra_node.abort()
            raise
        self._intra_node_ops: dict[int, int] = {}  # premultiplied sums of `parent` -> those of `_intra_node`
        # On the host, by queue: the calls of one queue run one after another.
        self._scratch: dict[int, torch.Tensor] = {}
        self._replaced_scratch: list[torch.Tensor] = []  # may still be in use

    def __getattr__(self, name: str):
        return getattr(self.parent, name)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self._topology.nodes)

    def all_reduce(self, send, recv, count, dtype, op, stream=0, config=None) -> None:
        """Reduce-scatter inside of nodes, all-reduce between them, all-gather inside."""
        size, width = self._intra_node.size, ITEMSIZE[dtype]
        shard = count // size // 16 * 16
        if not shard or (op == _AVG and dtype in _INTEGERS):
            self.parent.all_reduce(send, recv, count, dtype, op, stream)
            return
        own = recv + self._intra_node.rank * shard * width
        self._intra_node.reduce_scatter(send, own, shard, dtype, self._intra_node_ops.get(op, op), stream)
        self._inter_node.all_reduce(own, own, shard, dtype, _SUM if op in self._intra_node_ops else op, stream)
        self._intra_node.all_gather(own, recv, shard, dtype, stream)
        main = shard * size
        if main < count:
            self.parent.all_reduce(send + main * width, recv + main * width, count - main, dtype, op, stream)

    def reduce_scatter(self, send, recv, recvcount, dtype, op, stream=0, config=None) -> None:
        """Reduce-scatter inside of nodes, once for each node's ranks, then between the nodes."""
        if not self._topology.is_contiguous or not recvcount or (op == _AVG and dtype in _INTEGERS):
            self.parent.reduce_scatter(send, recv, recvcount, dtype, op, stream)
            return
        nbytes = recvcount * ITEMSIZE[dtype]
        scratch = self._get_scratch(nbytes * self._inter_node.size, stream)
        sums = scratch.data_ptr()
        intra_node_op = self._intra_node_ops.get(op, op)

        def reduce_for(node: int) -> None:
            block = send + node * self._intra_node.size * nbytes
            self._intra_node.reduce_scatter(block, sums + node * nbytes, recvcount, dtype, intra_node_op, stream)

        self._run_for_each_node(reduce_for)
        inter_node_op = _SUM if op in self._intra_node_ops else op
        self._inter_node.reduce_scatter(sums, recv, recvcount, dtype, inter_node_op, stream)

    def all_gather(self, send, recv, sendcount, dtype, stream=0, config=None) -> None:
        """All-gather between the nodes, then inside of them, once for each node's ranks."""
        if not self._topology.is_contiguous or not sendcount:
            self.parent.all_gather(send, recv, sendcount, dtype, stream)
            return
        nbytes = sendcount * ITEMSIZE[dtype]
        scratch = self._get_scratch(nbytes * self._inter_node.size, stream)
        blocks = scratch.data_ptr()
        self._inter_node.all_gather(send, blocks, sendcount, dtype, stream)

        def gather_of(node: int) -> None:
            dst = recv + node * self._intra_node.size * nbytes
            self._intra_node.all_gather(blocks + node * nbytes, dst, sendcount, dtype, stream)

        self._run_for_each_node(gather_of)

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
        for native in (self.parent, self._intra_node, self._inter_node):
            native.set_timeout(seconds)

    def wait_for_calls(self) -> None:
        """Wait for the calls of other threads on all levels."""
        for native in (self.parent, self._intra_node, self._inter_node):
            native.wait_for_calls()

    def async_error(self) -> int:
        """Return the first level's error code, or 0 if there is no error."""
        codes = (native.async_error() for native in (self.parent, self._intra_node, self._inter_node))
        return next((code for code in codes if code), 0)

    def abort(self) -> None:
        """End everything in flight on all levels."""
        for native in (self._intra_node, self._inter_node, self.parent):
            if native.handle:
                native.abort()

    def destroy(self) -> None:
        """Free all levels, then raise the first error."""
        failed = None
        for native in (self._intra_node, self._inter_node, self.parent):
            try:
                native.destroy()
            except CollectivesError as error:
                failed = failed or error
        self._scratch.clear()
        self._replaced_scratch.clear()
        if failed is not None:
            raise failed

    def _run_for_each_node(self, call) -> None:
        run_grouped(self.parent.library, [(call, (node,)) for node in range(self._inter_node.size)])

    def _get_scratch(self, nbytes: int, stream: int) -> torch.Tensor:
        """Return scratch memory for the operations of one stream.

        On CUDA it is that stream's own memory: it may be freed after the calls were issued, in a
        capture too. On the host a queue may run the calls later. There it grows by doubling and is
        kept until the end.
        """
        if self._device.type == "cuda":
            with torch.cuda.device(self._device), torch.cuda.stream(stream_from_address(stream, self._device)):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        have = self._scratch.get(stream)
        if have is None or have.numel() < nbytes:
            if have is not None:
                self._replaced_scratch.append(have)
            size = 1 << max(12, (nbytes - 1).bit_length())
            self._scratch[stream] = have = torch.empty(size, dtype=torch.uint8)
        return have
