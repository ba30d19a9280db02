"""Sends and receives between any two ranks, inside of a node and between nodes.

The engine carries the former, the transport the latter.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ..group import run_grouped
from .messages import MessageTransport
from .topology import Topology

__all__ = ["P2POp", "list_messages", "send_and_receive"]


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


def send_and_receive(ops: list[P2POp], intra_node, transport: MessageTransport, topology: Topology) -> None:
    """Run sends and receives, and wait for them.

    ``intra_node``: the engine's communicator of this node's ranks; ``transport``: to all ranks.
    Those between two ranks are matched in order. Those to other nodes move on while those inside of
    the node do, so that no node waits for what another one has yet to send; where they fail, those
    inside of the node are aborted 2 s later. Raises `NodeMismatch` where the two sides differ, and
    `TransferError`.
    """
    calls = []  # inside of the node
    transport.group_start()
    for op in ops:
        node, local_rank = topology.locations[op.peer]
        if node != topology.node:
            move = transport.send if op.is_send else transport.recv
            move(op.address, op.count, op.dtype, op.peer, fingerprint=op.fingerprint)
            continue
        if op.label is not None:
            calls.append((intra_node.library.label, (None, op.label)))
        move = intra_node.send if op.is_send else intra_node.recv
        calls.append((move, (op.address, op.count, op.dtype, local_rank)))
    meanwhile = partial(run_grouped, intra_node.library, calls) if calls else None

    def interrupt() -> None:
        if intra_node.handle:
            intra_node.abort()

    transport.group_end(meanwhile, interrupt)


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
