"""Parsing of FSDP1's arguments: torch's enums and configurations, as the units take them."""

from __future__ import annotations

import enum

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import StateDictSettings, StateDictType

from ..arrays import kind_of
from ..comm.engine import parse_device
from ..errors import InvalidArgument
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, check_floating, parse_offload_policy

__all__ = ["Precision", "ShardingStrategy", "parse_cpu_offload", "parse_enum", "parse_state_dict_settings", "place_of"]

_NAME = "ShardedDataParallel"


class ShardingStrategy(enum.Enum):
    """What is sharded: torch's strategies, which are the values, and SHARD_OPTIMIZER.

    - FULL_SHARD: parameters, gradients and optimizer state.
    - SHARD_GRAD_OP: the same; parameters stay gathered from the forward to the end of the backward.
    - SHARD_OPTIMIZER: the same; parameters stay gathered, and are gathered anew after a step.
    - NO_SHARD: nothing, as DDP.
    - HYBRID_SHARD, _HYBRID_SHARD_ZERO2: FULL_SHARD, SHARD_GRAD_OP inside a node, and replicas over nodes.
    """

    FULL_SHARD = fsdp.ShardingStrategy.FULL_SHARD
    SHARD_GRAD_OP = fsdp.ShardingStrategy.SHARD_GRAD_OP
    NO_SHARD = fsdp.ShardingStrategy.NO_SHARD
    HYBRID_SHARD = fsdp.ShardingStrategy.HYBRID_SHARD
    _HYBRID_SHARD_ZERO2 = fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"

    @property
    def shape(self) -> str:
        """The shape of the ranks, as `resolve_mesh` takes it."""
        return "replicate" if self.name == "NO_SHARD" else "hybrid" if "HYBRID" in self.name else "shard"

    @property
    def reshard_after_forward(self) -> bool | None:
        """As `fully_shard` takes it."""
        return None if self.name in ("FULL_SHARD", "HYBRID_SHARD") else False


def parse_enum(kind, value, what: str):
    """Return an enum's member, from it, from its name, or from its value: for a `ShardingStrategy`, torch's."""
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if isinstance(value, enum.Enum) and any(value in (member, member.value) for member in kind):
        return kind(value)
    names = ", ".join(each for each in kind.__members__ if not each.startswith("_"))
    raise InvalidArgument(f"{what} must be a {kind.__name__} ({names}), not {value!r:.60}", op=_NAME)


def place_of(module: nn.Module, device_id) -> nn.Module:
    """Return a module whose parameters are where `module` is to compute: as ``device_id`` says, or where it is."""
    if device_id is None:
        return module
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        if device_id >= torch.cuda.device_count():
            raise InvalidArgument(
                f"device_id={device_id}: there are {torch.cuda.device_count()} GPUs here; leave it out, or give "
                "torch.device('cpu')",
                op=_NAME,
            )
        device_id = torch.device("cuda", device_id)
    device = parse_device(device_id)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return nn.ParameterList([nn.Parameter(torch.empty(0, device=device))])


def parse_cpu_offload(given) -> CPUOffloadPolicy | None:
    """Return the policy for ``cpu_offload``."""
    if given is None or isinstance(given, OffloadPolicy):
        return parse_offload_policy(given)
    if not isinstance(given, fsdp.CPUOffload):
        raise InvalidArgument(f"cpu_offload must be a CPUOffload, not {kind_of(given)}", op=_NAME)
    return CPUOffloadPolicy() if given.offload_params else None


class Precision:
    """FSDP1's ``mixed_precision``.

    `buffer_dtype`: of buffers, or None. `exempt`: classes of modules that compute in their own dtype.
    """

    def __init__(self, given):
        self.buffer_dtype: torch.dtype | None = None
        self.exempt: tuple[type, ...] = ()
        self._inner = self._root = given or MixedPrecisionPolicy()
        if given is None or isinstance(given, MixedPrecisionPolicy):
            return
        if not isinstance(given, fsdp.MixedPrecision):
            raise InvalidArgument(f"mixed_precision must be a MixedPrecision, not {kind_of(given)}", op=_NAME)
        check_floating(given, "param_dtype", "reduce_dtype", "buffer_dtype")
        if given.keep_low_precision_grads:
            raise InvalidArgument(
                "keep_low_precision_grads isn't offered: the shards' gradients are of the parameters' own dtype. Leave "
                "it out",
                op=_NAME,
            )
        self.buffer_dtype, self.exempt = given.buffer_dtype, tuple(given._module_classes_to_ignore or ())
        casts = given.cast_forward_inputs, given.cast_root_forward_inputs
        self._inner, self._root = (
            MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype, cast_forward_inputs=each) for each in casts
        )

    def policy_of(self, module: nn.Module, *, is_root: bool) -> MixedPrecisionPolicy:
        """Return the policy of a module's unit. An exempt one, between other units, computes in its own dtype."""
        if is_root or not isinstance(module, self.exempt):
            return self._root if is_root else self._inner
        own = next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)
        return MixedPrecisionPolicy(own, output_dtype=self._inner.param_dtype)


def parse_state_dict_settings(kind, config=None, optim_config=None) -> StateDictSettings:
    """Return the settings of state dicts for ``set_state_dict_type``'s arguments."""
    kind = parse_enum(StateDictType, kind, "state_dict_type")
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise InvalidArgument(
            "LOCAL_STATE_DICT isn't offered: it is of flat parameters, and shards are DTensors with names and shapes "
            "here: use SHARDED_STATE_DICT",
            op="set_state_dict_type",
        )
    kinds = {
        StateDictType.FULL_STATE_DICT: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
        StateDictType.SHARDED_STATE_DICT: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    }[kind]
    for given, wanted in zip((config, optim_config), kinds, strict=True):
        if given is not None and not isinstance(given, wanted):
            raise InvalidArgument(
                f"a configuration of {kind.name} must be a {wanted.__name__}, not {kind_of(given)}",
                op="set_state_dict_type",
            )
    return StateDictSettings(kind, config or kinds[0](), optim_config or kinds[1]())
