"""Futures of the operations of a process group, whose callbacks may issue other operations."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from torch.futures import Future

from ..comm.async_queue import fail_future
from ..errors import CollectiveTimeout

__all__ = ["CallbackOrder", "OperationFuture"]

_thread = threading.local()  # `key` and `children`: of the future whose callbacks this thread runs


class CallbackOrder:
    """Order of one group's collectives between the program and the callbacks of its futures.

    A callback may issue collectives, as torch's ``powerSGD_hook`` does, and it runs when its
    operation has ended: at another moment of the program on each rank. Yet all ranks must issue a
    group's collectives in one order. So a collective waits until the callbacks have run that were
    registered before it. Each future with callbacks has a key: the keys of the futures in whose
    callbacks it was made, and its number among those that were made there. The program's own key is
    empty.
    """

    def __init__(self):
        self._numbers = itertools.count()
        self._open: dict[tuple[int, ...], threading.Event] = {}  # futures whose callbacks have not run
        self._lock = threading.Lock()

    def open(self) -> tuple[int, ...]:
        """Add a future that gets its first callback now; return its key."""
        numbers = getattr(_thread, "children", self._numbers)
        with self._lock:
            key = (*getattr(_thread, "key", ()), next(numbers))
            self._open[key] = threading.Event()
        return key

    def run(self, key: tuple[int, ...], function: Callable) -> None:
        """Run a future's callbacks, by a function, in a thread of their own."""

        def run():
            _thread.key, _thread.children = key, itertools.count()
            try:
                function()
            finally:
                with self._lock:
                    ended = self._open.pop(key)
                ended.set()

        threading.Thread(target=run, name="collectives-future-callbacks", daemon=True).start()

    def wait(self, op: str, rank: int, timeout: float) -> None:
        """Wait until this thread may issue a collective, at most `timeout` seconds.

        Raises `CollectiveTimeout` after that.
        """
        if not self._open:
            return
        deadline = time.monotonic() + timeout
        while (ended := self._find_earlier()) is not None:
            if not ended.wait(deadline - time.monotonic()):
                raise CollectiveTimeout(
                    f"a callback of an earlier operation's future has not returned within {timeout:g} s. Collectives "
                    "of one group wait for the callbacks that were registered before them: a callback must not wait "
                    "for what the program issues later",
                    op=op, rank=rank,
                )  # fmt: skip

    def _find_earlier(self) -> threading.Event | None:
        own = getattr(_thread, "key", ())
        with self._lock:
            for key, ended in self._open.items():
                is_ancestor = own[: len(key)] == key  # or this thread's own
                if not is_ancestor and (key < own or key[: len(own)] == own):
                    return ended
        return None


class OperationFuture(Future):
    """A future that runs callbacks of Python in a thread of their own.

    The thread that ends operations completes it. A callback may issue another operation and wait
    for it, and in that thread it would wait for itself. Without such callbacks it is completed
    there, which is faster. `order`: of the operation's group; None for a send or a receive.
    """

    def __init__(self, order: CallbackOrder | None = None):
        super().__init__()
        self._order = CallbackOrder() if order is None else order
        self._lock = threading.Lock()
        self._key: tuple[int, ...] | None = None  # once it has callbacks

    def then(self, callback):
        """As torch's: return the future of ``callback(self)``, called when this one is complete."""
        with self._lock:
            if not self.done():
                self._open()
                return super().then(callback)
        return super().then(callback)

    def add_done_callback(self, callback) -> None:
        """As torch's: call ``callback(self)`` when this one is complete."""
        with self._lock:
            if not self.done():
                self._open()
                return super().add_done_callback(callback)
        return super().add_done_callback(callback)

    def _open(self) -> None:
        if self._key is None:
            self._key = self._order.open()

    def complete(self, value: Callable) -> None:
        """Complete it with what a function returns, or with the error that it raises."""
        with self._lock:
            if self._key is None:
                self._set(value)
                return
        self._order.run(self._key, lambda: self._set(value))

    def _set(self, value: Callable) -> None:
        try:
            result = value()
        except Exception as error:
            fail_future(self, error)
        else:
            self.set_result(result)
