"""Memory of both engines behind one small face, and buffers with guard zones on both sides."""

from __future__ import annotations

import numpy as np

__all__ = ["Guarded", "memory_of"]

GUARD = 64  # bytes on each side
GUARD_BYTE = 0xA5
POISON_BYTE = 0x5C


class HostMemory:
    """Ordinary memory of the process, 64-byte aligned."""

    def allocate(self, nbytes: int):
        whole = np.empty(nbytes + 64, dtype=np.uint8)
        skip = -whole.ctypes.data % 64
        return whole[skip : skip + nbytes]

    def address(self, block) -> int:
        return block.ctypes.data

    def write(self, block, start: int, data: np.ndarray) -> None:
        block[start : start + data.size] = data

    def read(self, block) -> np.ndarray:
        return block

    def synchronize(self) -> None:
        pass


class CudaMemory:
    """Device memory by way of torch, which is there wherever these tests run; its blocks are 512-byte aligned."""

    def __init__(self, device: int = 0):
        import torch

        self.torch = torch
        torch.cuda.set_device(device)

    def allocate(self, nbytes: int):
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def address(self, block) -> int:
        return block.data_ptr()

    def write(self, block, start: int, data: np.ndarray) -> None:
        block[start : start + data.size].copy_(self.torch.from_numpy(np.array(data)))
        self.synchronize()

    def read(self, block) -> np.ndarray:
        return block.cpu().numpy()

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


_memories: dict[str, object] = {}


def memory_of(engine: str):
    """The memory that this engine works on: the host's, or GPU 0's."""
    if engine not in _memories:
        _memories[engine] = HostMemory() if engine == "host" else CudaMemory()
    return _memories[engine]


class Guarded:
    """``nbytes`` of memory, ``offset`` bytes past a 64-byte boundary, between two guard zones; poisoned at first."""

    def __init__(self, memory, nbytes: int, offset: int = 0):
        self.memory = memory
        self.nbytes = nbytes
        self.start = GUARD + offset
        self.block = memory.allocate(self.start + nbytes + GUARD)
        image = np.full(self.start + nbytes + GUARD, GUARD_BYTE, dtype=np.uint8)
        image[self.start : self.start + nbytes] = POISON_BYTE
        memory.write(self.block, 0, image)

    @property
    def address(self) -> int:
        return self.memory.address(self.block) + self.start

    def write(self, values: np.ndarray, at: int = 0) -> None:
        """Store the bytes of ``values``, ``at`` bytes into the buffer."""
        if values.size:
            self.memory.write(self.block, self.start + at, np.ascontiguousarray(values).view(np.uint8))

    def bytes(self) -> np.ndarray:
        return self.memory.read(self.block)[self.start : self.start + self.nbytes]

    def values(self, storage, at: int = 0, count: int | None = None) -> np.ndarray:
        """A copy of ``count`` elements of the NumPy type ``storage``, from ``at`` bytes on."""
        end = self.nbytes if count is None else at + count * np.dtype(storage).itemsize
        return np.frombuffer(self.bytes()[at:end].tobytes(), dtype=storage)

    def guards_intact(self) -> bool:
        whole = self.memory.read(self.block)
        before, after = whole[: self.start], whole[self.start + self.nbytes :]
        return bool((before == GUARD_BYTE).all() and (after == GUARD_BYTE).all())

    def still_poisoned(self) -> bool:
        return bool((self.bytes() == POISON_BYTE).all())
