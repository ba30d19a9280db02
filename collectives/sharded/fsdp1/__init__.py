"""FSDP1's vocabulary over the same units: `ShardedDataParallel`, its arguments, its settings of state dicts."""

__all__ = []
