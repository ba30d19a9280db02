"""Connections between the ranks of several nodes, and the bytes that go over them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ..._nccl import StepList
from ...kernels.execution import thread_limit
from .connecting import connect_ranks
from .error_store import ErrorStore

__all__ = ["Flow", "NodeConnections", "TransferError"]

_MOST_PIECES = 64  # of one system call
_LONGEST_POLL_MS = 1e9  # it takes a C int: 24 days
_CLOSED = "it was closed"
_LATE = "it ran out of time"
_POLL_SEND = select.POLLOUT | select.POLLRDHUP
_LOST = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class TransferError(Exception):
    """A transfer that has failed.

    ``peer``: the rank at its other end; ``timed_out``: whether its time was over.
    """

    def __init__(self, peer: int, timed_out: bool, text: str):
        super().__init__(text)
        self.peer = peer
        self.timed_out = timed_out
        self.text = text


class Flow:
    """What one exchange sends to a rank and receives from it, in order, over one connection.

    ``peer``: the rank; ``outgoing``: memoryviews of bytes to send; ``incoming``: pairs of a
    memoryview to fill and a function to call then, or None. While ``held``, nothing is received.
    """

    __slots__ = ("_begun", "_hung_up", "_lost", "_socket", "held", "incoming", "outgoing", "peer")

    def __init__(self, peer: int, connection: socket.socket):
        self.peer = peer
        self._socket = connection
        self.outgoing: list[memoryview] = []
        self.incoming: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self.held = False
        self._begun = self._hung_up = False  # it has begun to send; the peer sends nothing more
        self._lost: OSError | None = None  # why nothing more can be sent, while there may be more to receive

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_done(self) -> bool:
        return not self.outgoing and not self.incoming

    @property
    def events(self) -> int:
        """For what to poll."""
        receives = self.incoming and not self.held
        return (select.POLLIN if receives else 0) | (_POLL_SEND if self.outgoing else 0)

    def move(self, events: int = 0) -> bool:
        """Send and receive what can be without blocking. Return whether there was anything.

        ``events``: what a poll has found. Raises `TransferError` where the connection is lost.
        """
        self._hung_up = self._hung_up or bool(events & _LOST)
        try:
            sent = self._send()
            return self._receive() or sent
        except OSError as error:
            raise TransferError(self.peer, False, error.strerror or str(error)) from error

    def _send(self) -> bool:
        pieces = self.outgoing
        if not pieces:
            return False
        if not self._begun:
            self._begun, self._hung_up = True, _is_hung_up(self._socket)
        try:
            if self._hung_up:  # it has left this call, or never come to it: it can't have all from this rank
                raise ConnectionResetError(_CLOSED)
            left = self._socket.sendmsg(pieces[:_MOST_PIECES], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if not self.incoming:
                raise
            # What the peer has sent before, such as the head of another call, can be received yet.
            self._lost = error
            self.outgoing = []
            return True
        whole = 0
        while whole < len(pieces) and left >= len(pieces[whole]):
            left -= len(pieces[whole])
            whole += 1
        del pieces[:whole]
        if left:
            pieces[0] = pieces[0][left:]
        return True

    def _receive(self) -> bool:
        moved = False
        while self.incoming and not self.held:
            view, then = self.incoming[0]
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:
                return moved
            if not received:
                raise self._lost or ConnectionResetError(_CLOSED)
            moved = True
            if received < len(view):
                self.incoming[0] = view[received:], then
                return True
            self.incoming.popleft()
            if then is not None:
                then()
        if self._lost is not None and not self.incoming:
            raise self._lost
        return moved


class NodeConnections:
    """TCP connections of one rank with all others of a communicator.

    The constructor blocks until all ranks are connected, at most ``seconds``, and raises what
    `connecting.connect_ranks` raises. One thread at a time may run exchanges; any thread may call
    `abort`.
    """

    def __init__(self, store: ErrorStore, rank: int, size: int, seconds: float):
        self._sockets = connect_ranks(store, rank, size, seconds)
        self._close_all = weakref.finalize(self, _close_all, list(self._sockets.values()))
        self._broken = False
        self._running: Sequence[Flow] = ()  # of the exchange that waits now
        self._steps: tuple[StepList, Sequence[int]] | None = None  # that run now, with the peers of its sockets

    @property
    def awaited_peers(self) -> tuple[int, ...]:
        """The ranks for which an exchange waits now."""
        if (running := self._steps) is not None:
            steps, peers = running
            return tuple(peers[place] for place in steps.waiting)
        return tuple(flow.peer for flow in self._running if not flow.is_done)

    def flow(self, peer: int) -> Flow:
        """Return a new flow to and from a rank, for one exchange."""
        return Flow(peer, self._sockets[peer])

    def run(self, flows: Sequence[Flow], seconds: float | None, is_over: Callable[[], bool] | None = None) -> None:
        """Block until flows are done, at most ``seconds`` (None: no limit), or until ``is_over()``.

        Raises `TransferError`, and what the functions of the flows raise.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        left = [flow for flow in flows if not flow.is_done]
        self._running = left
        try:
            ready = [(flow, 0) for flow in left]
            while left and not (is_over is not None and is_over()):
                moved = False
                for flow, events in ready:
                    moved = flow.move(events) or moved
                left = [flow for flow in left if not flow.is_done]
                if left:
                    ready = [(flow, 0) for flow in left] if moved else self._wait(left, deadline)
        finally:
            self._running = ()

    def _wait(self, flows: Sequence[Flow], deadline: float | None) -> list[tuple[Flow, int]]:
        """Return the flows that can move, with the poll's events.

        Blocks until there is one, or for the longest time that a poll can take; raises
        `TransferError` past the deadline.
        """
        poll = select.poll()
        by_descriptor = {}
        for flow in flows:
            if events := flow.events:
                poll.register(flow, events)
                by_descriptor[flow.fileno()] = flow
        limit = None if deadline is None else max(0.0, 1000.0 * (deadline - time.monotonic()))
        found = poll.poll(limit if limit is None else min(limit, _LONGEST_POLL_MS))
        if not found and (limit is None or limit <= _LONGEST_POLL_MS):
            late = next((flow for flow in flows if flow.incoming), flows[0])
            raise TransferError(late.peer, True, _LATE)
        return [(by_descriptor[descriptor], events) for descriptor, events in found]

    def descriptor(self, peer: int) -> int:
        """Return the file descriptor of the connection to a rank."""
        return self._sockets[peer].fileno()

    def run_steps(
        self, steps: StepList, peers: Sequence[int], first: int, end: int, bases: tuple[int, ...],
        seconds: float | None,
    ) -> None:  # fmt: skip
        """Run recorded steps [first, end); see `_nccl.StepList.run`.

        ``peers``: the ranks at the other ends of its sockets. Blocks; raises `TransferError`, and
        what the engine raises.
        """
        self._steps = steps, peers
        try:
            failure = steps.run(first, end, bases, seconds, thread_limit())
        finally:
            self._steps = None
        if failure is not None:
            place, timed_out, code = failure
            text = _LATE if timed_out else os.strerror(code) if code else _CLOSED
            raise TransferError(peers[place], timed_out, text)

    def is_lost(self, peer: int) -> bool:
        """Return whether a rank has closed its connection, or its process has ended."""
        return _is_hung_up(self._sockets[peer])

    def has_input(self, peer: int, seconds: float | None = 0.0) -> bool:
        """Return whether there is something to receive from a rank, or its connection has ended.

        Blocks until it is so, at most ``seconds`` (None: no limit).
        """
        poll = select.poll()
        poll.register(self._sockets[peer], select.POLLIN)
        return bool(poll.poll(_LONGEST_POLL_MS if seconds is None else min(1000.0 * seconds, _LONGEST_POLL_MS)))

    def abort(self) -> None:
        """End all connections, from any thread. Exchanges of this rank and of its peers fail.

        What was sent before arrives yet: the sockets stay open until this object is closed or freed.
        """
        if self._broken:
            return
        self._broken = True
        for each in self._sockets.values():
            with contextlib.suppress(OSError):  # the peer has ended before
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free everything. No exchange may run."""
        self._close_all()

    def detach_after_fork(self) -> None:
        """Close a forked child's descriptors. The parent's connections stay as they are."""
        self._close_all()


def _is_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return any(events & _LOST for _, events in poll.poll(0))


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()
