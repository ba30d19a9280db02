"""Modules whose parameters, gradients and optimizer state are sharded over the ranks, and plug-ins
for torch's FSDP2.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .fsdp1.api import ShardingStrategy
from .fsdp1.data_parallel import ShardedDataParallel
from .full_param_optimizer import FullParamOptimizer
from .materialize import materialize
from .memory_plan import MemoryPlan, memory_plan
from .module import ShardedModule, UnshardHandle, register_forward_method, share_comm_ctx
from .optimizer_hooks import register_elementwise_optimizer
from .scaler import ShardedGradScaler
from .sharding import fully_shard
from .state.checkpoint import load, save
from .state.checkpointer import Checkpointer, LoadedCheckpoint
from .state.model import get_model_state_dict, set_model_state_dict
from .state.optimizer import get_optimizer_state_dict, set_optimizer_state_dict
from .state.shard_tensor import ShardTensor as Piece
from .uneven import uneven
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
    "FullParamOptimizer",
    "FullStateDictConfig",
    "LoadedCheckpoint",
    "MemoryPlan",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "Piece",
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
    "register_elementwise_optimizer",
    "register_forward_method",
    "register_fsdp_forward_method",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "uneven",
    "wrap",
]
