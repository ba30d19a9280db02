"""Modules whose parameters, gradients and optimizer state lie in shards on the ranks; and plug-ins for torch's own."""

from .api import (
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
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .checkpoint import load, save
from .data_parallel import ShardedDataParallel
from .materialize import materialize
from .memory import MemoryPlan, memory_plan
from .model_state import get_model_state_dict, set_model_state_dict
from .module import ShardedModule, UnshardHandle, fully_shard, register_forward_method
from .optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from .piece import Piece
from .scaler import ShardedGradScaler
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

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
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
    "register_forward_method",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
