"""Modules whose parameters, gradients and optimizer state are sharded over the ranks, and plug-ins
for torch's FSDP2.
"""

from .checkpointer import Checkpointer, LoadedCheckpoint, load, save
from .fully_shard import fully_shard
from .module import ShardedModule, UnshardHandle, register_forward_method, share_comm_ctx
from .muon import Muon
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .ragged_tensor import RaggedTensor
from .scaler import ShardedGradScaler
from .state import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from .unit import Unit

# FSDP2's names.
FSDPModule = ShardedModule
register_fsdp_forward_method = register_forward_method

__all__ = [
    "CPUOffloadPolicy",
    "Checkpointer",
    "FSDPModule",
    "LoadedCheckpoint",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "RaggedTensor",
    "ShardedGradScaler",
    "ShardedModule",
    "Unit",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "load",
    "register_forward_method",
    "register_fsdp_forward_method",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "share_comm_ctx",
]
