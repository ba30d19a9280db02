"""Frames: messages by which the nodes' leaders verify that all ranks make the same call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...errors import Mismatch
from ..fingerprint import compare
from .gloo import GlooTransport, TransferError
from .scratch import Scratch
from .topology import Topology

__all__ = ["HEAD_BYTES", "HEAD_WORDS", "MAX_PAYLOAD", "FrameExchange", "NodeMismatch"]

HEAD_WORDS = 8  # int64 of a frame's head: sequence number, fingerprint (5), digest of the dtype's name, 0
HEAD_BYTES = 8 * HEAD_WORDS
MAX_PAYLOAD = 8192  # bytes of an array that are sent in the frame itself


class NodeMismatch(Exception):
    """A `Mismatch` between nodes, with the communicator's rank numbers."""

    def __init__(self, error: Mismatch):
        super().__init__(str(error))
        self.error = error


class FrameExchange:
    """Exchanges one frame for each call with the leaders of the same number on the other nodes.

    A frame has a head, which all nodes compare, and at most `MAX_PAYLOAD` bytes of payload.
    ``sequence`` counts the frames.
    """

    def __init__(self, transport: GlooTransport, topology: Topology, scratch: Scratch):
        self._transport = transport
        self._topology = topology
        self._scratch = scratch
        self.sequence = 0

    def exchange(
        self, fingerprint: Sequence[int], limit: float | None, payload: int = 0, nbytes: int = 0, sends=(), receives=()
    ) -> list[int]:
        """Exchange frames, compare their heads, and return the payloads' addresses by node.

        This node's own is among them. ``limit``: seconds, None
        for no limit; ``payload``, ``nbytes``: address and size of this node's payload; ``sends``
        and ``receives``: transfers to start right behind the frames. Blocks until all have come.
        Raises `NodeMismatch` where heads differ, and `TransferError`.
        """
        topology = self._topology
        self.sequence += 1
        room = HEAD_BYTES + MAX_PAYLOAD
        base = self._scratch.address_of("frames", room * (len(topology.nodes) + 1))
        own = base + room * topology.node
        head = (ctypes.c_int64 * HEAD_WORDS)(self.sequence, *fingerprint)
        ctypes.memmove(own, head, HEAD_BYTES)
        if nbytes:
            ctypes.memmove(own + HEAD_BYTES, payload, nbytes)
        for node, _ in topology.leader_peers:
            ctypes.memset(base + room * node, 0, 8)  # its sequence number: nothing has come yet
        # Where calls differ, a frame may be longer than this rank's own: there is room for it.
        started = self._transport.start_transfers(
            [(peer, own, HEAD_BYTES + nbytes) for _, peer in topology.leader_peers],
            [(peer, base + room * node, room) for node, peer in topology.leader_peers],
        )
        try:
            self._transport.wait(started + self._transport.start_transfers(sends, receives), limit)
        except TransferError:
            # A peer with another call may have sent too much, or have closed its connections over
            # what it received.
            self._verify_heads(base, room, head, arrived_only=True)
            raise
        return self._verify_heads(base, room, head)

    def _verify_heads(self, base: int, room: int, head, arrived_only: bool = False) -> list[int]:
        """Raise `NodeMismatch` where heads differ, else return the payloads' addresses by node.

        ``arrived_only``: skip frames that have not come.
        """
        topology = self._topology
        addresses = [base + room * node for node in range(len(topology.nodes))]
        heads = [(ctypes.c_int64 * HEAD_WORDS).from_address(address) for address in addresses]
        if arrived_only:
            heads = [each if each[0] else head for each in heads]
        if any(bytes(each) != bytes(head) for each in heads):
            ranks = [node[topology.local_rank] for node in topology.nodes]
            try:
                compare([[tuple(each[1:6])] for each in heads], topology.node, ranks)
            except Mismatch as error:
                raise NodeMismatch(error) from None
            raise NodeMismatch(Mismatch(
                "the ranks did not make the same call: their arrays have other dtypes, or other calls came before on "
                f"{', '.join(f'rank {r}: call {each[0]}' for r, each in zip(ranks, heads, strict=True))}",
                rank=topology.rank, peers=[peer for _, peer in topology.leader_peers],
            ))  # fmt: skip
        return [address + HEAD_BYTES for address in addresses]
