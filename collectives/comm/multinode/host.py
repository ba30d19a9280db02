"""Collectives of one communicator over several nodes, on host memory.

Inside of nodes our engine runs them, between nodes schedules over TCP connections. Types narrower than fp32
are summed as fp32 on both levels and rounded once, at the end. The leaders compare each call by the
heads of its first messages; inside of a node the engine compares the calls that it is made of, with
a label that says what those don't.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE, dtype_name
from ..algorithms.plan import sums_in_fp32
from ..fingerprint import KINDS, PREMUL
from .connections import NodeConnections
from .hierarchical import HierarchicalCollectives, LevelReduction
from .inter_node import SHORT_BYTES, ScheduledInterNode
from .messages import MessageTransport
from .p2p import P2POp, send_and_receive
from .recorded import RecordedCollectives
from .reduction import ReduceSpec, add_stats, widen
from .scratch import Scratch
from .topology import Topology

__all__ = ["HostCollectives"]

_F32 = DTYPES["float32"]
_SUM, _AVG = OPS["sum"], OPS["avg"]
_MESSAGE_BYTES = 256 << 10  # of long arrays: what a leader sends another one stays in a cache until it is used
# Extra limits: of waits inside of a node for a rank that may wait for another node, and of those between
# nodes. Less than for how long the ranks of a chain of waits follow one another (error_store.py).
_INTRA_NODE_EXTRA_S, _INTER_NODE_EXTRA_S = 0.5, 1.0


class HostCollectives:
    """The collectives of one communicator over several nodes, one call at a time.

    ``intra_node``: the engine's communicator of this node's ranks; ``connections``: to all ranks.
    Arrays are given by address. Each call blocks until its result is there. A call's
    ``fingerprint`` is what the ranks compare. Raises `messages.NodeMismatch`,
    `connections.TransferError` and what the engine raises.
    """

    def __init__(self, intra_node, connections: NodeConnections, topology: Topology):
        self.intra_node = intra_node
        self.library = intra_node.library
        self._topology = topology
        self.sequence = 0  # collectives that were begun
        self._timeout: float | None = None
        self._label: tuple[str | None, str | None] = (None, None)
        self._scratch = Scratch()
        self._everyone = MessageTransport(connections, range(len(topology.locations)), topology.rank)
        self._leaders = None
        inter_node = None
        if topology.is_leader:
            peers = [ranks[topology.local_rank] for ranks in topology.nodes]
            self._leaders = MessageTransport(connections, peers, topology.rank)
            inter_node = ScheduledInterNode(self._leaders, topology, self._leaders.end_call)
        options = {
            "replicated_bytes": SHORT_BYTES, "before_inter_node": self._extend_intra_node_timeout,
            "chunk_bytes": _MESSAGE_BYTES * topology.num_leaders * len(topology.nodes),
        }  # fmt: skip
        self._levels = HierarchicalCollectives(intra_node, inter_node, topology, self._scratch, **options)
        self._recorded = RecordedCollectives(intra_node, connections, self._leaders, topology, **options)

    def begin_call(self, timeout: float | None, label: tuple[str | None, str | None]) -> None:
        """Begin a call.

        ``timeout``: limit of each wait in seconds, None for no limit; ``label``: of the program, see
        `_nccl.Library.label`.
        """
        self._timeout = timeout
        self._label = label
        self.intra_node.set_timeout(timeout)
        # Above the engine's limit: the engine knows more about a cause.
        self._everyone.timeout = None if timeout is None else timeout + _INTER_NODE_EXTRA_S

    def _extend_intra_node_timeout(self) -> None:
        """Extend the engine's limit: ranks here may wait for one that waits for another node."""
        if self._timeout is not None:
            self.intra_node.set_timeout(self._timeout + _INTRA_NODE_EXTRA_S)

    def _run(self, fingerprint, call: Callable, *args):
        """Run a collective, with a comparison of the ranks' calls."""
        self.sequence += 1
        try:
            self.library.label(*_make_label(fingerprint, self._label))  # of the first call inside of the node
            self.intra_node.set_step(self.sequence)  # to some calls no call inside of this node belongs
            if self._leaders is None:
                return call(*args)
            self._leaders.timeout = self._everyone.timeout
            self._leaders.begin_call((self.sequence, *fingerprint))
            result = call(*args)
            self._leaders.end_call()
            return result
        finally:
            self.library.label()

    # ---- Collectives.

    def all_reduce(self, fingerprint, send: int, recv: int, count: int, spec: ReduceSpec, stats_out: int = 0) -> None:
        """Reduce ``count`` elements of all ranks.

        ``stats_out``: address of two doubles, to which the sum of squares and the count of
        non-finite elements of this rank's share of the result are added; 0 for none.
        """

        def reduce(source: int, out: int, count: int, what: LevelReduction) -> tuple[int, int]:
            sums = source if what.dtype != what.out_dtype else out
            recorded = spec.scalar is None and self._recorded.takes(count * ITEMSIZE[what.dtype])
            return (self._recorded if recorded else self._levels).all_reduce(source, sums, out, count, what)

        out, (start, numel) = self._reduce(fingerprint, reduce, send, count, recv, count, spec)
        if stats_out:
            add_stats(out + start * ITEMSIZE[spec.dtype], numel, spec.dtype, stats_out)

    def reduce(self, fingerprint, send: int, recv: int, count: int, spec: ReduceSpec, root: int) -> None:
        """Reduce ``count`` elements of all ranks to rank ``root``."""
        elsewhere = self._scratch.get("elsewhere", count * ITEMSIZE[spec.dtype])
        out = recv if self._topology.rank == root else elsewhere.data_ptr()
        self.all_reduce(fingerprint, send, out, count, spec)

    def reduce_scatter(
        self, fingerprint, send: int, recv: int, count: int, spec: ReduceSpec, stats_out: int = 0
    ) -> None:
        """Reduce all ranks' arrays; block r, of ``count`` elements, is rank r's result.

        ``stats_out``: as in `all_reduce`, of this rank's result.
        """
        total = count * len(self._topology.locations)
        out, _ = self._reduce(fingerprint, self._levels.reduce_scatter, send, total, recv, count, spec)
        if stats_out:
            add_stats(out, count, spec.dtype, stats_out)

    def broadcast(self, fingerprint, send: int, recv: int, nbytes: int, root: int) -> None:
        """Send the root's ``nbytes`` to all ranks."""
        levels = self._recorded if self._recorded.takes(nbytes) else self._levels
        self._run(fingerprint, levels.broadcast, send, recv, nbytes, root)

    def all_gather(self, fingerprint, send: int, recv: int, nbytes: int) -> None:
        """Gather every rank's ``nbytes`` on all ranks, in rank order."""
        self._run(fingerprint, self._levels.all_gather, send, recv, nbytes)

    def send_and_receive(self, ops: list[P2POp]) -> None:
        """Run sends and receives between any two ranks; see `p2p.send_and_receive`."""
        send_and_receive(ops, self.intra_node, self._everyone, self._topology)

    # ---- Sources and results of reductions.

    def _reduce(self, fingerprint, call: Callable, send: int, send_count: int, recv: int, count: int, spec: ReduceSpec):
        """Run a reduction; return (address of a copy of the result, what the level's call returns)."""
        width = ITEMSIZE[spec.dtype]
        out = self._align("out", recv, count * width, width)
        source, what, created_op = self._prepare_source(send, send_count, spec)
        try:
            found = self._run(fingerprint, call, source, out, count, what)
        finally:
            if created_op is not None and self.intra_node.handle:
                self.intra_node.destroy_op(created_op)
        _copy(out, recv, count * width)
        return out, found

    def _prepare_source(self, send: int, count: int, spec: ReduceSpec) -> tuple[int, LevelReduction, int | None]:
        """Return (source, reduction on both levels, op to destroy or None)."""
        intra_op = _SUM if spec.op == _AVG else spec.op
        if sums_in_fp32(spec.dtype, spec.op):
            width = ITEMSIZE[spec.dtype]
            wide = self._scratch.get("wide", 4 * count).data_ptr()
            source = self._align("source", send, count * width, width)
            _copy(send, source, count * width)
            widen(source, wide, count, spec)
            return wide, LevelReduction(_F32, spec.dtype, intra_op, spec.op), None
        if spec.scalar is None:
            return send, LevelReduction(spec.dtype, spec.dtype, intra_op, spec.op), None
        created_op = self.intra_node.create_premul_sum(spec.scalar, spec.dtype)
        return send, LevelReduction(spec.dtype, spec.dtype, created_op, _SUM), created_op

    def _align(self, name: str, address: int, nbytes: int, width: int) -> int:
        """Return an address that the kernels can use: the caller's, or scratch."""
        return self._scratch.get(name, nbytes).data_ptr() if address % width else address


def _make_label(fingerprint, label: tuple[str | None, str | None]) -> tuple[str, str]:
    """Return the label of a call's first call inside of the node: the name, root and dtype, since
    that may be another operation, of bytes, or with another root. ``label``: the program's.
    """
    kind, dtype, _, op, root, _ = fingerprint
    kind_of_sum = {_AVG: " avg", PREMUL: " scaled"}.get(op, "")  # a sum inside of the node
    where = f" root={root}" if root >= 0 else ""
    return f"{label[0] or KINDS[kind]}{kind_of_sum}{where}", label[1] or dtype_name(dtype)


def _copy(source: int, out: int, nbytes: int) -> None:
    if source != out:
        ctypes.memmove(out, source, nbytes)
