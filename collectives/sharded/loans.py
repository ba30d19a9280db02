"""Host memory of the engine, lent again and again: gathered parameters and gradients on their way lie in it."""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from collections import deque

import torch

from ..communicator import Communicator

__all__ = ["LEAST_LENT", "Loans"]

# Bytes from which a buffer is lent: a smaller one shares malloc's pages, and its staging copy stays in the cache.
LEAST_LENT = 64 << 10


class Loans:
    """Memory that the peers read and write in place, mapped once and not in every step.

    A tensor that is lent comes back when the last tensor that views it is gone, whoever holds it. What is held is never
    more than what was lent at one time: before it grows past that, what is free is given back. `held`, `lent` and
    `most` count it in bytes: all blocks, those lent, and those lent at the most.
    """

    def __init__(self):
        self._lock = threading.Lock()
        # Blocks whose tensors are gone. Finalizers fill it, at any place of any thread: they must not wait for a lock.
        self._returned: deque[torch.Tensor] = deque()
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
        weakref.finalize(loan, self._returned.append, block).atexit = False
        return torch.frombuffer(loan, dtype=dtype)  # its storage holds the loan

    def _block(self, comm: Communicator, nbytes: int) -> torch.Tensor:
        while self._returned:
            block = self._returned.popleft()
            self.lent -= block.numel()
            bisect.insort(self._free, block, key=torch.Tensor.numel)
        at = bisect.bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if at < len(self._free):
            block = self._free.pop(at)
        else:  # all that is free is too small
            self.most = max(self.most, self.lent + nbytes)
            while self._free and self.held + nbytes > self.most:
                self.held -= self._free.pop(0).numel()
            block = comm.empty(nbytes, torch.uint8)
            self.held += nbytes
        self.lent += block.numel()
        self.most = max(self.most, self.lent)
        return block
