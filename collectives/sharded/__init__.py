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

from .checkpointer import Checkpointer, LoadedCheckpoint, load, save
from .fsdp1 import ShardedDataParallel
from .fsdp1_arguments import ShardingStrategy
from .fully_shard import fully_shard
from .materialize import materialize
from .memory_plan import MemoryPlan, memory_plan
from .module import ShardedModule, UnshardHandle, register_forward_method, share_comm_ctx
from .muon import Muon
from .optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .ragged_tensor import RaggedTensor
from .scaler import ShardedGradScaler
from .state import get_model_state_dict, set_model_state_dict
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
    "Checkpointer",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LoadedCheckpoint",
    "MemoryPlan",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "Muon",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "RaggedTensor",
    "ShardedDataParallel",
    "ShardedGradScaler",
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
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "lambda_auto_wrap_policy",
    "load",
    "materialize",
    "memory_plan",
    "register_forward_method",
    "register_fsdp_forward_method",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
