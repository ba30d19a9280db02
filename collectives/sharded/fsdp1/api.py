"""FSDP1's enums and configurations: strategy, prefetch, mixed precision, offloading, state dicts."""

from __future__ import annotations

import dataclasses
import enum

import torch

from ...errors import InvalidArgument
from ..policies import check_floating

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


# ---- FSDP1's names.


class ShardingStrategy(enum.Enum):
    """What is sharded.

    FULL_SHARD: parameters, gradients and optimizer state; parameters are gathered for the forward
    and again for the backward. SHARD_GRAD_OP: parameters stay gathered from the forward to the end
    of the backward. SHARD_OPTIMIZER: each rank always holds all parameters; gradients and optimizer
    state are sharded, and what other ranks have updated is gathered in place. NO_SHARD: as DDP.
    HYBRID_SHARD: FULL_SHARD inside a group, and replicas over such groups; _HYBRID_SHARD_ZERO2:
    SHARD_GRAD_OP inside a group.
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()
    SHARD_OPTIMIZER = enum.auto()


class BackwardPrefetch(enum.Enum):
    """When a backward prefetches the next unit: before the current one's gradients are computed, or
    after that.
    """

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


@dataclasses.dataclass
class MixedPrecision:
    """In which dtypes modules compute, by FSDP1's names: see `MixedPrecisionPolicy`.

    `buffer_dtype`: to which floating buffers are cast, once; None: they are not cast.
    `cast_forward_inputs` applies to each unit, `cast_root_forward_inputs` to the outermost.
    `keep_low_precision_grads`: leave the shards' gradients in the dtype of the reduction; refused,
    since torch's optimizers don't take them. `_module_classes_to_ignore`: modules of these classes
    become units that compute in their own dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple[type, ...] = (torch.nn.modules.batchnorm._BatchNorm,)

    def __post_init__(self):
        check_floating(self, "param_dtype", "reduce_dtype", "buffer_dtype")
        if self.keep_low_precision_grads:
            raise InvalidArgument(
                "keep_low_precision_grads: gradients of another dtype than their parameters are not supported: leave "
                "it out, and the pieces' gradients are of the parameters' own dtype"
            )


@dataclasses.dataclass
class CPUOffload:
    """Whether shards, gradients and optimizer state stay on the host: see `CPUOffloadPolicy`."""

    offload_params: bool = False


class StateDictType(enum.Enum):
    """What `state_dict` returns: full tensors, or this rank's shards as they lie (LOCAL is the same
    as SHARDED).
    """

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


@dataclasses.dataclass
class StateDictConfig:
    """`offload_to_cpu`: return tensors on the host."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """`rank0_only`: return the tensors on rank 0 only; the other ranks get an empty dictionary."""

    rank0_only: bool = False


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For SHARDED_STATE_DICT."""


@dataclasses.dataclass
class OptimStateDictConfig:
    """`offload_to_cpu`: return tensors on the host."""

    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """`rank0_only`: return the state on rank 0 only; the other ranks get an empty dictionary."""

    rank0_only: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For SHARDED_STATE_DICT."""


@dataclasses.dataclass
class StateDictSettings:
    """What `ShardedDataParallel.set_state_dict_type` has set."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig
