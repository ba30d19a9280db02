"""Zero copy: DDP's buckets in memory mappings of their own, which the host engine's ranks can share
in place.
"""

from __future__ import annotations

from ..comm.malloc import allocate_with_mmap

__all__ = ["FORWARDS_TO_FINAL", "rebuild_buckets_mapped"]

FORWARDS_TO_FINAL = 8  # forwards with autograd after which DDP has its final buckets, some of them under no_sync()


def rebuild_buckets_mapped(ddp) -> bool:
    """Let a DDP object make its final buckets, if they are due, in mappings of their own.

    Returns whether it did. DDP makes its buckets again in its second or third forward, and keeps
    those. Nothing is done in ``join()``, where ranks that have joined rebuild in an order of their
    own.
    """
    if ddp._use_python_reducer or ddp._delay_all_reduce_all_params or ddp._join_config.enable:
        return False
    rebuilt = False

    def rebuild() -> None:
        nonlocal rebuilt
        if ddp.reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True
            rebuilt = True

    allocate_with_mmap(rebuild)
    return rebuilt
