"""Reductions between nodes: leaders with the same number exchange and reduce their nodes' sums.

A leader has a shard of an all-reduce, or the blocks of the ranks that it serves in a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays import ITEMSIZE
from .gloo import GlooTransport
from .reduction import NodeReducer, ReduceSpec
from .scratch import Scratch
from .topology import Topology

__all__ = ["InterNodeReducer"]


class InterNodeReducer:
    """Reduces this leader's part of a reduction over the nodes.

    Of the methods' arguments, ``limit`` is the time limit of a wait in seconds, None for none, and
    ``carry`` the dtype in which the nodes' sums are exchanged.
    """

    def __init__(self, transport: GlooTransport, topology: Topology, scratch: Scratch, reducer: NodeReducer):
        self._transport = transport
        self._topology = topology
        self._scratch = scratch
        self._reducer = reducer

    def plan_shard_exchange(self, work: int, shard: int, step: int) -> tuple[list, list, list]:
        """Return (addresses of the nodes' sums of this leader's chunk, sends, receives).

        ``work``: address of this node's sum of the shard; ``shard``: its elements; ``step``: bytes
        of one.
        """
        topology = self._topology
        chunks = self._chunks_to_reduce(shard)
        start, length = chunks[topology.node]
        room = -(-length * step // 64) * 64
        theirs = self._scratch.address_of("theirs", room * len(chunks))
        sources = [theirs + m * room for m in range(len(chunks))]
        sources[topology.node] = work + start * step
        sends = [(peer, work + chunks[m][0] * step, chunks[m][1] * step) for m, peer in topology.leader_peers]
        return sources, sends, [(peer, sources[m], length * step) for m, peer in topology.leader_peers]

    def _chunks_to_reduce(self, shard: int) -> list[tuple[int, int]]:
        """Return the chunk, (start, elements), of a shard that each node reduces.

        Of two nodes both reduce the whole shard, which saves the exchange of results. Of more nodes
        each reduces its own chunk.
        """
        topology = self._topology
        if len(topology.nodes) == 2:
            return [(0, shard)] * 2
        return [topology.chunk(shard, m) for m in range(len(topology.nodes))]

    def reduce_shard(
        self, sources: list[int], out: int, shard: int, carry: int, spec: ReduceSpec, limit: float | None
    ) -> tuple[int, int]:
        """Reduce this leader's shard to ``out``.

        Return (address, elements) of the part that was made here.
        """
        topology, width = self._topology, ITEMSIZE[spec.dtype]
        chunks = self._chunks_to_reduce(shard)
        start, length = chunks[topology.node]
        self._reducer.reduce(sources, out + start * width, length, carry, spec)
        if len(chunks) == 2:  # both nodes have all of it; a half counts as made here
            start, length = topology.chunk(shard, topology.node)
            return out + start * width, length
        self._transport.exchange(
            [(peer, out + start * width, length * width) for _, peer in topology.leader_peers],
            [(peer, out + chunks[m][0] * width, chunks[m][1] * width) for m, peer in topology.leader_peers],
            limit,
        )
        return out + start * width, length

    def reduce_blocks(
        self, served: Sequence[Sequence[int]], sum_of: dict[int, int], out: int, count: int, carry: int,
        spec: ReduceSpec, limit: float | None,
    ) -> dict[int, int]:  # fmt: skip
        """Reduce the blocks, of ``count`` elements, of the local ranks that this leader serves.

        ``served``: the ranks of each node that this leader's number serves; ``sum_of``: rank ->
        address of this node's sum of its block; ``out``: where this rank's own result goes. Return
        the addresses of the results by rank.
        """
        topology, width, nbytes = self._topology, ITEMSIZE[spec.dtype], count * ITEMSIZE[carry]
        mine = topology.ranks_of_leader(topology.node)
        theirs = self._scratch.address_of("theirs", nbytes * len(mine) * len(topology.nodes))
        blocks_of = {m: theirs + m * len(mine) * nbytes for m in range(len(topology.nodes))}
        self._transport.exchange(
            [(peer, sum_of[served[m][0]], nbytes * len(served[m])) for m, peer in topology.leader_peers if served[m]],
            [(peer, blocks_of[m], nbytes * len(mine)) for m, peer in topology.leader_peers],
            limit,
        )
        blocks_of[topology.node] = sum_of[mine[0]]
        scratch = self._scratch.address_of("results", count * width * len(mine))
        results = {}
        for i, rank in enumerate(mine):
            results[rank] = out if rank == topology.rank else scratch + i * count * width
            sources = [blocks_of[m] + i * nbytes for m in sorted(blocks_of)]
            self._reducer.reduce(sources, results[rank], count, carry, spec)
        return results
