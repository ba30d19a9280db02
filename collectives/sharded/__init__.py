"""Modules whose parameters, gradients and optimizer state lie in shards on the ranks; and plug-ins for torch's own."""

from .api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from .module import ShardedModule, UnshardHandle, fully_shard, register_forward_method
from .unit import Unit

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedModule",
    "ShardingStrategy",
    "Unit",
    "UnshardHandle",
    "fully_shard",
    "register_forward_method",
]
