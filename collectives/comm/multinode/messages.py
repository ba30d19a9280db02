"""Transport between nodes on the host: send, recv and group over Gloo's connections.

A message may begin with a head, the fingerprint of its call, which the receiver compares with its
own. A message with a head and at most `EAGER_BYTES` of data is one message of Gloo's; a longer one
is two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...arrays import ITEMSIZE
from ...errors import Mismatch
from ..fingerprint import compare, describe
from .gloo import DATA_TAG, LATE_TAG, GlooConnections, TransferError
from .scratch import Scratch

__all__ = ["EAGER_BYTES", "MessageTransport", "NodeMismatch"]

EAGER_BYTES = 8192
_HEAD_WORDS = 8  # int64 of a head: number of the call, fingerprint (5), digest of the dtype's name, 1 for "has come"
_HEAD_BYTES = 8 * _HEAD_WORDS
_Head = ctypes.c_int64 * _HEAD_WORDS
_ROOM = _HEAD_BYTES + EAGER_BYTES


class NodeMismatch(Exception):
    """A `Mismatch` between nodes, with the communicator's rank numbers."""

    def __init__(self, error: Mismatch):
        super().__init__(str(error))
        self.error = error


class _Message(NamedTuple):
    rank: int  # at the other end
    address: int
    nbytes: int
    head: tuple[int, ...] | None


class MessageTransport:
    """Sends and receives between some ranks of a communicator, as the binding's communicators do.

    ``ranks``: the communicator's rank of each peer, this rank among them; ``rank``: this rank. A
    group's messages are started together, those between two ranks arrive in order, and the end of
    the outermost group blocks until all have come, at most ``timeout`` seconds (None: no limit).
    It raises `NodeMismatch` where heads differ, and `TransferError`. `library` is what has the
    groups: the transport itself.
    """

    def __init__(self, connections: GlooConnections, ranks: Sequence[int], rank: int):
        self.library = self
        self.timeout: float | None = None
        self._connections = connections
        self._ranks = tuple(ranks)
        self._others = sorted(set(ranks) - {rank})
        self._rank = rank
        self._scratch = Scratch()
        self._depth = 0
        self._sends: list[_Message] = []
        self._receives: list[_Message] = []
        # What `begin_call` has set, until a group has carried it: the head, and the ranks to which it
        # is still to be sent, and from which it is still to come.
        self._call_head: tuple[int, ...] | None = None
        self._due_sends: set[int] = set()
        self._due_receives: set[int] = set()

    # ---- Groups of messages.

    def group_start(self) -> None:
        """Collect messages up to the matching `group_end`."""
        self._depth += 1

    def send(self, address: int, count: int, dtype: int, peer: int, stream: int = 0, fingerprint=None) -> None:
        """Send to a peer. With ``fingerprint`` the message has a head."""
        self._add(self._sends, self._due_sends, address, count * ITEMSIZE[dtype], self._ranks[peer], fingerprint)

    def recv(self, address: int, count: int, dtype: int, peer: int, stream: int = 0, fingerprint=None) -> None:
        """Receive from a peer. With ``fingerprint`` the message has a head."""
        self._add(self._receives, self._due_receives, address, count * ITEMSIZE[dtype], self._ranks[peer], fingerprint)

    def _add(self, messages: list, due: set[int], address: int, nbytes: int, rank: int, fingerprint) -> None:
        head = None
        if rank in due:
            due.remove(rank)
            head = self._call_head
        elif fingerprint is not None:
            head = (0, *fingerprint, 1)
        messages.append(_Message(rank, address, nbytes, head))

    def group_end(self, meanwhile: Callable[[], None] | None = None) -> None:
        """End a group. The outermost end starts its messages and waits for them.

        ``meanwhile``: a function to call in between.
        """
        self._depth -= 1
        if self._depth:
            return
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        verify = _verify_messages
        if self._call_head is not None:
            sends += [_Message(rank, 0, 0, self._call_head) for rank in self._others if rank in self._due_sends]
            receives += [_Message(rank, 0, 0, self._call_head) for rank in self._others if rank in self._due_receives]
            verify = _verify_calls
            self._call_head = None
            self._due_sends.clear()
            self._due_receives.clear()
        self._exchange(sends, receives, meanwhile, verify)

    def group_cancel(self) -> None:
        """Drop the open group."""
        self._depth, self._sends, self._receives = 0, [], []

    # ---- Calls that all peers make.

    def begin_call(self, fingerprint: Sequence[int]) -> None:
        """Compare this rank's call with all peers' by heads of the next group's messages.

        ``fingerprint``: the call's number comes first. A peer to which the group has no message
        gets the head alone.
        """
        self._call_head = (*fingerprint, 1)
        self._due_sends.update(self._others)
        self._due_receives.update(self._others)

    def end_call(self) -> None:
        """End a call: exchange heads now if no group has done it. Blocks as `group_end` does."""
        if self._call_head is not None:
            self.group_start()
            self.group_end()

    # ---- The exchange.

    def _exchange(self, sends, receives, meanwhile, verify) -> None:
        # Gloo ends the process where more comes than what a receive has room for. So receives from a rank
        # begin, but for heads and what comes with them, when its call is known to be the same.
        heads, payloads, places, late = [], [], [], []
        compared = {message.rank for message in receives if message.head is not None}
        start = self._connections.start_transfer
        memory = self._scratch.get("slots", _ROOM * (len(sends) + len(receives)))
        slot = memory.data_ptr()
        for message in receives:
            rank, address, nbytes, head = message
            if head is not None:
                ctypes.memset(slot, 0, _HEAD_BYTES)
                heads += start(False, rank, slot, _ROOM)
                places.append((slot, message))
                slot += _ROOM
                if nbytes > EAGER_BYTES:
                    late.append((rank, address, nbytes, LATE_TAG))
            elif rank in compared:
                late.append((rank, address, nbytes, DATA_TAG))
            else:
                payloads += start(False, rank, address, nbytes)
        for rank, address, nbytes, head in sends:
            if head is not None:
                ctypes.memmove(slot, _Head(*head), _HEAD_BYTES)
                eager = nbytes if nbytes <= EAGER_BYTES else 0
                ctypes.memmove(slot + _HEAD_BYTES, address, eager)
                payloads += start(True, rank, slot, _HEAD_BYTES + eager)
                slot += _ROOM
            if head is None or nbytes > EAGER_BYTES:
                payloads += start(True, rank, address, nbytes, DATA_TAG if head is None else LATE_TAG)
        if meanwhile is not None:
            meanwhile()
        if not heads and not payloads:
            return

        def waits() -> None:
            wait = self._connections.wait
            wait(heads, self.timeout)
            verify(self._rank, [(message, _read_head(slot)) for slot, message in places])
            started = [each for message in late for each in start(False, *message)]
            for slot, (_, address, nbytes, _) in places:
                if nbytes <= EAGER_BYTES:
                    ctypes.memmove(address, slot + _HEAD_BYTES, nbytes)
            wait([*payloads, *started], self.timeout)

        try:
            self._connections.run_waits(waits, [rank for rank, _, _ in (*heads, *payloads)])
        except TransferError:
            # A peer with another call may have closed its connections over what it received.
            found = [(message, _read_head(slot)) for slot, message in places]
            verify(self._rank, [(message, head) for message, head in found if head[-1]])
            raise


