"""Arena: memory for the gathered parameters and packed gradients of all units of one communicator.

A unit's gathered buffer is a tensor whose storage has memory only while the unit is gathered. The
memory moves from the arena into the storage and back, so everything that autograd has saved of the
parameters (views of that storage) is right again once the unit is gathered anew. A steady step
allocates nothing.
"""

from __future__ import annotations

import torch

from .. import cuda_state
from ..comm.communicator import Communicator
from ..torch_compat import can_swap_storage_memory, swap_storage_memory

__all__ = ["Arena", "Block"]

_CAPTURED = "the first steps of units allocate their memory: make some steps before the capture"


class Block:
    """A piece of the arena's memory, in use by one unit or free.

    `memory`: its bytes. `event`: on a GPU, the end of its last use. `capture`: the number of the capture of
    a CUDA graph in which that was; None for none.
    """

    __slots__ = ("capture", "event", "memory")

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.event: torch.cuda.Event | None = None
        self.capture: int | None = None


class Arena:
    """Blocks of memory of a communicator's engine, which peers read and write with no copy."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._free: list[Block] = []
        # Stands for all memory of torch's allocator: its event is that of the last use.
        self._released = Block(torch.empty(0, device=comm.device))

    def acquire(self, nbytes: int) -> Block:
        """Return a block of at least so many bytes with any values, which the caller releases.

        On a GPU the current stream waits for the last use of the block.
        """
        fitting = [block for block in self._free if nbytes <= block.memory.numel()]
        if not fitting:
            cuda_state.refuse_capture(self._comm.device, _CAPTURED)
            return Block(self._comm.empty(nbytes, dtype=torch.uint8))
        block = min(fitting, key=_size_of)
        self._free.remove(block)
        self._wait(block)
        return block

    def release(self, block: Block) -> None:
        """Release a block, whose last use is on the current stream."""
        self._record(block)
        self._free.append(block)

    def trim(self) -> None:
        """Free the blocks that nobody uses."""
        self._free.clear()

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> Block:
        """Give a storage memory; return the block that it is of, for `drain`."""
        if not can_swap_storage_memory():
            self._wait(self._released)
            storage.resize_(nbytes)
            return self._released
        block = self.acquire(nbytes)
        swap_storage_memory(storage, block.memory.untyped_storage())
        return block

    def drain(self, storage: torch.UntypedStorage, block: Block) -> None:
        """Take the memory of a storage back."""
        if block is self._released:
            self._record(block)
            storage.resize_(0)
            return
        swap_storage_memory(storage, block.memory.untyped_storage())
        self.release(block)

    def _record(self, block: Block) -> None:
        device = self._comm.device
        if device.type != "cuda":
            return
        stream = cuda_state.current_stream(device)
        block.capture = cuda_state.capture_id(stream)
        block.event = stream.record_event()

    def _wait(self, block: Block) -> None:
        if block.event is None:
            return
        stream = cuda_state.current_stream(self._comm.device)
        # The device is idle when a capture begins, and an event from outside can't be waited for in it.
        if cuda_state.capture_id(stream) == block.capture:
            stream.wait_event(block.event)


def _size_of(block: Block) -> int:
    return block.memory.numel()
