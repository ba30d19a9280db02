"""Hierarchical collectives on host memory: our engine inside of nodes, Gloo between them.

A reduction has three steps. First the engine reduces inside of each node: each leader (see
`topology.Topology`) gets its shard of the node's sum. Then the leaders with the same number
exchange their shards: each one sums its chunk of the shard in the order of the nodes and sends the
result to the others (of two nodes each sums the whole shard). Last, the shards are gathered inside
of each node.

So each element is summed in one order: all ranks get the same bits, which depend only on the arrays
and on which rank is on which node. Types narrower than fp32 are exchanged as fp32 and rounded once,
at the end.

Each call begins with a frame between the leaders, with the call's fingerprint and small arrays.
"""

from __future__ import annotations

import ctypes

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE
from .frames import MAX_PAYLOAD, FrameExchange
from .gloo import GlooTransport
from .inter_node import InterNodeReducer
from .library import EngineGroup
from .p2p import P2POp, PointToPoint
from .reduction import NodeReducer, ReduceSpec
from .scratch import Scratch
from .topology import Topology

__all__ = ["HierarchicalCollectives"]

_F32, _UINT8 = DTYPES["float32"], DTYPES["uint8"]
_SUM, _AVG = OPS["sum"], OPS["avg"]
_INTRA_NODE_EXTRA_S = 3.0  # extra limit of waits inside of a node for a rank that may wait for another node


