"""The sends and receives in flight of a process group on the host, and how the ones meet the others."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from ..comm.async_queue import fail_future
from ..errors import CollectivesError, CollectiveTimeout, Mismatch

__all__ = ["Mailbox", "Message", "Transfer"]


class Transfer:
    """A send or a receive, with the methods of a communicator's Work.

    `source`, `destination`: ranks of the group, of which this one is one; `source` is None for a
    receive from any rank until a message has come. `channel`: what moves it; None for a receive
    from any rank. `limit`: seconds that a `wait` without a time of its own takes at most. `withdraw`:
    a function that takes it back past that time, of one that nobody can wait for again, or None.
    """

    def __init__(self, name: str, array: torch.Tensor, source: int | None, destination: int, tag: int, limit: float):
        self.name, self.array, self.tag, self.number = name, array, tag, 0
        self.source, self.destination = source, destination
        self.channel = None
        self.withdraw: Callable[[Transfer], bool] | None = None
        self._limit = limit
        self._nbytes = array.nbytes
        self._ended = False
        self._running = threading.Lock()  # held until the end
        self._running.acquire()
        self._error: BaseException | None = None
        self._future: torch.futures.Future | None = None
        self._future_result = None
        self._lock = threading.Lock()

    @property
    def source_rank(self) -> int | None:
        """The rank from which a receive has its message; None for a send."""
        return self.source if self.name == "recv" else None

    def end(self, error: BaseException | None = None) -> None:
        """Record the end; what waits for it goes on."""
        with self._lock:
            if self._ended:
                return
            self._error, self.array = error, None
            self._ended = True
            future = self._future
        self._running.release()
        if future is not None:
            self._fulfil(future)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended, at most `timeout` seconds, else the group's; raise its error.

        Past the time it stays in flight, and can be waited for again.
        """
        if not self._ended:
            deadline = time.monotonic() + (self._limit if timeout is None else timeout)
            if self.channel is not None:
                self.channel.run_until(self, deadline) if timeout is None else self.channel.wake()
            if not self._running.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                error = self._timeout_error(self._limit if timeout is None else timeout)
                if self.withdraw is not None and self.withdraw(self):
                    self.end(error)
                raise error
            self._running.release()  # for the next one that waits
        if self._error is not None:
            raise self._error
        return True

    def _timeout_error(self, seconds: float) -> CollectiveTimeout:
        receives = self.name == "recv"
        peer = self.source if receives else self.destination
        source = "any rank" if self.source is None else f"rank {self.source}"
        held = self.channel.held_message() if receives and self.channel is not None else None
        instead = f"; the next message of rank {peer} has tag {held.tag}" if held is not None else ""
        return CollectiveTimeout(
            f"not done after the timeout of {seconds:g} s ({self._nbytes} bytes from {source} to rank "
            f"{self.destination}, tag {self.tag}){instead}"
            + ("" if self.withdraw is not None else "; it stays in flight and can be waited for again"),
            op=self.name, rank=self.destination if receives else self.source,
            peers=() if peer is None else (peer,), nbytes=self._nbytes,
        )  # fmt: skip

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; never blocks."""
        return self._ended

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
            ended = self._ended
        if ended:
            self._fulfil(future)
        return future

    def _fulfil(self, future) -> None:
        if self._error is None:
            future.set_result(self._future_result)
        else:
            fail_future(future, self._error)


class Message:
    """A message of which the header has come.

    `number`: of the messages of its source; `others_behind`: whether the source had begun to send
    others by then. `transfer`: the receive that takes it, None as long as none is posted. `copy`:
    its elements where they came before that receive, else None.
    """

    __slots__ = ("arrival", "copy", "count", "dtype", "number", "others_behind", "source", "tag", "transfer")

    def __init__(self, source: int, number: int, tag: int, count: int, dtype: torch.dtype, others_behind: bool):
        self.source, self.number, self.tag, self.count, self.dtype = source, number, tag, count, dtype
        self.others_behind, self.arrival = others_behind, 0
        self.transfer: Transfer | None = None
        self.copy: torch.Tensor | None = None


class Mailbox:
    """The receives that wait for a message, and the messages that wait for a receive.

    A message goes to the receive that was posted first, of those from its source and those from any
    rank with its tag; a receive takes the message that came first. Messages of one rank with one
    tag so arrive in order. Any thread may call the methods.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._posted: dict[tuple[int | None, int], deque[Transfer]] = {}
        self._waiting: dict[int | None, int] = {}  # receives posted, by source
        self._unclaimed: dict[tuple[int, int], deque[Message]] = {}
        self._count = 0  # of receives and messages that had to wait, to tell which came first

    def post(self, transfer: Transfer) -> Message | None:
        """Post a receive; return the message that it takes, if one waits.

        A message of which there is a copy has been delivered when this returns.
        """
        with self._lock:
            key = self._find_message(transfer)
            if key is None:
                self._count += 1
                transfer.number = self._count
                self._posted.setdefault((transfer.source, transfer.tag), deque()).append(transfer)
                self._waiting[transfer.source] = self._waiting.get(transfer.source, 0) + 1
                return None
            message = _pop(self._unclaimed, key)
            self._assign(message, transfer)
            delivers = message.copy is not None
        if delivers:
            _deliver(message)
        return message

    def _find_message(self, transfer: Transfer) -> tuple[int, int] | None:
        if transfer.source is not None:
            key = transfer.source, transfer.tag
            return key if key in self._unclaimed else None
        keys = [key for key in self._unclaimed if key[1] == transfer.tag]
        return min(keys, key=lambda key: self._unclaimed[key][0].arrival, default=None)

    def match(self, message: Message) -> None:
        """Give a message that has come to the receive that takes it, or keep it until there is one."""
        with self._lock:
            keys = [key for key in ((message.source, message.tag), (None, message.tag)) if key in self._posted]
            if keys:
                key = min(keys, key=lambda key: self._posted[key][0].number)
                transfer = _pop(self._posted, key)
                self._waiting[key[0]] -= 1
                self._assign(message, transfer)
            else:
                self._count += 1
                message.arrival = self._count
                self._unclaimed.setdefault((message.source, message.tag), deque()).append(message)

    def _assign(self, message: Message, transfer: Transfer) -> None:
        transfer.source = message.source
        message.transfer = transfer

    def add_copy(self, message: Message, copy: torch.Tensor) -> None:
        """Keep a message's elements for its receive, or deliver them where it was posted meanwhile."""
        with self._lock:
            message.copy = copy
            delivers = message.transfer is not None
        if delivers:
            _deliver(message)

    def waits_for(self, source: int | None) -> bool:
        """Return whether a receive from a rank, or from any (None), is posted and has no message."""
        return bool(self._waiting.get(source))

    def withdraw(self, transfer: Transfer) -> bool:
        """Take a receive back that has no message; return whether it was so."""
        with self._lock:
            for source in {transfer.source, None}:
                key = source, transfer.tag
                if transfer in self._posted.get(key, ()):
                    self._posted[key].remove(transfer)
                    if not self._posted[key]:
                        del self._posted[key]
                    self._waiting[source] -= 1
                    return True
        return False

    def fail(self, source: int | None, error: BaseException) -> None:
        """End the receives from a rank, or from any (None), that have no message.

        Its messages that have not been copied are dropped: they never come.
        """
        with self._lock:
            for key in [key for key in self._unclaimed if key[0] == source]:
                copied = deque(each for each in self._unclaimed.pop(key) if each.copy is not None)
                if copied:
                    self._unclaimed[key] = copied
            keys = [key for key in self._posted if key[0] == source]
            failed = [transfer for key in keys for transfer in self._posted.pop(key)]
            self._waiting.pop(source, None)
        for transfer in failed:
            transfer.end(error)


def _pop(queues: dict, key):
    """Remove and return the first one of a key's queue, and the queue with its last one."""
    found = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return found


def _deliver(message: Message) -> None:
    """Copy a message that has come before its receive into the receive's array, and end the receive."""
    transfer, array, error = message.transfer, message.transfer.array, None
    if array is None:  # it has ended, by the end of the group
        return
    if (array.numel(), array.dtype) == (message.count, message.dtype):
        # Not by torch: the array may be an inference tensor of another thread's.
        ctypes.memmove(array.data_ptr(), message.copy.data_ptr(), array.nbytes)
    else:
        error = _mismatch(message, array)
    message.copy = None
    transfer.end(error)


def _mismatch(message: Message, array: torch.Tensor) -> CollectivesError:
    transfer = message.transfer
    return Mismatch(
        f"send and receive do not match (tag {message.tag}):\n  rank {message.source}: send "
        f"count={message.count} dtype={message.dtype}\n  rank {transfer.destination}: recv count={array.numel()} "
        f"dtype={array.dtype}  (this rank)",
        op="recv", rank=transfer.destination, peers=(message.source,),
    )  # fmt: skip
