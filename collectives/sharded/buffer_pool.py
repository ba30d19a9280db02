"""Host memory of the engine, lent again and again: gathered parameters and gradients on their way lie in it."""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from collections import deque

import torch

from ..comm.communicator import Communicator

__all__ = ["LEAST_LENT", "Loans"]

# Bytes from which a buffer is lent: a smaller one shares malloc's pages, and its staging copy stays in the cache.
LEAST_LENT = 64 << 10
_LOOSE = 1.25  # how much more than was lent may be held


class Loans:
    """Memory that the peers read and write in place, mapped once and not in every step.

    A tensor that is lent comes back when the last tensor that views it is gone, whoever holds it. `lent` and `most`
    count bytes that were asked for: now, and at one time at the most; `held` counts all blocks. Before it grows past
    `most`, what is free is given back. A block may be larger than what is lent of it, until `held` passes `most` by a
    quarter: then blocks of the right size take its place (with no such margin, units of many sizes would map memory in
    every step).
    """

    def __init__(self):
        self._lock = threading.Lock()
        # Blocks whose tensors are gone. Finalizers fill it, at any place of any thread: they must not wait for a lock.
        self._returned: deque[tuple[torch.Tensor, int]] = deque()
        self._free: list[torch.Tensor] = []  # by size
        self.held = self.lent = self.most = 0
        self._owner = os.getpid()

    def take(self, comm: Communicator, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Lend a tensor of `n` elements, of undefined contents."""
        if self._owner != os.getpid():
            self.__init__()  # a forked child has the parent's memory before it, in which the parent goes on working
        nbytes = n * dtype.itemsize
        with self._lock:
            block = self._block(comm, nbytes)
        loan = (ctypes.c_char * nbytes).from_address(block.data_ptr())
        weakref.finalize(loan, self._returned.append, (block, nbytes)).atexit = False
        return torch.frombuffer(loan, dtype=dtype)  # its storage holds the loan

    def trim(self) -> None:
        """Give back what is not lent."""
        with self._lock:
            while self._returned:
                block, asked = self._returned.popleft()
                self.lent -= asked
                self._free.append(block)
            self.held -= sum(block.numel() for block in self._free)
            self._free.clear()

    def _block(self, comm: Communicator, nbytes: int) -> torch.Tensor:
        while self._returned:
            block, asked = self._returned.popleft()
            self.lent -= asked
            bisect.insort_left(self._free, block, key=torch.Tensor.numel)  # lent next of its size: caches have it
        self.lent += nbytes
        self.most = max(self.most, self.lent)
        at = bisect.bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if at < len(self._free) and (self._free[at].numel() == nbytes or self.held <= _LOOSE * self.most):
            return self._free.pop(at)
        while self._free and self.held + nbytes > self.most:
            self.held -= self._free.pop(0).numel()
        self.held += nbytes
        return comm.empty(nbytes, torch.uint8)