class HierarchicalCollectives:
    """The collectives of one communicator over several nodes, one call at a time.

    ``intra_node``: the engine's communicator of this node's ranks; ``transport``: the connections
    to all ranks. Arrays are given by address. Each call blocks until its result is there. A call's
    ``fingerprint`` is what the ranks compare. Raises `frames.NodeMismatch`, `gloo.TransferError`
    and what the engine raises.
    """

    def __init__(self, intra_node, transport: GlooTransport, topology: Topology):
        self.intra_node = intra_node
        self.transport = transport
        self.topology = topology
        self.library = intra_node.library
        self.timeout: float | None = None
        self._scratch = Scratch()
        self._frames = FrameExchange(transport, topology, self._scratch)
        self._p2p = PointToPoint(intra_node, transport, topology)
        self._reducer = NodeReducer(len(topology.locations))
        self._inter_node = InterNodeReducer(transport, topology, self._scratch, self._reducer)

    @property
    def sequence(self) -> int:
        """The number of frames that this rank has exchanged."""
        return self._frames.sequence

    # ---- Reductions.

    def all_reduce(self, fingerprint, send: int, recv: int, count: int, spec: ReduceSpec, stats_out: int = 0) -> None:
        """Reduce ``count`` elements of all ranks.

        ``stats_out``: address of two doubles, to which the sum of squares and the count of
        non-finite elements of the results that this rank has made are added; 0 for none.
        """
        topology, width = self.topology, ITEMSIZE[spec.dtype]
        out = self._aligned_output(recv, count * width, width)
        source, work, carry, op, created_op = self._prepare_source(send, out, count, spec)
        step = ITEMSIZE[carry]
        shard = 0 if count * step <= MAX_PAYLOAD else topology.shard_numel(count)
        main = shard * topology.num_leaders
        tail = count - main
        try:
            if tail or not main:
                self.intra_node.all_reduce(source + main * step, work + main * step, tail, carry, op)
            if main:
                self._reduce_scatter_shards(source, work, shard, carry, op)
        finally:
            if created_op is not None:
                self.intra_node.destroy_op(created_op)
        parts = []
        self._extend_intra_node_timeout()
        if topology.is_leader:
            start = topology.local_rank * shard
            sources, sends, receives = [], [], []
            if main:
                sources, sends, receives = self._inter_node.plan_shard_exchange(work + start * step, shard, step)
            payload = work + main * step, tail * step
            frames = self._frames.exchange(fingerprint, self._limit, *payload, sends, receives)
            self._reducer.reduce(frames, out + main * width, tail, carry, spec)
            if topology.node == topology.local_rank == 0:
                parts.append((out + main * width, tail))
            if main:
                part = self._inter_node.reduce_shard(sources, out + start * width, shard, carry, spec, self._limit)
                parts.append(part)
        if main:
            if topology.all_leaders:
                self.intra_node.all_gather(out + topology.local_rank * shard * width, out, shard, spec.dtype)
            else:
                leaders = range(topology.num_leaders)
                self._broadcast_chunks((out + j * shard * width, shard * width, j) for j in leaders)
        if tail and not topology.all_leaders:
            self.intra_node.broadcast(out + main * width, out + main * width, tail, spec.dtype, 0)
        self._copy_output(out, recv, count * width)
        if stats_out:
            self._reducer.add_stats(parts, spec.dtype, stats_out)

    def reduce(self, fingerprint, send: int, recv: int, count: int, spec: ReduceSpec, root: int) -> None:
        """Reduce ``count`` elements of all ranks to rank ``root``."""
        is_root = self.topology.rank == root
        out = recv if is_root else self._scratch.address_of("elsewhere", count * ITEMSIZE[spec.dtype])
        self.all_reduce(fingerprint, send, out, count, spec)

    def reduce_scatter(
        self, fingerprint, send: int, recv: int, count: int, spec: ReduceSpec, stats_out: int = 0
    ) -> None:
        """Reduce all ranks' arrays; block r, of ``count`` elements, is rank r's result.

        ``stats_out``: as in `all_reduce`.
        """
        topology, width = self.topology, ITEMSIZE[spec.dtype]
        size = len(topology.locations)
        out = self._aligned_output(recv, count * width, width)
        source, _, carry, op, created_op = self._prepare_source(send, 0, count * size, spec)
        step = ITEMSIZE[carry]
        nbytes = count * step
        # On a leader, by node: this node's own sums of the blocks of that node's ranks that the
        # leader serves.
        served = [topology.ranks_of_leader(m) for m in range(len(topology.nodes))] if topology.is_leader else []
        sums = self._scratch.address_of("sums", nbytes * sum(map(len, served)))
        sum_of = {rank: sums + i * nbytes for i, rank in enumerate(r for ranks in served for r in ranks)}
        try:
            with EngineGroup(self.library):
                if topology.is_contiguous:
                    for ranks in topology.nodes:
                        dst = sum_of[ranks[topology.local_rank]]
                        self.intra_node.reduce_scatter(source + ranks[0] * nbytes, dst, count, carry, op)
                else:
                    for rank in range(size):
                        leader = topology.leader_of(rank)
                        block = source + rank * nbytes
                        self.intra_node.reduce(block, sum_of.get(rank, 0), count, carry, op, leader)
        finally:
            if created_op is not None:
                self.intra_node.destroy_op(created_op)
        self._extend_intra_node_timeout()
        results = {}
        if topology.is_leader:
            self._frames.exchange(fingerprint, self._limit)
            results = self._inter_node.reduce_blocks(served, sum_of, out, count, carry, spec, self._limit)
        if not topology.all_leaders:
            with EngineGroup(self.library):
                for local_rank, rank in enumerate(topology.local_ranks):
                    leader = topology.leader_of(rank)
                    if leader != local_rank and topology.local_rank == leader:
                        self.intra_node.send(results[rank], count, spec.dtype, local_rank)
                    if leader != local_rank and topology.local_rank == local_rank:
                        self.intra_node.recv(out, count, spec.dtype, leader)
        self._copy_output(out, recv, count * width)
        if stats_out:
            self._reducer.add_stats([(out, count)], spec.dtype, stats_out)

    # ---- Copies.

    def broadcast(self, fingerprint, send: int, recv: int, nbytes: int, root: int) -> None:
        """Send the root's ``nbytes`` to all ranks."""
        topology = self.topology
        root_node, root_local_rank = topology.locations[root]
        is_root_node = topology.node == root_node
        if is_root_node:
            self.intra_node.broadcast(send, recv, nbytes, _UINT8, root_local_rank)
        small = nbytes <= MAX_PAYLOAD
        self._extend_intra_node_timeout()
        if topology.is_leader:
            payload = (recv, nbytes) if small else (0, 0)
            frames = self._frames.exchange(fingerprint, self._limit, *payload)
            if small and not is_root_node:
                ctypes.memmove(recv, frames[root_node], nbytes)
            if not small:
                start, length = topology.chunk(nbytes, topology.local_rank, topology.num_leaders)
                self._broadcast_between_nodes(recv + start, length, root_node)
        if not is_root_node and not (small and topology.all_leaders):
            if small:
                self.intra_node.broadcast(recv, recv, nbytes, _UINT8, 0)
            else:
                leaders = range(topology.num_leaders)
                chunks = [topology.chunk(nbytes, j, topology.num_leaders) for j in leaders]
                self._broadcast_chunks((recv + start, length, j) for j, (start, length) in enumerate(chunks))

    def all_gather(self, fingerprint, send: int, recv: int, nbytes: int) -> None:
        """Gather every rank's ``nbytes`` on all ranks, in rank order."""
        topology = self.topology
        own = recv + topology.rank * nbytes
        if own != send:
            ctypes.memmove(own, send, nbytes)
        self._gather_blocks([topology.local_ranks], nbytes, recv, lambda rank: topology.locations[rank][1])
        self._extend_intra_node_timeout()
        if topology.is_leader:
            mine = topology.ranks_of_leader(topology.node)
            most = max(len(topology.ranks_of_leader(m)) for m in range(len(topology.nodes)))
            if nbytes * most <= MAX_PAYLOAD:
                packed = self._scratch.address_of("packed", MAX_PAYLOAD)
                for i, rank in enumerate(mine):
                    ctypes.memmove(packed + i * nbytes, recv + rank * nbytes, nbytes)
                frames = self._frames.exchange(fingerprint, self._limit, packed, len(mine) * nbytes)
                for m, _ in topology.leader_peers:
                    for i, rank in enumerate(topology.ranks_of_leader(m)):
                        ctypes.memmove(recv + rank * nbytes, frames[m] + i * nbytes, nbytes)
            else:
                self._frames.exchange(fingerprint, self._limit)
                peers = topology.leader_peers
                sends = [(peer, recv + rank * nbytes, nbytes) for _, peer in peers for rank in mine]
                receives = [
                    (peer, recv + rank * nbytes, nbytes) for m, peer in peers for rank in topology.ranks_of_leader(m)
                ]
                self.transport.exchange(sends, receives, self._limit)
        others = [ranks for m, ranks in enumerate(topology.nodes) if m != topology.node]
        self._gather_blocks(others, nbytes, recv, topology.leader_of)

    def send_and_receive(self, ops: list[P2POp]) -> None:
        """Run sends and receives between any two ranks; see `p2p.PointToPoint.run`."""
        self._p2p.run(ops, self._limit)

    # ---- Steps.

    @property
    def _limit(self) -> float | None:
        """The limit in seconds of a wait for another node.

        It is above the engine's limit: the engine knows more about a cause.
        """
        return None if self.timeout is None else self.timeout + 1.0

    def begin_call(self, timeout: float | None) -> None:
        """Begin a call. ``timeout``: limit of each wait in seconds, None for no limit."""
        self.timeout = timeout
        self.intra_node.set_timeout(timeout)

    def _extend_intra_node_timeout(self) -> None:
        """Extend the engine's limit: ranks here may wait for one that waits for another node.

        Called after the first step of a call.
        """
        if self.timeout is not None:
            self.intra_node.set_timeout(self.timeout + _INTRA_NODE_EXTRA_S)

    def _prepare_source(self, send: int, work: int, count: int, spec: ReduceSpec):
        """Return (source, address for sums, their dtype, op inside of the node, op to destroy).

        The last is None where no op was created.
        """
        width = ITEMSIZE[spec.dtype]
        if spec.needs_float32:
            wide = self._scratch.address_of("wide", 4 * count)
            source = send
            if send % width:
                source = self._scratch.address_of("copy", count * width)
                ctypes.memmove(source, send, count * width)
            self._reducer.widen(source, wide, count, spec)
            return wide, wide, _F32, _SUM if spec.op == _AVG else spec.op, None
        if spec.scalar is not None:
            created_op = self.intra_node.create_premul_sum(spec.scalar, spec.dtype)
            return send, work, spec.dtype, created_op, created_op
        return send, work, spec.dtype, _SUM if spec.op == _AVG else spec.op, None

    def _reduce_scatter_shards(self, source: int, work: int, shard: int, dtype: int, op: int) -> None:
        """Reduce inside of the node; leader j gets shard j, of ``shard`` elements."""
        topology, nbytes = self.topology, shard * ITEMSIZE[dtype]
        if topology.all_leaders:
            self.intra_node.reduce_scatter(source, work + topology.local_rank * nbytes, shard, dtype, op)
            return
        with EngineGroup(self.library):
            for j in range(topology.num_leaders):
                dst = work + j * nbytes if j == topology.local_rank else 0
                self.intra_node.reduce(source + j * nbytes, dst, shard, dtype, op, j)

    def _broadcast_between_nodes(self, address: int, nbytes: int, root_node: int) -> None:
        """Broadcast this leader's chunk between the nodes.

        Each node gets a part of it from the root's node, then all parts from all nodes.
        """
        topology = self.topology
        parts = [topology.chunk(nbytes, m) for m in range(len(topology.nodes))]
        places = [(address + begin, size) for begin, size in parts]
        own = places[topology.node]
        is_root_node = topology.node == root_node
        if is_root_node:
            self.transport.exchange([(peer, *places[m]) for m, peer in topology.leader_peers], [], self._limit)
        else:
            root_peer = topology.nodes[root_node][topology.local_rank]
            self.transport.exchange([], [(root_peer, *own)], self._limit)
        sends = [(peer, *own) for m, peer in topology.leader_peers if m != root_node]
        receives = [] if is_root_node else [(peer, *places[m]) for m, peer in topology.leader_peers]
        self.transport.exchange(sends, receives, self._limit)

    def _gather_blocks(self, nodes, nbytes: int, recv: int, holder_of) -> None:
        """All-gather the blocks of some nodes' ranks inside of this node.

        ``holder_of``: rank -> local rank with it.
        """
        topology = self.topology
        if len(topology.local_ranks) == 1 or not nbytes:
            return
        with EngineGroup(self.library):
            for ranks in nodes:
                if topology.is_contiguous:
                    first = recv + ranks[0] * nbytes
                    self.intra_node.all_gather(first + topology.local_rank * nbytes, first, nbytes, _UINT8)
                    continue
                for rank in ranks:
                    block = recv + rank * nbytes
                    self.intra_node.broadcast(block, block, nbytes, _UINT8, holder_of(rank))

    def _broadcast_chunks(self, chunks) -> None:
        """Broadcast chunks, each (address, bytes, local rank that has it), inside of this node."""
        if len(self.topology.local_ranks) > 1:
            with EngineGroup(self.library):
                for address, nbytes, local_rank in chunks:
                    self.intra_node.broadcast(address, address, nbytes, _UINT8, local_rank)

    def _aligned_output(self, address: int, nbytes: int, width: int) -> int:
        """Return an address for results that the kernels can use.

        It is the caller's, or scratch until `_copy_output`.
        """
        return self._scratch.address_of("out", nbytes) if address % width else address

    def _copy_output(self, out: int, recv: int, nbytes: int) -> None:
        if out != recv:
            ctypes.memmove(recv, out, nbytes)
