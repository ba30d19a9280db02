"""Memory that an engine uses with no staging copy (ncclMemAlloc), as torch tensors that free it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections import deque

import torch

from ..cuda_state import is_capturing
from ..errors import CollectivesError
from .arguments import parse_allocation

__all__ = ["allocate", "allocation_of", "free_dropped", "storage_of"]


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


class _CudaBlock:
    """CUDA allocation as torch reads it.

    Torch keeps this object alive as long as a tensor views the memory.
    """

    def __init__(self, ptr: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


def allocate(comm, n: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Allocate a tensor of `n` elements by ``ncclMemAlloc``; see `Communicator.empty`.

    On the host it is freed with the last tensor that views it, on CUDA by the next `free_dropped`.
    """
    comm._check_open("empty")
    n, dtype = parse_allocation(comm, n, dtype)
    library, device = comm.engine.library, comm.device
    nbytes = n * dtype.itemsize
    if not nbytes:
        return torch.empty(n, dtype=dtype, device=device)
    if device.type == "cpu":
        ptr = library.mem_alloc(nbytes)
        block = (ctypes.c_char * nbytes).from_address(ptr)
        _free_with(block, library, ptr, None)
        return torch.frombuffer(block, dtype=dtype)
    with torch.cuda.device(device):
        free_dropped()
        ptr = library.mem_alloc(nbytes)
    block = _CudaBlock(ptr, nbytes)
    _free_with(block, library, ptr, device)
    return torch.as_tensor(block, device=device).view(dtype)


def _free_with(block, library, ptr: int, device: torch.device | None) -> None:
    """Free memory when an object is freed: at once on the host, by `free_dropped` on CUDA."""
    # Not at interpreter exit: tensors may still be in use by then, and the system takes the memory
    # back anyway.
    weakref.finalize(block, _drop, library, ptr, device, os.getpid()).atexit = False


def _drop(library, ptr: int, device: torch.device | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has the mapping, but the parent owns the memory
        return
    if device is None:
        _free(library, ptr)
    else:
        _dropped.append((library, ptr, device))


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
        for device in {device for _, _, device in blocks}:
            torch.cuda.synchronize(device)
    except RuntimeError:
        _dropped.extend(blocks)
        raise
    for library, ptr, device in blocks:
        with torch.cuda.device(device):
            _free(library, ptr)
