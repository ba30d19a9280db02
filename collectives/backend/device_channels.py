"""The sends and receives of a process group on GPUs.

A communicator runs its operations one after the other. So each pair of ranks has one for each
direction, of its own, and ``irecv(before); isend(after)`` on every rank makes progress. It is opened
at its first use by both ranks, in a thread: a rank that begins a receive can't wait for a sender
which itself begins a receive. The operations that were begun meanwhile are issued afterwards, by a
thread of the program, since NCCL takes launches of one thread at a time: by the next send, receive,
collective, `wait` or `is_completed` of the group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from ..comm.error_ranks import renumber_error
from ..comm.group import open_groups
from ..comm.waiting import first_line
from ..cuda_state import current_stream, new_comm_stream, refuse_capture, set_thread_device
from ..errors import Aborted, CollectivesError, CollectiveTimeout, TransportError

__all__ = ["DeviceChannels"]

_END_S = 5.0  # how long the group's end waits for what is in flight, and for threads


class DeviceTransfer:
    """A send or a receive, with the methods of a communicator's Work.

    Its errors have the group's rank numbers. Before `issue` it waits for its communicator.
    """

    def __init__(self, channels: DeviceChannels, channel: _DeviceChannel, name: str, array: torch.Tensor):
        self.name = name
        self._channels, self._channel, self._array = channels, channel, array
        self._begun = None  # the event behind which it is issued, where that is done later
        self._work = None
        self._error: BaseException | None = None

    def put_off(self) -> None:
        """Record what is on the current stream, behind which it has to be issued."""
        self._begun = current_stream(self._array.device).record_event()

    def issue(self) -> None:
        """Issue it on the channel's communicator."""
        channel, comm = self._channel, self._channel.comm
        peer = 1 if self.name == "send" else 0  # the sender is rank 0
        try:
            with torch.cuda.device(channel.device):
                if self._begun is None:
                    self._work = getattr(comm, self.name)(self._array, peer, async_op=True)
                else:
                    with torch.cuda.stream(channel.stream):
                        channel.stream.wait_event(self._begun)
                        self._work = getattr(comm, self.name)(self._array, peer, async_op=True)
            channel.last = self
        except CollectivesError as error:
            self._error = channel.renumber(error)
        self._array = None

    def end(self, error: BaseException) -> None:
        """End it with an error, since it can't be issued any more."""
        self._error, self._array = error, None

    def _wait_for_issue(self, timeout: float | None) -> None:
        if self._work is None and self._error is None:
            self._channels.issue_all(timeout)
        if self._error is not None:
            raise self._error
        if self._work is None:
            raise self._channel.timeout_error(self.name, self._channels.timeout if timeout is None else timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is issued, then wait as a communicator's Work does."""
        begun = time.monotonic()
        self._wait_for_issue(timeout)
        try:
            return self._work.wait(None if timeout is None else max(timeout - (time.monotonic() - begun), 0.0))
        except CollectivesError as error:
            raise self._channel.renumber(error) from error

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; never blocks."""
        self._channels.issue_opened()
        return self._error is not None or (self._work is not None and self._work.is_completed())

    def exception(self) -> BaseException | None:
        """Return its error, or None; never blocks."""
        if self._work is None:
            return self._error
        error = self._work.exception()
        return self._channel.renumber(error) if isinstance(error, CollectivesError) else error

    def future(self, result=None) -> torch.futures.Future:
        """Return a future of `result`; blocks until it is issued."""
        self._wait_for_issue(None)
        return self._work.future(result)


class _DeviceChannel:
    """One direction between this rank and another one; `ends`: the sender and the receiver."""

    def __init__(self, own_rank: int, ends: tuple[int, int], device: torch.device):
        self._own_rank, self.ends, self.device = own_rank, ends, device
        self.name = "send" if own_rank == ends[0] else "recv"
        self._peer = ends[1] if own_rank == ends[0] else ends[0]
        self.stream = new_comm_stream(device)
        self.comm = None
        self.error: BaseException | None = None
        self.begun: deque[DeviceTransfer] = deque()  # and not yet issued
        self.thread: threading.Thread | None = None
        self.last: DeviceTransfer | None = None  # that was issued

    def renumber(self, error: CollectivesError) -> CollectivesError:
        """Return an error of the communicator with the group's rank numbers, and with the other rank."""
        found = renumber_error(error, self.ends, op=self.name, rank=self._own_rank)
        if not found.peers:
            found = found.with_addition(f" ({'to' if self.name == 'send' else 'from'} rank {self._peer})")
            found.peers = (self._peer,)
        found.__cause__ = error
        return found

    def timeout_error(self, name: str, seconds: float) -> CollectiveTimeout:
        """Return the error of a wait for an operation that was not issued."""
        return CollectiveTimeout(
            f"not begun after the timeout of {seconds:g} s: rank {self._peer} has not come to send from rank "
            f"{self.ends[0]} to rank {self.ends[1]}; it can be waited for again",
            op=name, rank=self._own_rank, peers=(self._peer,),
        )  # fmt: skip


class DeviceChannels:
    """All channels of a process group between GPUs.

    `connect`: opens the communicator of a source and a destination on a device; `timeout`: seconds
    that a wait for the opening takes at most.
    """

    def __init__(self, rank: int, connect: Callable, timeout: float):
        self._rank, self._connect, self.timeout = rank, connect, timeout
        self._channels: dict[tuple[int, int, torch.device], _DeviceChannel] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.unissued = 0  # operations that were begun and not issued
        self._closed = False

    def start(self, name: str, array: torch.Tensor, peer: int, device: torch.device):
        """Begin to send or receive an array; return its Work."""
        self.issue_opened()
        ends = (self._rank, peer) if name == "send" else (peer, self._rank)
        with self._lock:
            key = (*ends, device)
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = self._open(ends, device, name)
            if channel.error is not None:
                raise channel.error
            transfer = DeviceTransfer(self, channel, name, array)
            if channel.comm is not None and not channel.begun:
                transfer.issue()
            else:
                transfer.put_off()
                channel.begun.append(transfer)
                self.unissued += 1
            return transfer

    def _open(self, ends, device: torch.device, name: str) -> _DeviceChannel:
        refuse_capture(
            device, "the first send or receive of two ranks opens their communicator: make one before the capture",
            op=name, rank=self._rank,
        )  # fmt: skip
        channel = _DeviceChannel(self._rank, ends, device)
        thread_name = f"collectives-open-{'-'.join(map(str, ends))}"
        channel.thread = threading.Thread(target=self._open_in_thread, args=(channel,), name=thread_name, daemon=True)
        channel.thread.start()
        return channel

    def _open_in_thread(self, channel: _DeviceChannel) -> None:
        comm, error = None, None
        try:
            set_thread_device(channel.device)
            with torch.cuda.stream(channel.stream):  # not the program's, which may wait for what is begun here
                comm = self._connect(*channel.ends, channel.device)
        except CollectivesError as found:
            error = found
        except RuntimeError as found:  # of torch's store
            error = TransportError(first_line(found))
        if error is not None:
            error.op, error.rank = channel.name, self._rank
        with self._changed:
            channel.comm, channel.error = comm, channel.error or error
            closed = self._closed
            self._changed.notify_all()
        if comm is not None and closed:
            comm.abort()

    # ---- What was begun before its communicator was open.

    def issue_opened(self) -> None:
        """Issue the operations whose communicators have been opened meanwhile."""
        if not self.unissued or threading.get_ident() in open_groups:  # in a group they would be a part of it
            return
        with self._lock:
            for channel in self._channels.values():
                while channel.begun and (channel.comm is not None or channel.error is not None):
                    transfer = channel.begun.popleft()
                    self.unissued -= 1
                    if channel.error is None:
                        transfer.issue()
                    else:
                        transfer.end(channel.error)

    def issue_all(self, timeout: float | None) -> None:
        """Issue what has been begun so far; blocks until it is done, at most `timeout` seconds (None: the group's).

        All of it, and not only what is waited for: the others may wait for it first.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._changed:
            while True:
                self.issue_opened()
                left = deadline - time.monotonic()
                if not self.unissued or left <= 0:
                    return
                self._changed.wait(left)

    # ---- The end.

    def close(self, aborts: bool) -> None:
        """End all channels; what is in flight gets a few seconds, unless `aborts`, and fails with `Aborted`."""
        error = Aborted("the process group was destroyed while it was in flight", rank=self._rank)
        with self._changed:
            if not aborts:
                self.issue_opened()
            self._closed = True
            channels = list(self._channels.values())
            for channel in channels:
                channel.error = channel.error or error
            self.issue_opened()
            self._changed.notify_all()
        deadline = time.monotonic() + _END_S
        opened = [channel for channel in channels if channel.comm is not None]
        closed = [channel for channel in opened if not aborts and _has_ended(channel, deadline)]
        for channel in opened:
            if channel not in closed:
                channel.comm.abort()
        for channel in closed:  # last, since it waits for the device
            channel.comm.close()
        for channel in channels:
            channel.thread.join(max(deadline - time.monotonic(), 0.0))


def _has_ended(channel: _DeviceChannel, deadline: float) -> bool:
    """Wait for what is in flight on a channel; return whether it has ended, and with no error."""
    try:
        return channel.last is None or channel.last.wait(max(deadline - time.monotonic(), 0.001))
    except CollectivesError:  # the caller's Work has it
        return False
