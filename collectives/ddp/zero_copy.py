"""Zero copy: DDP's buckets in memory that an engine uses in place.

On the host they lie in memory mappings of their own, which the ranks can share. On CUDA they lie in
a memory pool over ncclMemAlloc, which NCCL can register.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ..comm.malloc import allocate_with_mmap
from ..comm.mem_pool import use_mem_pool
from ..torch_compat import disable_dynamo

__all__ = ["BucketRebuild", "allocate_buckets", "rebuild_in_shareable_memory"]

_FORWARDS_TO_FINAL = 8  # forwards with autograd after which DDP has its final buckets, some of them under no_sync()


def allocate_buckets(ddp):
    """Return a context in which the buckets that DDP makes lie in a memory pool; on CUDA only."""
    return use_mem_pool(ddp.device) if ddp.device.type == "cuda" else contextlib.nullcontext()


class BucketRebuild:
    """Makes the final buckets of a DDP object, before a forward of DDP itself would.

    DDP makes its buckets again in its second or third forward, and keeps those. It is also a
    forward pre-hook of DDP.
    """

    def __init__(self):
        self._forwards = 0

    @disable_dynamo
    def __call__(self, ddp, inputs=()) -> None:
        """Make the buckets if they are due.

        Nothing is done in ``join()``, where ranks that have joined rebuild in an order of their
        own.
        """
        if self._forwards < _FORWARDS_TO_FINAL and torch.is_grad_enabled():
            self._forwards += 1
            if _rebuild(ddp):
                self._forwards = _FORWARDS_TO_FINAL


def _rebuild(ddp) -> bool:
    if ddp._use_python_reducer or ddp._delay_all_reduce_all_params or ddp._join_config.enable:
        return False
    rebuilt = False

    def rebuild() -> None:
        nonlocal rebuilt
        if ddp.reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True
            rebuilt = True

    _ALLOCATORS[ddp.device.type](ddp, rebuild)
    return rebuilt


def _allocate_in_pool(ddp, function: Callable[[], None]) -> None:
    with allocate_buckets(ddp):
        function()


_ALLOCATORS = {"cpu": lambda ddp, function: allocate_with_mmap(function), "cuda": _allocate_in_pool}


def rebuild_in_shareable_memory(ddp) -> None:
    """Let a DDP object of torch's own make its final buckets in memory that an engine uses in place.

    Its first buckets, which it frees after one backward, exist already.
    """
    if ddp.device.type in _ALLOCATORS and not hasattr(ddp, "bucket_rebuild"):
        ddp.register_forward_pre_hook(BucketRebuild())
