"""Hierarchical collectives of the host engine: inside of nodes and between them.

A reduction has three steps. First each node's ranks reduce: each leader (see `topology.Topology`)
gets its shard of the node's sum. Then the leaders with the same number reduce their shards. Last,
each node's ranks gather the shards. So each element is summed in one order: all ranks get the same
bits, which depend only on the arrays and on which rank is on which node. Of a short array each
leader reduces all, which saves the last step.

The composition knows two levels by their interfaces alone:

- Inside of a node it is a communicator of the binding's, with the node's ranks in the order of the
  topology.
- Between nodes, on leaders, it has ``all_reduce(send, recv, count, what)``, ``reduce_scatter(send,
  recv, counts, what)``, ``all_gather(recv, nbytes, served)`` and ``broadcast(recv, nbytes, root)``.
  `inter_node` has them for any transport with send, recv and group, and says what they do.

Where the level between nodes can do so (its ``meanwhile``), the chunks of a long array go through
the steps one behind the other: while a chunk is on its way between nodes, the next one is reduced
and the one before is gathered inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..._nccl import DTYPES
from ...arrays import ITEMSIZE
from ..group import run_grouped
from .scratch import Scratch
from .topology import Topology

__all__ = ["HierarchicalCollectives", "LevelReduction"]

_UINT8 = DTYPES["uint8"]
_Step = Callable[[int, int], None]  # of (start, length)


class LevelReduction(NamedTuple):
    """A reduction on two levels, as NCCL's codes.

    ``dtype``: of the ranks' arrays and the nodes' sums; ``out_dtype``: of the result; ``intra_op``,
    ``inter_op``: the ops inside of nodes and between them.
    """

    dtype: int
    out_dtype: int
    intra_op: int
    inter_op: int


class HierarchicalCollectives:
    """The collectives of one communicator over several nodes, composed of two levels'.

    ``intra_node``, ``inter_node``: the levels, see the module; ``inter_node`` is not used on a rank
    that is no leader. ``replicated_bytes``: of an array up to this size each leader reduces all;
    ``chunk_bytes``: of an all-reduce's or a broadcast's chunks, 0 for whole arrays;
    ``before_inter_node``: a function to call on each rank between the first step of a call and the
    step between nodes. Arrays are given by address. A call blocks until its result is there.
    """

    def __init__(
        self, intra_node, inter_node, topology: Topology, scratch: Scratch, *, replicated_bytes: int = 0,
        chunk_bytes: int = 0, before_inter_node: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self._intra_node = intra_node
        self._inter_node = inter_node
        self._topology = topology
        self._scratch = scratch
        self._replicated_bytes = replicated_bytes
        self._chunk_bytes = chunk_bytes
        self._before_inter_node = before_inter_node

    # ---- Reductions.

    def all_reduce(self, send: int, sums: int, out: int, count: int, what: LevelReduction) -> tuple[int, int]:
        """Reduce ``count`` elements of all ranks to ``out``.

        ``sums``: address for the node's sums, which may be ``send`` or ``out``. Return (start,
        elements) of this rank's share of the result: the shares of all ranks make up the whole.
        """
        topology, width, out_width = self._topology, ITEMSIZE[what.dtype], ITEMSIZE[what.out_dtype]
        if self._is_replicated(count, width):
            self._intra_node.all_reduce(send, sums, count, what.dtype, what.intra_op)
            self._before_inter_node()
            if topology.is_leader:
                self._inter_node.all_reduce(sums, out, count, what)
            if not topology.all_leaders:
                self._intra_node.broadcast(out, out, count, what.out_dtype, 0)
            return (0, count if topology.node == topology.local_rank == 0 else 0)

        def reduce(start: int, length: int) -> None:
            self._reduce_to_leaders(send + start * width, sums + start * width, length, what)

        def exchange(start: int, length: int, **options) -> None:
            self._inter_node.all_reduce(sums + start * width, out + start * out_width, length, what, **options)

        def gather(start: int, length: int) -> None:
            self._gather_from_leaders(out + start * out_width, length, what.out_dtype)

        self._run_steps(self._chunks(count, width), reduce, exchange, gather)
        start, length = topology.shard(count, topology.local_rank) if topology.is_leader else (0, 0)
        part, numel = topology.chunk(length, topology.node)  # each node's leader has all of the shard
        return start + part, numel

    def reduce_scatter(self, send: int, out: int, count: int, what: LevelReduction) -> None:
        """Reduce all ranks' arrays; block r, of ``count`` elements, is rank r's result."""
        topology, width, out_width = self._topology, ITEMSIZE[what.dtype], ITEMSIZE[what.out_dtype]
        nbytes = count * width
        # By node: the ranks whose blocks this leader serves. It has this node's sums of them.
        served = [topology.ranks_of_leader(m) for m in range(len(topology.nodes))] if topology.is_leader else []
        memory = self._scratch.get("sums", nbytes * sum(map(len, served)))
        sum_of = {rank: memory.data_ptr() + i * nbytes for i, rank in enumerate(r for ranks in served for r in ranks)}
        calls = []
        if topology.is_contiguous:
            for ranks in topology.nodes:
                dst = sum_of[ranks[topology.local_rank]]
                block = send + ranks[0] * nbytes
                calls.append((self._intra_node.reduce_scatter, (block, dst, count, what.dtype, what.intra_op)))
        else:
            for rank in topology.locations:
                dst, leader = sum_of.get(rank, 0), topology.leader_of(rank)
                block = send + rank * nbytes
                calls.append((self._intra_node.reduce, (block, dst, count, what.dtype, what.intra_op, leader)))
        self._run(calls)
        self._before_inter_node()
        mine = served[topology.node] if served else ()
        results = out
        if len(mine) > 1:
            result_memory = self._scratch.get("results", count * out_width * len(mine))
            results = result_memory.data_ptr()
        if mine:
            counts = [count * len(ranks) for ranks in served]
            self._inter_node.reduce_scatter(memory.data_ptr(), results, counts, what)
        if topology.all_leaders:
            return
        calls = []
        for i, rank in enumerate(mine):
            if results != out:
                block, local_rank = results + i * count * out_width, topology.locations[rank][1]
                calls.append((self._intra_node.send, (block, count, what.out_dtype, local_rank)))
        if results != out or not mine:
            leader = topology.leader_of(topology.rank)
            calls.append((self._intra_node.recv, (out, count, what.out_dtype, leader)))
        self._run(calls)

    # ---- Copies.

    def broadcast(self, send: int, recv: int, nbytes: int, root: int) -> None:
        """Send the root's ``nbytes`` to all ranks."""
        topology = self._topology
        root_node, root_local_rank = topology.locations[root]
        is_root_node = topology.node == root_node

        def spread(start: int, length: int) -> None:
            if is_root_node:
                self._intra_node.broadcast(send + start, recv + start, length, _UINT8, root_local_rank)

        if self._is_replicated(nbytes, 1):
            spread(0, nbytes)
            self._before_inter_node()
            if topology.is_leader:
                self._inter_node.broadcast(recv, nbytes, root_node)
            if not is_root_node and not topology.all_leaders:
                self._intra_node.broadcast(recv, recv, nbytes, _UINT8, 0)
            return

        def exchange(start: int, length: int, **options) -> None:
            self._inter_node.broadcast(recv + start, length, root_node, **options)

        def gather(start: int, length: int) -> None:
            if not is_root_node:
                self._gather_from_leaders(recv + start, length, _UINT8)

        self._run_steps(self._chunks(nbytes, 1), spread, exchange, gather)

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        """Gather every rank's ``nbytes`` on all ranks, in rank order."""
        topology = self._topology
        local_rank_of = {rank: local_rank for local_rank, rank in enumerate(topology.local_ranks)}
        self._gather_blocks([topology.local_ranks], recv, nbytes, {topology.rank: send}, local_rank_of)
        self._before_inter_node()
        blocks = {}
        if topology.is_leader:
            served = [topology.ranks_of_leader(m) for m in range(len(topology.nodes))]
            blocks = self._inter_node.all_gather(recv, nbytes, served)
        others = [ranks for m, ranks in enumerate(topology.nodes) if m != topology.node]
        leader_of = {rank: topology.leader_of(rank) for ranks in others for rank in ranks}
        self._gather_blocks(others, recv, nbytes, blocks, leader_of)

    # ---- Chunks.

    def _chunks(self, count: int, width: int) -> list[tuple[int, int]]:
        """Return (start, length) of the chunks that go through the steps one behind the other."""
        step = self._chunk_bytes // width or count
        number = max(1, count // step)  # the last one is longer: each leader has a part of it
        return [(i * step, step if i < number - 1 else count - i * step) for i in range(number)]

    def _run_steps(self, chunks: list[tuple[int, int]], first: _Step, exchange: Callable, last: _Step) -> None:
        """Run three steps on chunks of an array: the second one between nodes, on this leader's shard of a chunk."""
        topology = self._topology
        first(*chunks[0])
        self._before_inter_node()
        for i, (start, length) in enumerate(chunks):

            def meanwhile(i: int = i) -> None:
                if i:
                    last(*chunks[i - 1])
                if i + 1 < len(chunks):
                    first(*chunks[i + 1])

            shard, numel = topology.shard(length, topology.local_rank) if topology.is_leader else (0, 0)
            if not numel:
                meanwhile()
            elif len(chunks) == 1:
                exchange(start + shard, numel)
            else:
                exchange(start + shard, numel, meanwhile=meanwhile)
        last(*chunks[-1])

    # ---- Steps inside of a node.

    def _is_replicated(self, count: int, width: int) -> bool:
        return count * width <= self._replicated_bytes or not self._topology.shard_numel(count)

    def _reduce_to_leaders(self, send: int, sums: int, count: int, what: LevelReduction) -> None:
        """Reduce inside of the node; each leader gets its shard, at its place in ``sums``."""
        topology, width = self._topology, ITEMSIZE[what.dtype]
        calls = []
        if topology.all_leaders:
            numel = topology.shard_numel(count)
            own = sums + topology.local_rank * numel * width
            calls.append((self._intra_node.reduce_scatter, (send, own, numel, what.dtype, what.intra_op)))
        for leader, start, length in self._unequal_shards(count):
            dst = sums + start * width if leader == topology.local_rank else 0
            block = send + start * width
            calls.append((self._intra_node.reduce, (block, dst, length, what.dtype, what.intra_op, leader)))
        self._run(calls)

    def _gather_from_leaders(self, out: int, count: int, dtype: int) -> None:
        """Gather the leaders' shards, each at its place, on all ranks of the node."""
        topology, width = self._topology, ITEMSIZE[dtype]
        calls = []
        if topology.all_leaders:
            numel = topology.shard_numel(count)
            own = out + topology.local_rank * numel * width
            calls.append((self._intra_node.all_gather, (own, out, numel, dtype)))
        for leader, start, length in self._unequal_shards(count):
            address = out + start * width
            calls.append((self._intra_node.broadcast, (address, address, length, dtype, leader)))
        self._run(calls)

    def _unequal_shards(self, count: int) -> list[tuple[int, int, int]]:
        """Return (leader, start, length) of what one reduce-scatter or all-gather does not move: all
        leaders' shards, or, where all ranks are leaders, the last one's elements over the others'.
        """
        topology = self._topology
        last = topology.num_leaders - 1
        if topology.all_leaders:
            rest = topology.shard_numel(count) * topology.num_leaders
            shards = [(last, rest, count - rest)]
        else:
            shards = [(leader, *topology.shard(count, leader)) for leader in range(last + 1)]
        return [shard for shard in shards if shard[2]]

    def _gather_blocks(
        self, nodes: Sequence[Sequence[int]], recv: int, nbytes: int, blocks: dict[int, int], holders: dict[int, int]
    ) -> None:
        """Gather the blocks of some nodes' ranks on all ranks of this node.

        ``blocks``: addresses of those that this rank has; ``holders``: rank -> local rank that has
        its block.
        """
        topology, calls = self._topology, []
        if not nbytes:
            return
        for ranks in nodes:
            if topology.is_contiguous:
                first, block = recv + ranks[0] * nbytes, blocks[ranks[topology.local_rank]]
                if len(ranks) > 1 or block != first:
                    calls.append((self._intra_node.all_gather, (block, first, nbytes, _UINT8)))
                continue
            for rank in ranks:
                place = recv + rank * nbytes
                block = blocks.get(rank, place) if holders[rank] == topology.local_rank else place
                if len(topology.local_ranks) > 1 or block != place:
                    calls.append((self._intra_node.broadcast, (block, place, nbytes, _UINT8, holders[rank])))
        self._run(calls)

    def _run(self, calls: list[tuple]) -> None:
        """Issue calls of the level inside of the node, pairs of a method and its arguments."""
        if len(calls) == 1:
            function, args = calls[0]
            function(*args)
        elif calls:
            run_grouped(self._intra_node.library, calls)
