"""FSDP1's names over the same units: `ShardedDataParallel`, its arguments, and its settings of
state dicts.
"""

__all__ = []
