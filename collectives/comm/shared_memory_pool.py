"""Pool of the host engine's memory for buffers that are used again and again."""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from collections import deque

import torch

from .communicator import Communicator

__all__ = ["SharedMemoryPool"]

_SLACK = 1.25  # reserved bytes over the most that were allocated


class SharedMemoryPool:
    """Pool of the engine's memory that peers read and write in place, mapped once and not in every
    step.

    A block returns to the pool when the last tensor that views it is freed, whoever holds it.
    `allocated` and `max_allocated` count bytes that were asked for: now, and at most at one time.
    `reserved` counts all blocks. Before it grows past `max_allocated`, free blocks are unmapped. A
    block may be larger than its tensor, until `reserved` passes `max_allocated` by a quarter: then
    blocks of the right size replace it. With no such margin, units of many sizes would map memory
    in every step.
    """

    def __init__(self):
        self._lock = threading.Lock()
        # Blocks whose tensors were freed. Finalizers fill it at any place of any thread, so they
        # must not take a lock.
        self._returned: deque[tuple[torch.Tensor, int]] = deque()
        self._free: list[torch.Tensor] = []  # by size
        self.reserved = self.allocated = self.max_allocated = 0
        self._owner = os.getpid()

    def allocate(self, comm: Communicator, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor of `n` elements."""
        if self._owner != os.getpid():
            self.__init__()  # a forked child shares these blocks with its parent, which still uses them
        nbytes = n * dtype.itemsize
        if not nbytes:
            return torch.empty(n, dtype=dtype, device="cpu")
        with self._lock:
            block = self._block(comm, nbytes)
        memory = (ctypes.c_char * nbytes).from_address(block.data_ptr())
        weakref.finalize(memory, self._returned.append, (block, nbytes)).atexit = False
        return torch.frombuffer(memory, dtype=dtype)  # its storage holds the block

    def trim(self) -> None:
        """Unmap the free blocks."""
        with self._lock:
            while self._returned:
                block, asked = self._returned.popleft()
                self.allocated -= asked
                self._free.append(block)
            self.reserved -= sum(block.numel() for block in self._free)
            self._free.clear()

    def _block(self, comm: Communicator, nbytes: int) -> torch.Tensor:
        while self._returned:
            block, asked = self._returned.popleft()
            self.allocated -= asked
            bisect.insort_left(self._free, block, key=torch.Tensor.numel)  # next of its size: it is in the cache
        self.allocated += nbytes
        self.max_allocated = max(self.max_allocated, self.allocated)
        at = bisect.bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if at < len(self._free) and (self._free[at].numel() == nbytes or self.reserved <= _SLACK * self.max_allocated):
            return self._free.pop(at)
        while self._free and self.reserved + nbytes > self.max_allocated:
            self.reserved -= self._free.pop(0).numel()
        try:
            block = comm.empty(nbytes, torch.uint8)
        except BaseException:
            self.allocated -= nbytes  # no block will return it
            raise
        self.reserved += nbytes
        return block
