"""ShardingStrategy: torch's strategies and one of our own. FSDP1's other enums and configurations
are torch's, from ``torch.distributed.fsdp``.
"""

from __future__ import annotations

import enum

from torch.distributed import fsdp

__all__ = ["ShardingStrategy"]


class ShardingStrategy(enum.Enum):
    """What is sharded: torch's strategies, which are the values, and SHARD_OPTIMIZER, which torch
    doesn't have.

    - FULL_SHARD: parameters, gradients and optimizer state; parameters are gathered for the forward
      and again for the backward.
    - SHARD_GRAD_OP: parameters stay gathered from the forward to the end of the backward.
    - SHARD_OPTIMIZER: each rank always holds all parameters; gradients and optimizer state are
      sharded, and what other ranks have updated is gathered in place.
    - NO_SHARD: as DDP.
    - HYBRID_SHARD: FULL_SHARD inside a group, and replicas over such groups.
    - _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside a group, and replicas over such groups.

    ``ShardingStrategy(one of torch's)`` is ours of that name.
    """

    FULL_SHARD = fsdp.ShardingStrategy.FULL_SHARD
    SHARD_GRAD_OP = fsdp.ShardingStrategy.SHARD_GRAD_OP
    NO_SHARD = fsdp.ShardingStrategy.NO_SHARD
    HYBRID_SHARD = fsdp.ShardingStrategy.HYBRID_SHARD
    _HYBRID_SHARD_ZERO2 = fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"
