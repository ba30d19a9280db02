"""Transport between nodes on the host: send, recv and group over the ranks' connections.

A message may begin with a head, the fingerprint of its call, which the receiver compares with its
own before it receives anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ...arrays import ITEMSIZE
from ...errors import Mismatch
from ..fingerprint import compare, describe
from .connections import Flow, NodeConnections, TransferError

__all__ = ["MessageTransport", "NodeMismatch"]

_HEAD_WORDS = 8  # int64 of a head: number of the call, fingerprint (5), digest of the dtype's name, 1 for "has come"
_HEAD_BYTES = 8 * _HEAD_WORDS
_JOIN_S = 5.0  # for a thread to notice that the connections have ended
_INTERRUPT_S = 2.0  # for what a rank does meanwhile to end by itself, after its messages have failed
_Head = struct.Struct(f"={_HEAD_WORDS}q")


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

    def __init__(self, connections: NodeConnections, ranks: Sequence[int], rank: int):
        self.library = self
        self.timeout: float | None = None
        self._connections = connections
        self._ranks = tuple(ranks)
        self._others = sorted(set(ranks) - {rank})
        self._rank = rank
        self._depth = 0
        self._meanwhile: Callable[[], None] | None = None
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

    def group_end(
        self, meanwhile: Callable[[], None] | None = None, interrupt: Callable[[], None] | None = None
    ) -> None:
        """End a group. The outermost end starts its messages and waits for them.

        ``meanwhile``: a function to call in between; ``interrupt``: a function that ends it, from
        another thread. With that one the messages move on while ``meanwhile`` blocks, by a thread,
        and not only as far as the system has room for what is sent. It is called where they have
        failed and ``meanwhile`` has not ended 2 s later.
        """
        self._depth -= 1
        if self._depth:
            return
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        compares_calls = self._call_head is not None
        if compares_calls:
            sends += [_Message(rank, 0, 0, self._call_head) for rank in self._others if rank in self._due_sends]
            receives += [_Message(rank, 0, 0, self._call_head) for rank in self._others if rank in self._due_receives]
            self._call_head = None
            self._due_sends.clear()
            self._due_receives.clear()
        if meanwhile is None:
            meanwhile, self._meanwhile = self._meanwhile, None
        self._exchange(sends, receives, meanwhile, interrupt, compares_calls)

    def call_meanwhile(self, function: Callable[[], None]) -> None:
        """Call a function once the next group's messages are on their way."""
        self._meanwhile = function

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

    def _exchange(self, sends, receives, meanwhile, interrupt, compares_calls: bool) -> None:
        flows: dict[int, Flow] = {}
        heads: list[tuple[_Message, bytearray]] = []
        arrived: list[tuple[_Message, tuple[int, ...]]] = []
        for message in sends:
            flow = self._flow_of(flows, message.rank)
            if message.head is not None:
                flow.outgoing.append(memoryview(_Head.pack(*message.head)))
            if message.nbytes:
                flow.outgoing.append(_view(message))
        for message in receives:
            flow = self._flow_of(flows, message.rank)
            if message.head is not None:
                memory = bytearray(_HEAD_BYTES)
                heads.append((message, memory))
                then = partial(_take_call_head, flow, arrived, message) if compares_calls else partial(
                    _verify_message, self._rank, message)
                flow.incoming.append((memoryview(memory), partial(then, memory)))
            if message.nbytes:
                flow.incoming.append((_view(message), None))
        moving = list(flows.values())

        def complete() -> None:
            run = self._connections.run
            try:
                if compares_calls:
                    run(moving, self.timeout, lambda: len(arrived) == len(heads))
                    _verify_calls(self._rank, arrived)
                    for flow in moving:
                        flow.held = False
                run(moving, self.timeout)
            except TransferError:
                # A peer with another call may have closed its connections over what it received.
                for flow in moving:
                    with contextlib.suppress(TransferError):
                        flow.move()
                if compares_calls:
                    _verify_calls(self._rank, arrived)
                raise

        if meanwhile is None:
            complete()
        elif interrupt is not None:
            self._run_both(complete, meanwhile, interrupt)
        else:
            for flow in moving:
                flow.move()
            meanwhile()
            complete()

    def _flow_of(self, flows: dict[int, Flow], rank: int) -> Flow:
        if rank not in flows:
            flows[rank] = self._connections.flow(rank)
        return flows[rank]

    def _run_both(
        self, complete: Callable[[], None], meanwhile: Callable[[], None], interrupt: Callable[[], None]
    ) -> None:
        """Run ``complete`` in another thread while this one runs ``meanwhile``, and wait for both."""
        raised: list[BaseException] = []
        ended = threading.Event()  # `meanwhile`

        def run() -> None:
            try:
                complete()
            except BaseException as error:  # raised in the thread that waits
                raised.append(error)
                if not ended.wait(_INTERRUPT_S):
                    interrupt()  # a rank for which `meanwhile` waits may wait for this one

        thread = threading.Thread(target=run, name="collectives-messages", daemon=True)
        thread.start()
        try:
            meanwhile()
            ended.set()
            thread.join()
        except BaseException as error:  # Ctrl-C, too
            ended.set()
            interrupted = bool(raised) and isinstance(error, Exception)
            self._connections.abort()  # so that the thread returns, and nothing is written to the arrays any more
            thread.join(_JOIN_S)
            if interrupted:
                raise raised[0] from error
            raise
        if raised:
            raise raised[0]


def _view(message: _Message) -> memoryview:
    return memoryview((ctypes.c_uint8 * message.nbytes).from_address(message.address))


def _take_call_head(flow: Flow, arrived: list, message: _Message, memory: bytearray) -> None:
    """Keep a head that has come until all have; nothing more is received from its rank before."""
    arrived.append((message, _Head.unpack(memory)))
    flow.held = True

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


def _verify_message(rank: int, message: _Message, memory: bytearray) -> None:
    """Raise `NodeMismatch` unless both sides of a message are the same."""
    theirs = _Head.unpack(memory)
    if theirs != message.head:
        raise NodeMismatch(Mismatch(
            f"the two sides of a message differ:\n  rank {message.rank} sends: {describe(theirs[1:6])}\n  rank "
            f"{rank} expects: {describe(message.head[1:6])}",
            rank=rank, peers=(message.rank,),
        ))  # fmt: skip
