"""Modules whose parameters, gradients and optimizer state are sharded over the ranks, and plug-ins
for torch's FSDP2.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .fsdp1 import ShardedDataParallel
from .fsdp1_arguments import ShardingStrategy
from .fully_shard import fully_shard
from .materialize import materialize
from .memory_plan import MemoryPlan, memory_plan
from .module import ShardedModule, UnshardHandle, register_forward_method, share_comm_ctx
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .ragged_tensor import RaggedTensor
from .unit import Unit
from .wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

# FSDP2's names.
FSDPModule = ShardedModule
register_fsdp_forward_method = register_forward_method

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "MemoryPlan",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "RaggedTensor",
    "ShardedDataParallel",
    "ShardedModule",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Unit",
    "UnshardHandle",
    "always_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "materialize",
    "memory_plan",
    "register_forward_method",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
