"""Communication hooks for torch's DistributedDataParallel."""

from .hook import DistributedDataParallel, HookState, fused_allreduce

__all__ = ["DistributedDataParallel", "HookState", "fused_allreduce"]
