"""Channels: the sends and receives of a process group on the host, each pair of ranks by itself.

torch's programs for CPUs begin sends and receives in any order, with tags, and expect that each
makes progress whatever else the rank does, as on Gloo. A communicator's own sends and receives take
place in call order. So each channel, one direction between two ranks with one tag, has a
communicator of its own, which both ends open at the channel's first use.

A channel's transfers are run one after the other, by whoever waits for one of them, else by the
channel's thread. The thread isn't woken for a transfer that its caller waits for at once: two
threads would take turns for each message.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ..comm.async_queue import fail_future
from ..comm.error_ranks import renumber_error
from ..errors import Aborted, CollectivesError, CollectiveTimeout, InvalidUsage, RemoteError

__all__ = ["Channel", "Channels", "Transfer"]

_PROBE_S = (0.00005, 0.002)  # first and longest pause of a receive from any source


class Transfer:
    """A send or a receive of a channel, with the methods of a communicator's Work.

    `peer`: the other rank, None for a receive from any source until one is found.
    """

    def __init__(self, name: str, array: torch.Tensor, peer: int | None, tag: int):
        self.name, self.tag, self.source_rank = name, tag, peer
        self._array: torch.Tensor | None = array
        self._nbytes = array.nbytes
        self._channel: Channel | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future | None = None
        self._future_result = None
        self._lock = threading.Lock()

    def run(self, comm) -> None:
        """Do it on a channel's communicator, in which the sender is rank 0 and the receiver rank 1."""
        if self.name == "send":
            comm.send(self._array, 1)
        else:
            comm.recv(self._array, 0)

    def end(self, error: BaseException | None = None) -> None:
        """Record the end; what waits for it goes on."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error, self._array = error, None
            self._ended.set()
            future = self._future
        if future is not None:
            self._fulfil(future)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended, at most `timeout` seconds; raise its error.

        Past the time it stays in flight, and can be waited for again.
        """
        if self._channel is not None and not self.is_completed():
            if timeout is None:
                self._channel.run_until(self)
            else:
                self._channel.wake()
        if not self._ended.wait(timeout):
            whom = "any rank" if self.source_rank is None else f"rank {self.source_rank}"
            raise CollectiveTimeout(
                f"not done after the timeout of {timeout} s ({self._nbytes} bytes, {whom}, tag {self.tag}); it stays "
                "in flight and can be waited for again",
                op=self.name, peers=() if self.source_rank is None else (self.source_rank,),
            )  # fmt: skip
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; never blocks."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Return its error, or None; never blocks."""
        return self._error

    def future(self, result=None) -> torch.futures.Future:
        """Return a future of `result`, which is complete when the transfer has ended."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            self._future_result = result
            ended = self._ended.is_set()
        if ended:
            self._fulfil(future)
        return future

    def _fulfil(self, future) -> None:
        if self._error is None:
            future.set_result(self._future_result)
        else:
            fail_future(future, self._error)


class Channel:
    """One direction between this rank and another one, with one tag.

    `connect`: opens the communicator of its two ends, and blocks until the other one does so too;
    `ends`: the ranks of the sender and the receiver in the group, of which `own_rank` is one.
    """

    def __init__(self, connect: Callable, own_rank: int, ends: tuple[int, int]):
        self._connect = connect
        self._own_rank, self._ends = own_rank, ends
        self._comm = None
        self._queue: deque[Transfer] = deque()
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by the thread that runs transfers
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def _direction(self) -> str:
        return "send" if self._own_rank == self._ends[0] else "recv"

    @property
    def is_open(self) -> bool:
        return self._comm is not None

    def submit(self, transfer: Transfer, wake: bool = True) -> Transfer:
        """Queue a transfer, which the channel's thread runs unless a `wait` does it first.

        `wake`: False leaves it to the `wait`, which must follow.
        """
        transfer._channel = self
        with self._changed:
            if self._closed:
                raise InvalidUsage("the process group was destroyed", op=transfer.name, rank=self._own_rank)
            self._queue.append(transfer)
        if wake:
            self.wake()
        return transfer

    def wake(self) -> None:
        """Have the channel's thread run what is queued; the first call starts it."""
        with self._changed:
            if self._thread is None and not self._closed:
                name = f"collectives-{self._direction}-{'-'.join(map(str, self._ends))}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            with self._turn:
                self._run_next()

    def run_until(self, transfer: Transfer) -> None:
        """Run transfers in this thread until one has ended, unless another thread runs them."""
        while not transfer.is_completed():
            if not self._turn.acquire(blocking=False):
                self.wake()  # another caller's thread stops behind its own transfer
                return
            try:
                self._run_next()
            finally:
                self._turn.release()

    def _run_next(self) -> None:
        with self._changed:
            if not self._queue:
                return
            transfer = self._queue[0]
        error: BaseException | None = None
        try:
            transfer.run(self._open())
        except CollectivesError as caught:
            error = self._renumber(caught)
        except BaseException as caught:
            error = caught
            raise
        finally:
            with self._changed:
                if self._queue and self._queue[0] is transfer:
                    self._queue.popleft()
            transfer.end(error)

    def connect(self) -> None:
        """Open the communicator now; blocks until the other end comes."""
        try:
            with self._turn:
                self._open()
        except CollectivesError as error:
            raise self._renumber(error) from error

    def _open(self):
        """Return the communicator of the two ends, for the thread whose turn it is."""
        if self._comm is None:
            comm = self._connect()
            with self._changed:
                self._comm = comm
                closed = self._closed
            if closed:
                comm.abort()
        return self._comm

    def _renumber(self, error: CollectivesError) -> CollectivesError:
        """Return an error of the channel's communicator with the group's rank numbers."""
        found = renumber_error(error, self._ends, op=self._direction, rank=self._own_rank)
        found.__cause__ = error
        return found

    def has_message(self) -> bool:
        """Return whether the other end has begun a send that no receive of this one has taken."""
        with self._changed:
            return not self._queue and self._comm is not None and self._comm._native.probe(0)

    def idle(self) -> bool:
        """Return whether nothing is in flight."""
        return not self._queue

    def close(self) -> None:
        """End the channel: close its communicator, or abort it where a transfer is in flight."""
        with self._changed:
            self._closed = True
            left, comm = list(self._queue), self._comm
            self._changed.notify_all()
        if comm is not None:
            comm.abort() if left else comm.close()
        for transfer in left:
            transfer.end(
                Aborted("the process group was destroyed while it was in flight", op=transfer.name, rank=self._own_rank)
            )


