"""Sends and receives between any two ranks, inside of a node and between nodes.

The engine carries the former, the transport the latter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...arrays import ITEMSIZE
from ...errors import Mismatch
from ..fingerprint import describe
from .frames import HEAD_BYTES, HEAD_WORDS, NodeMismatch
from .gloo import GlooTransport
from .library import EngineGroup
from .topology import Topology

__all__ = ["P2POp", "PointToPoint"]


class P2POp(NamedTuple):
    """One send or receive.

    ``fingerprint``: what both sides compare; ``label``: the dtype's name for messages.
    """

    is_send: bool
    address: int
    count: int
    dtype: int
    peer: int
    fingerprint: tuple[int, ...]
    label: str | None = None


class PointToPoint:
    """Runs batches of sends and receives.

    ``intra_node``: the engine's communicator of this node's ranks.
    """

    def __init__(self, intra_node, transport: GlooTransport, topology: Topology):
        self._intra_node = intra_node
        self._library = intra_node.library
        self._transport = transport
        self._topology = topology

    def run(self, ops: list[P2POp], limit: float | None) -> None:
        """Run sends and receives, and wait for them, at most ``limit`` seconds (None: no limit).

        Those between two ranks are matched in order. Those to other nodes are started first, so
        that no node waits for what another one has yet to send. Raises `NodeMismatch` where the two
        sides differ, and `TransferError`.
        """
        topology = self._topology
        heads, payloads, checks = [], [], []
        local = [op for op in ops if topology.locations[op.peer][0] == topology.node]
        remote = [op for op in ops if topology.locations[op.peer][0] != topology.node]
        sends = [op for op in remote if op.is_send]
        receives = [op for op in remote if not op.is_send]
        start = self._transport.start_transfers
        for op in receives:
            head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
            checks.append((op, head))
            heads += start([], [(op.peer, head.data_ptr(), HEAD_BYTES)])
            payloads += start([], [(op.peer, op.address, op.count * ITEMSIZE[op.dtype])])
        for op in sends:
            head = torch.tensor([0, *op.fingerprint], dtype=torch.int64)
            payloads += start([(op.peer, head.data_ptr(), HEAD_BYTES)], [])
            payloads += start([(op.peer, op.address, op.count * ITEMSIZE[op.dtype])], [])
            checks.append((None, head))  # keeps the head alive
        if local:
            with EngineGroup(self._library):
                for op in local:
                    move = self._intra_node.send if op.is_send else self._intra_node.recv
                    if op.label is not None:
                        self._library.label(None, op.label)
                    move(op.address, op.count, op.dtype, topology.locations[op.peer][1])
        if heads:
            self._transport.wait(heads, limit)
        for op, head in checks:
            theirs = tuple(head[1:].tolist())
            if op is not None and theirs != op.fingerprint:
                raise NodeMismatch(Mismatch(
                    f"the two sides of a message differ:\n  rank {op.peer} sends: {describe(theirs[:5])}\n  rank "
                    f"{topology.rank} expects: {describe(op.fingerprint[:5])}",
                    rank=topology.rank, peers=(op.peer,),
                ))  # fmt: skip
        self._transport.wait(payloads, limit)
