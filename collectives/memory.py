"""Memory that an engine can use with no staging copy, as torch tensors that free it."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref

import torch

from .errors import CollectivesError

__all__ = ["Registration", "allocate", "memory_of"]


def memory_of(array):
    """Give what keeps an array's memory alive, also where the array is given another one (``tensor.data = other``)."""
    if isinstance(array, torch.Tensor):
        return array.untyped_storage()
    return getattr(array, "data", None) if type(array).__module__.startswith("cupy") else array


class Registration:
    """A registered array, held alive until it is deregistered. Made by `Communicator.register()`."""

    __slots__ = ("_memory", "array", "handle", "nbytes")

    def __init__(self, array, handle: int, nbytes: int):
        self.array = array
        self._memory = memory_of(array)
        self.handle = handle
        self.nbytes = nbytes

    def __repr__(self):
        return f"<Registration of {self.nbytes} bytes>"


class _CudaBlock:
    """What torch reads a CUDA allocation from; it keeps this object alive as long as a tensor views the memory."""

    def __init__(self, ptr: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


def allocate(library, device: torch.device, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of `n` elements by ``ncclMemAlloc``; it is freed when the last tensor that views it is gone."""
    nbytes = n * dtype.itemsize
    if not nbytes:
        return torch.empty(n, dtype=dtype, device=device)
    if device.type == "cpu":
        ptr = library.mem_alloc(nbytes)
        block = (ctypes.c_char * nbytes).from_address(ptr)
        _free_with(block, library, ptr, None)
        return torch.frombuffer(block, dtype=dtype)
    with torch.cuda.device(device):
        ptr = library.mem_alloc(nbytes)
    block = _CudaBlock(ptr, nbytes)
    _free_with(block, library, ptr, device)
    return torch.as_tensor(block, device=device).view(dtype)


def _free_with(block, library, ptr: int, device: torch.device | None) -> None:
    # Not at interpreter exit: tensors may still be in use by then, and the system takes the memory back anyway.
    weakref.finalize(block, _free, library, ptr, device, os.getpid()).atexit = False


def _free(library, ptr: int, device: torch.device | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has the mapping, but it isn't the child's to give back
        return
    try:
        if device is not None:
            torch.cuda.synchronize(device)  # freeing is not ordered by streams
        library.mem_free(ptr)
    except CollectivesError as error:
        print(f"collectives: memory at {ptr:#x} could not be freed: {error}", file=sys.stderr)
