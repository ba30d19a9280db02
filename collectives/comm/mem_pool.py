"""Memory pools over ncclMemAlloc: what torch allocates inside of `use_mem_pool` can be registered.

For tensors that torch itself makes, such as DDP's buckets; our own come from `Communicator.empty`.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from .. import _nccl
from ..errors import EngineUnavailable
from .engine import get_engine

__all__ = ["is_pooled", "missing_pool_reason", "use_mem_pool"]


@functools.cache
def missing_pool_reason() -> str:
    """Return why this process has no such pools; "" where it has."""
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
        return f"torch {torch.__version__} has no torch.cuda.MemPool"
    try:
        _nccl.use_in_pools(get_engine("nccl").library)
    except EngineUnavailable as error:
        return error.message
    return ""


@functools.cache
def _allocator():
    """Return torch's allocator of the pools' segments; it must live as long as they do."""
    return torch.cuda.memory.CUDAPluggableAllocator(_nccl.__file__, *_nccl.POOL_FUNCTIONS)


@functools.cache
def _get_pool(device: torch.device):
    """Return the pool of a device. It is kept, so that what was freed is used again."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool(_allocator().allocator())


@contextlib.contextmanager
def use_mem_pool(device: torch.device):
    """Have this thread's CUDA tensors of a device allocated by ``ncclMemAlloc`` inside the block.

    Does nothing where there are no pools, see `missing_pool_reason`. Torch frees the memory as any
    other of its caching allocator's.
    """
    if missing_pool_reason():
        yield
        return
    with torch.cuda.use_mem_pool(_get_pool(device), device):
        yield


def is_pooled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is a pool's."""
    return _nccl.pool_holds(tensor.data_ptr())
