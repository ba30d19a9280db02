"""Memory that an engine uses with no staging copy (ncclMemAlloc), as torch tensors that free it.

On CUDA an allocation takes at least 2 MiB, so small tensors share blocks of that size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections import deque

import torch

from ..cuda_state import is_capturing
from ..errors import CollectivesError
from .arguments import parse_allocation
from .engine import get_engine

__all__ = [
    "MIN_SHARED_BYTES",
    "allocate",
    "allocate_shared",
    "allocation_of",
    "free_dropped",
    "is_window_memory",
    "raw_cuda_memory",
    "storage_of",
]

MIN_SHARED_BYTES = 64 << 10  # of a buffer that is worth pages of its own

_BLOCK_BYTES = 2 << 20  # what ncclMemAlloc takes at least on CUDA
_SHARED_BELOW = 1 << 20  # bytes of a tensor; a larger one has an allocation of its own
_ALIGNMENT = 512  # of a tensor in a shared block, as of torch's own


def storage_of(array):
    """Return the object that keeps an array's memory alive, even after ``tensor.data = other``."""
    if isinstance(array, torch.Tensor):
        return array.untyped_storage()
    return getattr(array, "data", None) if type(array).__module__.startswith("cupy") else array


def allocation_of(array, ptr: int, nbytes: int) -> tuple[int, int]:
    """Return (address, bytes) of an array's allocation; (`ptr`, `nbytes`) if it isn't known."""
    if isinstance(array, torch.Tensor):
        storage = array.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    return ptr, nbytes


