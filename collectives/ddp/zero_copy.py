"""Zero copy: DDP's buckets in memory that an engine uses in place.

On the host they lie in the engine's memory, which the ranks of a node share. On CUDA they lie in a
memory pool over ncclMemAlloc, which NCCL can register.
"""

from __future__ import annotations

import contextlib
import math
import warnings

import torch

from ..comm.mem_pool import use_mem_pool
from ..comm.memory import MIN_SHARED_BYTES, allocate_shared
from ..errors import CollectivesError
from ..torch_compat import TorchDispatchMode, untraced

__all__ = ["BucketRebuild", "allocate_buckets", "rebuild_in_shareable_memory"]

_FORWARDS_TO_FINAL = 8  # forwards with autograd after which DDP has its final buckets, some of them under no_sync()


class _SharedBuckets(TorchDispatchMode):
    """Context in which the buckets that DDP makes lie in memory that the ranks of a node share.

    DDP's reducer is C++ and has no argument for an allocator, but it asks torch for a bucket by
    ``aten::empty``. Its other tensors are of integers.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            bucket = _allocate_bucket(args[0], kwargs.get("dtype"), kwargs.get("device"))
            if bucket is not None:
                return bucket
        return func(*args, **kwargs)


def _allocate_bucket(size, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor | None:
    """Return shared memory for a bucket; None for another tensor, and where there is no memory."""
    if device is None or device.type != "cpu" or dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        return None
    nbytes = math.prod(size) * dtype.itemsize
    if len(size) != 1 or nbytes < MIN_SHARED_BYTES:
        return None
    try:
        return allocate_shared(size[0], dtype)
    except CollectivesError as error:
        warnings.warn(
            f"a gradient bucket of {nbytes} bytes lies in ordinary memory, which takes longer to reduce: {error}",
            stacklevel=2,
        )
        return None


def allocate_buckets(ddp):
    """Return a context in which the buckets that DDP makes lie in memory that an engine uses in place."""
    if ddp.device.type == "cpu":
        return _SharedBuckets()
    return use_mem_pool(ddp.device) if ddp.device.type == "cuda" else contextlib.nullcontext()


class BucketRebuild:
    """Makes the final buckets of a DDP object, before a forward of DDP itself would.

    DDP makes its buckets again in its second or third forward, and keeps those. With
    ``find_unused_parameters`` it keeps the first ones. It is also a forward pre-hook of DDP.
    `shares_memory`: on the host, allocate them in memory that the ranks share.
    """

    def __init__(self, shares_memory: bool):
        self.shares_memory = shares_memory
        self._forwards = 0

    def __reduce__(self):
        return type(self), (self.shares_memory,)  # a copied DDP object makes its buckets from the beginning

    @untraced
    def __call__(self, ddp, inputs=()) -> None:
        """Make the buckets if they are due.

        Nothing is done in ``join()``, where ranks that have joined rebuild in an order of their
        own.
        """
        if ddp.device.type == "cpu" and not self.shares_memory:
            return
        if self._forwards < _FORWARDS_TO_FINAL and torch.is_grad_enabled():
            self._forwards += 1
            if _rebuild(ddp):
                self._forwards = _FORWARDS_TO_FINAL


def _rebuild(ddp) -> bool:
    if ddp._use_python_reducer or ddp._delay_all_reduce_all_params or ddp._join_config.enable:
        return False
    with allocate_buckets(ddp):
        if not ddp.reducer._rebuild_buckets():
            return False
    ddp._has_rebuilt_buckets = True
    return True


def rebuild_in_shareable_memory(ddp, shares_memory: bool = True) -> None:
    """Let a DDP object make its final buckets in memory that an engine uses in place.

    Its first buckets, which it frees after one backward, exist already. `shares_memory`: as of
    `BucketRebuild`.
    """
    if hasattr(ddp, "bucket_rebuild"):
        ddp.bucket_rebuild.shares_memory = shares_memory
    elif ddp.device.type in ("cpu", "cuda"):
        ddp.bucket_rebuild = BucketRebuild(shares_memory)
        ddp.register_forward_pre_hook(ddp.bucket_rebuild)