def _read_head(address: int) -> tuple[int, ...]:
    return tuple(_Head.from_address(address))


def _verify_calls(rank: int, found: list[tuple[_Message, tuple[int, ...]]]) -> None:
    """Raise `NodeMismatch` unless all ranks make the same call."""
    for message, theirs in found:
        if theirs != message.head:
            break
    else:
        return
    own = found[0][0].head
    rows = sorted([(rank, own), *((message.rank, theirs) for message, theirs in found)])
    ranks = [each for each, _ in rows]
    try:
        compare([[head[1:6]] for _, head in rows], ranks.index(rank), ranks)
    except Mismatch as error:
        raise NodeMismatch(error) from None
    raise NodeMismatch(Mismatch(
        "the ranks did not make the same call: their arrays have other dtypes, or other calls came before on "
        f"{', '.join(f'rank {each}: call {head[0]}' for each, head in rows)}",
        rank=rank, peers=[each for each in ranks if each != rank],
    ))  # fmt: skip


def _verify_messages(rank: int, found: list[tuple[_Message, tuple[int, ...]]]) -> None:
    """Raise `NodeMismatch` unless both sides of each message are the same."""
    for message, theirs in found:
        if theirs != message.head:
            raise NodeMismatch(Mismatch(
                f"the two sides of a message differ:\n  rank {message.rank} sends: {describe(theirs[1:6])}\n  rank "
                f"{rank} expects: {describe(message.head[1:6])}",
                rank=rank, peers=(message.rank,),
            ))  # fmt: skip
