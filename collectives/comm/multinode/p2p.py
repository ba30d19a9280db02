"""Sends and receives between any two ranks, inside of a node and between nodes.

The engine carries the former, the transport the latter.
"""

from __future__ import annotations

from typing import NamedTuple

from ..group import run_grouped
from .messages import MessageTransport
from .topology import Topology

__all__ = ["P2POp", "PointToPoint", "list_messages"]


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

    ``intra_node``: the engine's communicator of this node's ranks; ``transport``: to all ranks.
    """

    def __init__(self, intra_node, transport: MessageTransport, topology: Topology):
        self._intra_node = intra_node
        self._transport = transport
        self._topology = topology

    def run(self, ops: list[P2POp]) -> None:
        """Run sends and receives, and wait for them.

        Those between two ranks are matched in order. Those to other nodes are started first, so
        that no node waits for what another one has yet to send. Raises `NodeMismatch` where the two
        sides differ, and `TransferError`.
        """
        transport, local = self._transport, []
        transport.group_start()
        for op in ops:
            if self._topology.locations[op.peer][0] == self._topology.node:
                local.append(op)
                continue
            move = transport.send if op.is_send else transport.recv
            move(op.address, op.count, op.dtype, op.peer, fingerprint=op.fingerprint)
        transport.group_end(meanwhile=lambda: self._run_local(local))

    def _run_local(self, ops: list[P2POp]) -> None:
        calls = []
        for op in ops:
            if op.label is not None:
                calls.append((self._intra_node.library.label, (None, op.label)))
            move = self._intra_node.send if op.is_send else self._intra_node.recv
            calls.append((move, (op.address, op.count, op.dtype, self._topology.locations[op.peer][1])))
        if calls:
            run_grouped(self._intra_node.library, calls)


def list_messages(
    op: str, send: int, recv: int, nbytes: int, root: int, rank: int, size: int
) -> list[tuple[bool, int, int]]:
    """Return a collective's messages on one rank: (is_send, address, peer).

    ``op``: "all_to_all", "gather" or "scatter"; ``nbytes``: of a message. A rank's message to
    itself is left out where it is in place.
    """
    blocks = range(size) if op == "all_to_all" or rank == root else ()
    sends = [(send, root)] if op == "gather" else [(send + r * nbytes, r) for r in blocks]
    receives = [(recv, root)] if op == "scatter" else [(recv + r * nbytes, r) for r in blocks]
    own = [address for address, peer in (*sends, *receives) if peer == rank]
    in_place = len(own) == 2 and own[0] == own[1]
    messages = [(True, *each) for each in sends] + [(False, *each) for each in receives]
    return [each for each in messages if not (in_place and each[2] == rank)]
