"""Channels: the sends and receives of a process group on the host.

torch's programs for CPUs begin sends and receives in any order, with tags, and expect that each
makes progress whatever else the rank does, as on Gloo. A communicator's own sends and receives take
place in call order. So each pair of ranks has a channel in each direction, with a communicator of
its own that both open at the channel's first use: one communicator for both directions would hold
up a send as long as a receive before it waits.

On a channel each message has a header, its tag, count and dtype, and its elements. The sender sends
one message after the other, and each waits for its receiver. The receiver reads a header, looks for
the receive that takes the message (`Mailbox`), and receives the elements in its array. A message
that no receive takes stays with its sender. Only where the sender has begun other messages behind
it, for one of which a receive may wait, the elements are copied into memory of the receiver.

A channel's transfers are run by whoever waits for one of them, else by the channel's thread. The
thread isn't woken for a transfer that its caller waits for at once: two threads would take turns for
each message.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ..comm.error_ranks import renumber_error
from ..comm.waiting import first_line
from ..errors import (
    Aborted,
    CollectivesError,
    CollectiveTimeout,
    InvalidUsage,
    Mismatch,
    RemoteError,
    TransportError,
)  # fmt: skip
from .meeting import Meeting
from .transfers import Mailbox, Message, Transfer

__all__ = ["Channels"]

_WORDS = 4  # int64 of a header: number of the message, tag, count, twice the dtype's index and 1 if others are behind
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}
_PROBE_S = (0.00005, 0.002)  # first and longest pause of a receive from any source
_HELD_S = (0.001, 0.05)  # first and longest pause of a look whether a message that nobody takes has others behind it
_BEHIND_S = 0.005  # how long a message is in flight before its receiver is told that others have come behind it
_COME_S = 0.01  # between looks whether a rank has come to send for the first time
_ENDED_S = 0.5  # between looks whether the other ranks' processes have ended
_JOIN_S = 5.0  # how long the group's end waits for threads

_open: weakref.WeakSet = weakref.WeakSet()


class _OnNode:
    """How messages move on a node: the engine's sends carry the headers."""

    def __init__(self, comm):
        self._comm = comm

    def send(self, header: tuple[int, int, int, int], array: torch.Tensor) -> None:
        """Send a message; returns when the other end has begun to receive it."""
        self._comm._native.set_header(*header)
        self._comm.send(array, 1)

    def has_come(self) -> bool:
        """Return whether the next message has come, or the sender has left; never blocks."""
        return self._comm._native.probe(0)

    def read_header(self) -> tuple[int, int, int, int] | None:
        """Return the header of the next message; blocks until it has come, None past the time limit."""
        try:
            return self._comm._native.peek(0)
        except CollectiveTimeout:
            return None

    def check_sender(self) -> None:
        """Raise `RemoteError` where the sender of the message whose header was read last has given it up."""
        self._comm._native.peek(0)

    def recv(self, array: torch.Tensor) -> None:
        """Receive the elements of the message whose header was read last."""
        self._comm.recv(array, 0)


class _BetweenNodes:
    """The same between nodes: a header is a message, and another one tells that the elements have come.

    Without the latter a send would end as soon as the system has room for it.
    """

    def __init__(self, comm):
        self._comm = comm
        self._header = torch.zeros(_WORDS, dtype=torch.int64, device="cpu")
        self._end = torch.zeros(1, dtype=torch.int64, device="cpu")

    def send(self, header: tuple[int, int, int, int], array: torch.Tensor) -> None:
        self._header.copy_(torch.tensor(header, dtype=torch.int64, device="cpu"))
        self._comm.send(self._header, 1)
        self._comm.send(array, 1)
        self._comm.recv(self._end, 1)

    def has_come(self) -> bool:
        return self._comm._native.probe(0)

    def read_header(self) -> tuple[int, int, int, int] | None:
        if not self._comm._native.wait_for_input(0):
            return None
        self._comm.recv(self._header, 0)
        return tuple(self._header.tolist())

    def check_sender(self) -> None:
        self._comm._native.check_peer(0)

    def recv(self, array: torch.Tensor) -> None:
        self._comm.recv(array, 0)
        self._comm.send(self._end, 0)