class _CudaArray:
    """CUDA memory as torch reads it.

    Torch keeps this object alive as long as a tensor views the memory.
    """

    def __init__(self, ptr: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


def raw_cuda_memory(ptr: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return CUDA memory as a tensor of bytes, which doesn't keep it alive."""
    return torch.as_tensor(_CudaArray(ptr, nbytes), device=device)


class _SharedBlock:
    """An allocation of ``ncclMemAlloc`` on CUDA that small tensors share."""

    def __init__(self, ptr: int):
        self.ptr = ptr
        self._free = [(0, _BLOCK_BYTES)]  # (begin, end) in bytes, in order, none next to another

    @property
    def is_empty(self) -> bool:
        """Whether no tensor has a part of it."""
        return self._free == [(0, _BLOCK_BYTES)]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate the first free part of so many bytes; return its address, None where there is none."""
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[number : number + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return self.ptr + begin
        return None

    def free(self, ptr: int, nbytes: int) -> None:
        """Free a part, of the size with which it was allocated."""
        merged = []
        for begin, end in sorted([*self._free, (ptr - self.ptr, ptr - self.ptr + nbytes)]):
            if merged and merged[-1][1] == begin:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        self._free = merged


class _SharedBlocks:
    """The shared blocks of this process, by library and device."""

    def __init__(self):
        self._lock = threading.Lock()
        self._blocks: dict[tuple, list[_SharedBlock]] = {}

    def allocate(self, library, device: torch.device, nbytes: int) -> tuple[int, _SharedBlock]:
        """Return the address of a part, and its block; the device is the current one."""
        with self._lock:
            blocks = self._blocks.setdefault((library, device), [])
            for block in blocks:
                ptr = block.allocate(nbytes)
                if ptr is not None:
                    return ptr, block
            block = _SharedBlock(library.mem_alloc(_BLOCK_BYTES))
            blocks.append(block)
            return block.allocate(nbytes), block

    def free(self, library, device: torch.device, part: tuple[int, int, _SharedBlock]) -> None:
        """Free a part that nothing uses any more, and a block without parts."""
        ptr, nbytes, block = part
        with self._lock:
            block.free(ptr, nbytes)
            if block.is_empty:
                self._blocks[library, device].remove(block)
                _free(library, block.ptr)


_shared_blocks = _SharedBlocks()


def _after_fork() -> None:
    """Leave the parent's blocks to it, with a lock that another thread of it may hold."""
    global _shared_blocks
    _shared_blocks = _SharedBlocks()


os.register_at_fork(after_in_child=_after_fork)

# Addresses of allocations that were made for `register_window`.
_window_memory: set[int] = set()


def is_window_memory(ptr: int) -> bool:
    """Return whether an allocation was made for `register_window`."""
    return ptr in _window_memory


def allocate(comm, n: int, dtype: torch.dtype | None, window: bool) -> torch.Tensor:
    """Allocate a tensor of `n` elements by ``ncclMemAlloc``; see `CommMemory.empty`.

    On the host it is freed with the last tensor that views it, on CUDA by the next `free_dropped`.
    """
    comm._check_open("empty")
    n, dtype = parse_allocation(comm, n, dtype)
    library, device = comm.engine.library, comm.device
    nbytes = n * dtype.itemsize
    if not nbytes:
        return torch.empty(n, dtype=dtype, device=device)
    if device.type == "cpu":
        return _allocate_on_host(library, nbytes, dtype, window)
    with torch.cuda.device(device):
        free_dropped()
        ptr, part = _allocate_on_cuda(library, device, nbytes, window)
    array = _CudaArray(ptr, nbytes)
    _drop_with(array, library, ptr, device, part, window)
    return torch.as_tensor(array, device=device).view(dtype)


def allocate_shared(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of `n` > 0 elements that the ranks of a node share, as `CommMemory.empty` does on
    the host; no communicator need be open.
    """
    return _allocate_on_host(get_engine("host").library, n * dtype.itemsize, dtype, False)


def _allocate_on_host(library, nbytes: int, dtype: torch.dtype, window: bool) -> torch.Tensor:
    ptr = library.mem_alloc(nbytes)
    array = (ctypes.c_char * nbytes).from_address(ptr)
    _drop_with(array, library, ptr, torch.device("cpu"), None, window)
    return torch.frombuffer(array, dtype=dtype)


def _drop_with(array, library, ptr: int, device: torch.device, part, window: bool) -> None:
    """Have memory dropped with the object by which torch reads it."""
    if window:
        _window_memory.add(ptr)
    # Not at interpreter exit: tensors may still be in use by then, and the system takes the memory
    # back anyway.
    weakref.finalize(array, _drop, library, ptr, device, part, os.getpid()).atexit = False


def _allocate_on_cuda(library, device: torch.device, nbytes: int, window: bool):
    """Return an address and, where it is part of a shared block, (address, bytes, block)."""
    if window or nbytes >= _SHARED_BELOW:
        return library.mem_alloc(nbytes), None
    rounded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    ptr, block = _shared_blocks.allocate(library, device, rounded)
    return ptr, (ptr, rounded, block)


def _drop(library, ptr: int, device: torch.device, part, owner: int) -> None:
    """Free memory that no tensor views any more: at once on the host, by `free_dropped` on CUDA."""
    if os.getpid() != owner:  # a forked child has the mapping, but the parent owns the memory
        return
    _window_memory.discard(ptr)
    if device.type == "cpu":
        _free(library, ptr)
    else:
        _dropped.append((library, ptr, device, part))


def _free(library, ptr: int) -> None:
    try:
        library.mem_free(ptr)
    except CollectivesError as error:
        print(f"collectives: memory at {ptr:#x} could not be freed: {error}", file=sys.stderr)


# CUDA memory that no tensor views any more. Finalizers fill it at any place of any thread, where
# they must neither wait nor take a lock.
_dropped: deque[tuple] = deque()


def free_dropped() -> None:
    """Free the CUDA memory of the tensors that were freed; the host waits for its devices first.

    Any stream may still use such memory, and freeing it is not ordered by streams. So it stays
    allocated until the next `allocate` or the close of a communicator, which call this. Does
    nothing where there is none, and while the current stream is captured.
    """
    if not _dropped or is_capturing(None):
        return
    blocks = []
    with contextlib.suppress(IndexError):  # empty; another thread may take some of them
        while True:
            blocks.append(_dropped.popleft())
    try:
        for device in {device for _, _, device, _ in blocks}:
            torch.cuda.synchronize(device)
    except RuntimeError:
        _dropped.extend(blocks)
        raise
    for library, ptr, device, part in blocks:
        with torch.cuda.device(device):
            if part is None:
                _free(library, ptr)
            else:
                _shared_blocks.free(library, device, part)