class Channels:
    """All channels of a process group; `connect` opens a communicator of (source, destination, tag).

    `waiting_senders`: returns those of some ranks that have begun to open a channel to this one.
    """

    def __init__(self, rank: int, size: int, connect: Callable, waiting_senders: Callable):
        self._rank, self._size, self._connect, self._waiting_senders = rank, size, connect, waiting_senders
        self._channels: dict[tuple[int, int, int], Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.local()

    @contextlib.contextmanager
    def waited_at_once(self) -> Iterator[None]:
        """Wake no thread for this thread's transfers of the block: it waits for each behind its call."""
        self._thread.waits = True
        try:
            yield
        finally:
            self._thread.waits = False

    def _submit(self, transfer: Transfer, source: int, destination: int) -> Transfer:
        wake = not getattr(self._thread, "waits", False)
        return self._channel(source, destination, transfer.tag).submit(transfer, wake)

    def send(self, array: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Begin to send an array to a rank."""
        return self._submit(Transfer("send", array, peer, tag), self._rank, peer)

    def recv(self, array: torch.Tensor, peer: int | None, tag: int) -> Transfer:
        """Begin to receive an array from a rank; None: from any."""
        transfer = Transfer("recv", array, peer, tag)
        if peer is not None:
            return self._submit(transfer, peer, self._rank)
        thread = threading.Thread(
            target=self._receive_from_any, args=(transfer,), name="collectives-recv-any", daemon=True
        )
        thread.start()
        return transfer

    def _channel(self, source: int, destination: int, tag: int) -> Channel:
        key = (source, destination, tag)
        with self._lock:
            found = self._channels.get(key)
            if found is None:
                connect = lambda: self._connect(source, destination, tag)  # noqa: E731
                found = self._channels[key] = Channel(connect, self._rank, (source, destination))
        return found

    def _receive_from_any(self, transfer: Transfer) -> None:
        """Wait until some rank sends with the tag, and receive from it."""
        peers = [peer for peer in range(self._size) if peer != self._rank]
        pause, longest = _PROBE_S
        try:
            while not self._closed:
                channels = {peer: self._channel(peer, self._rank, transfer.tag) for peer in peers}
                closed = [peer for peer, channel in channels.items() if not channel.is_open and channel.idle()]
                for peer in self._waiting_senders(closed, transfer.tag) if closed else ():
                    channels[peer].connect()
                for peer, channel in channels.items():
                    if channel.has_message():
                        transfer.source_rank = peer
                        channel.submit(transfer)
                        return
                time.sleep(pause)
                pause = min(2 * pause, longest)
            transfer.end(Aborted("the process group was destroyed while it was in flight", op="recv", rank=self._rank))
        except BaseException as error:
            known = isinstance(error, CollectivesError)
            transfer.end(error if known else RemoteError(f"{error}", op="recv", rank=self._rank))

    def close(self) -> None:
        """End all channels; what is in flight fails with `Aborted`."""
        self._closed = True
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