class _Channel:
    """One direction between this rank and another one.

    `ends`: the ranks of the sender and the receiver in the group, of which `own_rank` is one;
    `channels`: the group's, whose `connect` opens the communicator of the two: the sender is its
    rank 0.
    """

    def __init__(self, channels: Channels, own_rank: int, ends: tuple[int, int]):
        self._channels, self._own_rank, self._ends = channels, own_rank, ends
        self._direction = "send" if own_rank == ends[0] else "recv"
        self._peer = ends[1] if own_rank == ends[0] else ends[0]
        self._comm = self._moves = None
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by the thread that runs transfers
        self._threads: list[threading.Thread] = []
        self._serves = self._opens = self._closed = False
        self._error: BaseException | None = None  # that has ended the channel

    # ---- What a direction implements.

    def _has_work(self) -> bool:
        """Return whether there is something to run."""
        raise NotImplementedError

    def _advance(self) -> bool:
        """Run a step, by the thread whose turn it is; False where that needs something to change."""
        raise NotImplementedError

    def _end_all(self, error: BaseException) -> None:
        """End all transfers with an error."""
        raise NotImplementedError

    # ---- The communicator.

    @property
    def begun(self) -> bool:
        """Whether the communicator is open, or is being opened."""
        return self._opens

    @property
    def error(self) -> BaseException | None:
        """The error that has ended the channel, or None."""
        return self._error

    def begin_to_open(self) -> None:
        """Have a thread open the communicator, which waits until the other end does so too."""
        with self._changed:
            if not self._opens and not self._closed:
                self._opens = True
                self._start(self._open_in_thread, "open")

    def _open_in_thread(self) -> None:
        try:
            comm = self._channels.connect(*self._ends)
        except CollectivesError as error:
            self._fail(error)
            return
        except RuntimeError as error:
            self._fail(_store_error(error))
            return
        with self._changed:
            self._moves = _BetweenNodes(comm) if len(comm.machines) > 1 else _OnNode(comm)
            self._comm = comm
            closed = self._closed
            self._changed.notify_all()
        if closed:
            comm.abort()

    def _wait_until_open(self, deadline: float | None) -> bool:
        if self._comm is None:
            self.begin_to_open()
            with self._changed:
                while self._comm is None and self._error is None and not self._closed:
                    if not self._changed.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                        return False
        return self._comm is not None and self._error is None

    # ---- Who runs the transfers.

    def _start(self, target: Callable, what: str) -> None:
        name = f"collectives-{what}-{'-'.join(map(str, self._ends))}"
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def wake(self) -> None:
        """Have the channel's thread run what there is; the first call starts it."""
        with self._changed:
            if not self._serves and not self._closed:
                self._serves = True
                self._start(self._serve, self._direction)
            else:
                self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._has_work() and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            with self._turn:
                if self._has_work():
                    self._run(self._has_work, None)

    def run_until(self, transfer: Transfer, deadline: float) -> None:
        """Run transfers in this thread until one has ended, unless another thread runs them."""
        if not self._turn.acquire(blocking=False):
            self.wake()  # another caller's thread stops behind its own transfer
            return
        try:
            self._run(lambda: not transfer.is_completed(), deadline)
        finally:
            self._turn.release()

    def _run(self, goes_on: Callable[[], bool], deadline: float | None) -> None:
        """Run steps as long as `goes_on()`; `deadline`: of all of them, None for no limit."""
        if not self._wait_until_open(deadline):
            return
        limit = None if deadline is None else self._channels.timeout
        if self._comm.timeout != limit:
            self._comm.timeout = limit
        while not self._closed and goes_on():
            try:
                if not self._advance() and not self._wait_for_change(deadline):
                    return
            except CollectivesError as error:
                self._fail(self._renumber(error))
                return
            except RuntimeError as error:
                self._fail(_store_error(error))
                return
            except BaseException:  # Ctrl-C, which has ended the communicator
                self._fail(Aborted("the call was interrupted"))
                raise

    def _wait_for_change(self, deadline: float | None) -> bool:
        """Wait until another step may do something; False where the time is over."""
        raise NotImplementedError

    # ---- The end.

    def _renumber(self, error: CollectivesError) -> CollectivesError:
        """Return an error of the channel's communicator with the group's rank numbers."""
        found = renumber_error(error, self._ends, op=self._direction, rank=self._own_rank)
        found.__cause__ = error
        return found

    def _fail(self, error: CollectivesError) -> None:
        """End the channel and its transfers with an error.

        One that ran out of time was in the engine, which can't take back what it has announced to the
        other end. So nothing more can be moved: later transfers get another error.
        """
        if isinstance(error, CollectiveTimeout) and self._own_rank in error.peers:  # between nodes: the other end's
            text = f"rank {self._peer} ran out of time and gave up: {error.message}"
            error = RemoteError(text, peers=(self._peer,))
        error.op, error.rank = self._direction, self._own_rank
        later = error
        if isinstance(error, CollectiveTimeout):
            way = "sent to" if self._direction == "send" else "received from"
            ends = f"nothing more can be {way} rank {self._peer} in this process group"
            later = InvalidUsage(
                f"{ends}, since an earlier one ran out of time: {error.message}", op=self._direction,
                rank=self._own_rank, peers=(self._peer,),
            )  # fmt: skip
            error = error.with_addition(f"; {ends}")
        with self._changed:
            if self._error is None:
                self._error = later
            else:
                error = self._error
            comm = self._comm
            self._changed.notify_all()
        if comm is not None:
            comm.abort()  # the other end would wait for this one
        self._end_all(error)

    def close(self) -> None:
        """End the channel: close its communicator, or abort it where a transfer is in flight."""
        with self._changed:
            self._closed = True
            comm = self._comm
            self._error = Aborted(
                "the process group was destroyed while it was in flight", op=self._direction, rank=self._own_rank
            )
            self._changed.notify_all()
        if comm is not None:
            comm.abort() if self._turn.locked() or self._has_work() else comm.close()
        self._end_all(self._error)

    def join(self, deadline: float) -> None:
        """Wait for the threads of a closed channel."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))


class SendChannel(_Channel):
    """The messages of this rank to another one."""

    def __init__(self, *args):
        super().__init__(*args)
        self._queue: deque[Transfer] = deque()
        self._count = 0  # of messages begun
        self._in_flight = self._announced = 0  # number of the message in flight, 0: none; of that with others behind it

    def submit(self, transfer: Transfer, wake: bool) -> None:
        """Queue a send, which the channel's thread runs unless a `wait` does it first.

        `wake`: False leaves it to the `wait`, which must follow.
        """
        transfer.channel = self
        with self._changed:
            error = self._error
            if error is None:
                self._queue.append(transfer)
            number = self._in_flight
        if error is not None:
            transfer.end(error)
            return
        if number > self._announced:  # its receiver may need what is behind it
            self._announced = number
            self._channels.announce_later(self, number)
        if wake:
            self.wake()

    def _has_work(self) -> bool:
        return bool(self._queue)

    def _advance(self) -> bool:
        with self._changed:
            transfer, others = self._queue[0] if self._queue else None, len(self._queue) > 1
            array = None if transfer is None else transfer.array
            if array is None:  # the channel was ended just now
                return True
            self._count += 1
            self._in_flight = self._count
            if others:
                self._announced = self._count
        header = self._count, transfer.tag, array.numel(), 2 * _DTYPE_INDEX[array.dtype] + others
        error = None
        try:
            self._moves.send(header, array)
        except Mismatch as found:
            error = self._renumber(found)
        with self._changed:
            self._in_flight = 0
            if self._queue and self._queue[0] is transfer:
                self._queue.popleft()
        transfer.end(error)
        return True

    def announce(self, number: int) -> None:
        """Announce to the receiver that others are behind a message, if that one is still in flight."""
        if self._in_flight == number and len(self._queue) > 1 and not self._closed:
            try:
                self._channels.store.set(_behind_key(*self._ends), str(number))
            except RuntimeError as error:
                self._fail(_store_error(error))

    def withdraw(self, transfer: Transfer) -> bool:
        """Take a send back that has not begun; return whether it was so."""
        with self._changed:
            first = bool(self._queue) and self._queue[0] is transfer
            if transfer not in self._queue or (first and self._in_flight):
                return False
            self._queue.remove(transfer)
            return True

    def _end_all(self, error: BaseException) -> None:
        with self._changed:
            failed = list(self._queue)
            self._queue.clear()
        for transfer in failed:
            transfer.end(error)


class RecvChannel(_Channel):
    """The messages of another rank to this one."""

    def __init__(self, *args):
        super().__init__(*args)
        self._mailbox = self._channels.mailbox
        self._message: Message | None = None  # whose header has come and whose elements have not
        self._pause = self._look_at = 0.0

    def held_message(self) -> Message | None:
        """Return the message that no receive takes, if there is one."""
        message = self._message
        return message if message is not None and message.transfer is None else None

    def _has_work(self) -> bool:
        if self._error is not None:
            return False
        message = self._message
        return (message is not None and message.transfer is not None) or self._mailbox.waits_for(self._ends[0])

    def _advance(self) -> bool:
        message = self._message
        if message is None:
            header = self._moves.read_header()
            if header is None:
                return False
            number, tag, count, kind = header
            message = Message(self._ends[0], number, tag, count, _DTYPES[kind >> 1], bool(kind & 1))
            self._mailbox.match(message)
            self._message, self._pause = message, _HELD_S[0]
        transfer = message.transfer
        if transfer is None and not (message.others_behind or self._has_others_behind(message)):
            return False
        array = torch.empty(message.count, dtype=message.dtype, device="cpu") if transfer is None else transfer.array
        error = None
        try:
            self._moves.recv(array)
        except Mismatch as found:
            error = self._renumber(found)
        self._message = None
        if transfer is None:
            self._mailbox.add_copy(message, array)
        else:
            transfer.end(error)
        return True

    def _has_others_behind(self, message: Message) -> bool:
        key, store = _behind_key(*self._ends), self._channels.store
        return store.check([key]) and int(store.get(key)) >= message.number

    def _wait_for_change(self, deadline: float | None) -> bool:
        """Wait until a receive takes the message, or it is time to look whether others are behind it."""
        message = self._message
        if message is None:  # past the time limit
            return False
        if message.transfer is None:
            self._moves.check_sender()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _ENDED_S
            if (error := self._channels.meeting.find_ended([self._ends[0]])) is not None:
                self._fail(error)
                return False
        with self._changed:
            if message.transfer is None and not self._closed:
                left = self._pause if deadline is None else min(self._pause, deadline - time.monotonic())
                self._changed.wait(max(left, 0.0))
        self._pause = min(2 * self._pause, _HELD_S[1])
        return deadline is None or time.monotonic() < deadline

    def poll(self) -> bool:
        """Receive what has come, if no other thread does; return whether there was anything."""
        if self._comm is None or not self._turn.acquire(blocking=False):
            return False
        try:
            comes = self._error is None and (self._message is not None or self._moves.has_come())
            return comes and self._advance()
        except CollectivesError as error:
            self._fail(self._renumber(error))
            return False
        finally:
            self._turn.release()

    def _end_all(self, error: BaseException) -> None:
        message, self._message = self._message, None
        if message is not None and message.transfer is not None:
            message.transfer.end(error)
        self._mailbox.fail(self._ends[0], error)


def _store_error(error: RuntimeError) -> TransportError:
    return TransportError(f"torch.distributed's store has failed: {first_line(error)}")


def _behind_key(source: int, destination: int) -> str:
    return f"behind/{source}/{destination}"


class Channels:
    """All channels of a process group.

    `connect`: opens the communicator of a source and a destination; `meeting`: tells who has come
    to open one; `store`: the group's, with a prefix of this life of the group; `timeout`: seconds
    of a transfer that somebody waits for.
    """

    def __init__(self, rank: int, size: int, connect: Callable, meeting: Meeting, store, timeout: float):
        self._rank, self._size, self.connect, self.meeting = rank, size, connect, meeting
        self.store, self.timeout = store, timeout
        self.mailbox = Mailbox()
        self._sends: dict[int, SendChannel] = {}
        self._receives: dict[int, RecvChannel] = {}
        self._lock = threading.Lock()
        self.closed = False
        self._thread_state = threading.local()
        self._poller: threading.Thread | None = None
        self._polls = threading.Event()
        self._to_announce: list[tuple[float, SendChannel, int]] = []
        self._look_at = self._look_for_new_at = 0.0  # when to look next whether ranks have ended, or have come
        self._end_error: Aborted | None = None
        _open.add(self)

    @contextlib.contextmanager
    def waited_at_once(self) -> Iterator[None]:
        """Wake no thread for this thread's transfers of the block: it waits for each behind its call."""
        self._thread_state.waits = True
        try:
            yield
        finally:
            self._thread_state.waits = False

    def send(self, array: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Begin to send an array to a rank."""
        self._check_open("send")
        transfer = Transfer("send", array, self._rank, peer, tag, self.timeout)
        channel = self._sends.get(peer) or self._channel(self._sends, SendChannel, peer, (self._rank, peer))
        if waits := self._waits_at_once():
            transfer.withdraw = channel.withdraw
        channel.submit(transfer, not waits)
        return transfer

    def recv(self, array: torch.Tensor, peer: int | None, tag: int) -> Transfer:
        """Begin to receive an array from a rank; None: from any."""
        self._check_open("recv")
        transfer = Transfer("recv", array, peer, self._rank, tag, self.timeout)
        channel = transfer.channel = None if peer is None else self._source(peer)
        if waits := self._waits_at_once():
            transfer.withdraw = self.mailbox.withdraw
        message = self.mailbox.post(transfer)
        error = self._end_error if channel is None else channel.error
        if message is not None:
            if not transfer.is_completed() and (channel is None or not waits):
                self._source(message.source).wake()
        elif error is not None:
            self.mailbox.fail(peer, error)
        elif channel is None:
            self._start_poller()
        elif not waits:
            channel.wake()
        return transfer

    def _waits_at_once(self) -> bool:
        return getattr(self._thread_state, "waits", False)

    def _check_open(self, name: str) -> None:
        if self.closed:
            raise InvalidUsage("the process group was destroyed", op=name, rank=self._rank)

    def _source(self, peer: int) -> RecvChannel:
        return self._receives.get(peer) or self._channel(self._receives, RecvChannel, peer, (peer, self._rank))

    def _channel(self, channels: dict, kind: type, peer: int, ends: tuple[int, int]):
        with self._lock:
            found = channels.get(peer)
            if found is None:
                found = channels[peer] = kind(self, self._rank, ends)
                if self.closed:
                    found.close()
        return found

    # ---- The thread for receives from any rank, and for what is due later.

    def _start_poller(self) -> None:
        with self._lock:
            if self._poller is None and not self.closed:
                self._poller = threading.Thread(target=self._poll, name="collectives-recv-any", daemon=True)
                self._poller.start()
        self._polls.set()

    def announce_later(self, channel: SendChannel, number: int) -> None:
        """Have `channel.announce(number)` called a moment later."""
        with self._lock:
            self._to_announce.append((time.monotonic() + _BEHIND_S, channel, number))
        self._start_poller()

    def _poll(self) -> None:
        pause, longest = _PROBE_S
        while not self.closed:
            began = time.monotonic()
            with self._lock:
                due = [each for each in self._to_announce if each[0] <= began]
                self._to_announce = [each for each in self._to_announce if each[0] > began]
            for _, channel, number in due:
                channel.announce(number)
            receives = self.mailbox.waits_for(None)
            if receives and self._look_at_sources():
                pause = _PROBE_S[0]
            pause = min(2 * max(pause, time.monotonic() - began), longest)
            if self._polls.wait(pause if receives or self._to_announce else None):
                self._polls.clear()
                pause = _PROBE_S[0]

    def _look_at_sources(self) -> bool:
        """Receive what has come from any rank; return whether there was anything."""
        try:
            peers = [peer for peer in range(self._size) if peer != self._rank]
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _ENDED_S
                left = [peer for peer in peers if self._source(peer).error is None]
                error = self.meeting.find_ended(left) if left or not peers else self._source(peers[0]).error
                if error is not None:
                    error.op = "recv"
                    self.mailbox.fail(None, error)
            moved = False
            looks = time.monotonic() >= self._look_for_new_at
            for peer in peers:
                source = self._source(peer)
                if looks and not source.begun and self.meeting.has_come(peer, f"p2p/cpu/{peer}/{self._rank}"):
                    source.begin_to_open()
                moved = source.poll() or moved
            if looks:
                self._look_for_new_at = time.monotonic() + _COME_S
            return moved
        except RuntimeError as error:
            found = error if isinstance(error, CollectivesError) else _store_error(error)
            found.op, found.rank = "recv", self._rank
            self.mailbox.fail(None, found)
        return False

    # ---- The end.

    def close(self) -> None:
        """End all channels; what is in flight fails with `Aborted`. Waits a few seconds for their threads."""
        with self._lock:
            self.closed = True
            self._end_error = Aborted(
                "the process group was destroyed while it was in flight", op="recv", rank=self._rank
            )
            channels = [*self._sends.values(), *self._receives.values()]
        self._polls.set()
        self.meeting.end()
        for channel in channels:
            channel.close()
        self.mailbox.fail(None, self._end_error)
        deadline = time.monotonic() + _JOIN_S
        for channel in channels:
            channel.join(deadline)
        if self._poller is not None and self._poller is not threading.current_thread():
            self._poller.join(max(deadline - time.monotonic(), 0.0))


def _close_all() -> None:
    """At the interpreter's end: a thread that is inside torch then would abort the process."""
    for channels in list(_open):
        channels.close()


os.register_at_fork(after_in_child=_open.clear)
atexit.register(_close_all)
