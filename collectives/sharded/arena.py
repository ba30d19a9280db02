"""Arena: memory for the gathered parameters and gradients of all units of one communicator.

A unit's gathered buffer is a tensor whose storage has memory only while the unit is gathered. The
memory moves from the arena into the storage and back, so everything that autograd has saved of the
parameters (views of that storage) is right again once the unit is gathered anew. A steady step
allocates nothing.
"""

from __future__ import annotations

import torch

from ..comm.communicator import Communicator
from ..torch_compat import swap_storage_memory

__all__ = ["Arena"]


class Arena:
    """Buffers of a communicator, each in use by one unit or free.

    On the host they are the engine's shared memory, which peers read and write with no copy.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes, with any values, which the caller gives back."""
        fitting = [buffer for buffer in self._free if nbytes <= buffer.numel()]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
            self._free = [each for each in self._free if each is not buffer]
            return buffer
        return self._comm.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
        """Give a storage memory; return the buffer that it is of, for `drain`."""
        buffer = self.take(nbytes)
        swap_storage_memory(storage, buffer.untyped_storage())
        return buffer

    def drain(self, storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
        """Take the memory of a storage back."""
        swap_storage_memory(storage, buffer.untyped_storage())
        self.give(buffer)
