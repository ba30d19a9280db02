"""FSDP1's settings of state dicts, and its functions for optimizer state, which
`ShardedDataParallel` offers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from ...errors import InvalidArgument
from ..managed_params import units_in
from ..state.fqns import params_by_id
from ..state.optimizer import gather_full_state, local_state_dict, on_cpu, scatter_from_rank0, sharded_state
from ..state.state_dict import GetOptions
from .arguments import parse_enum

__all__ = [
    "flatten_sharded_optim_state_dict", "full_optim_state_dict", "get_state_dict_type", "optim_state_dict",
    "optim_state_dict_to_load", "rekey_optim_state_dict", "scatter_full_optim_state_dict", "set_state_dict_type",
    "shard_full_optim_state_dict", "sharded_optim_state_dict", "state_dict_type",
]  # fmt: skip

_FULL = (FullStateDictConfig, FullOptimStateDictConfig)
_DEFAULT = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return what `set_state_dict_type` has set for the outermost unit inside."""
    return next(
        (unit.state_dict_settings for unit in units_in(module) if unit.state_dict_settings is not None), _DEFAULT
    )


def set_state_dict_type(
    module: nn.Module, state_dict_type: StateDictType, state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:  # fmt: skip
    """Set what ``state_dict()`` of a module's units and `optim_state_dict` return; return what was
    set before.

    FULL_STATE_DICT: full tensors; SHARDED_STATE_DICT or LOCAL_STATE_DICT: shards, as `Piece`
    objects, or as DTensors where the configurations have ``_use_dtensor=True``. What is loaded may
    be any of these, whatever is set. A local call, to be made on all ranks.
    """
    kind = parse_enum(StateDictType, state_dict_type, "state_dict_type")
    full = kind is StateDictType.FULL_STATE_DICT
    given = {"state_dict_config": state_dict_config, "optim_state_dict_config": optim_state_dict_config}
    for what, config in given.items():
        known = config is None or isinstance(config, StateDictConfig | OptimStateDictConfig)
        if not known or (config is not None and isinstance(config, _FULL) != full):
            wanted = "Full" if full else "Sharded"
            raise InvalidArgument(f"{what} of {kind.name} must be a {wanted}...Config, not {type(config).__name__}")
    settings = StateDictSettings(
        kind,
        state_dict_config or (FullStateDictConfig() if full else ShardedStateDictConfig()),
        optim_state_dict_config or (FullOptimStateDictConfig() if full else ShardedOptimStateDictConfig()),
    )
    before = get_state_dict_type(module)
    for unit in units_in(module):
        unit.state_dict_settings = settings
    return before


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module, state_dict_type: StateDictType, state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
):  # fmt: skip
    """Call `set_state_dict_type` for the time of a block."""
    units = units_in(module)
    before = [unit.state_dict_settings for unit in units]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit, settings in zip(units, before, strict=True):
            unit.state_dict_settings = settings


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None = None, group=None
) -> dict[str, Any]:
    """Return an optimizer's state by names, as `set_state_dict_type` says; with full tensors or
    DTensors it is a collective.

    `optim_state_dict`: the result of its own ``state_dict()``; None: call that now. `group` changes
    nothing.
    """
    settings = get_state_dict_type(model)
    form = GetOptions.of(settings.state_dict_type, settings.optim_state_dict_config)
    if form.gathers:
        return gather_full_state(model, [(optim, optim_state_dict)], form)
    made = sharded_state(model, [optim], raw=optim_state_dict)
    return on_cpu(made) if form.on_cpu else made


def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_input=None, rank0_only: bool = True, group=None
) -> dict[str, Any]:
    """Return an optimizer's full state by names, on the host; with `rank0_only` an empty dictionary
    on the other ranks.
    """
    return gather_full_state(model, [(optim, None)], GetOptions(True, True, rank0_only))


def optim_state_dict_to_load(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False, load_directly: bool = False, group=None,
) -> dict[str, Any]:  # fmt: skip
    """Return what ``optim.load_state_dict`` takes on this rank, from full state or shards by names.

    `load_directly`: load it, too. A collective where FULL_STATE_DICT with ``rank0_only`` is set,
    since rank 0 alone has the state; otherwise a local call.
    """
    settings = get_state_dict_type(model)
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        optim_state_dict = scatter_from_rank0(model, optim_state_dict, [optim])
    local = local_state_dict(model, optim, optim_state_dict)
    if load_directly:
        optim.load_state_dict(local)
    return local


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None, model: nn.Module, optim_input=None,
    optim: torch.optim.Optimizer | None = None, group=None,
) -> dict[str, Any]:  # fmt: skip
    """Return what ``optim.load_state_dict`` takes, from full state that rank 0 has. A collective.

    `optim`, `optim_input`: as in `shard_full_optim_state_dict`; `group` changes nothing.
    """
    given = scatter_from_rank0(model, full_optim_state_dict, () if optim is None else [optim])
    return shard_full_optim_state_dict(given, model, optim_input, optim)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input=None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what ``optim.load_state_dict`` takes, from full state that each rank has. A local call.

    `optim`: the optimizer that is to load it; None: one of `optim_input`, parameters or groups of
    them as its constructor took them; None: one of ``model.parameters()``.
    """
    return local_state_dict(model, _optimizer_of(model, optim_input, optim), full_optim_state_dict)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group=None) -> dict[str, Any]:
    """Return an optimizer's state by names, as `Piece` objects. A local call; `group` changes
    nothing.
    """
    return sharded_state(model, [optim])


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return what ``optim.load_state_dict`` takes, from the result of `sharded_optim_state_dict`
    on the same ranks. A local call.
    """
    return local_state_dict(model, optim, sharded_optim_state_dict)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any], optim_state_key_type: OptimStateKeyType, model: nn.Module, optim_input=None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return full optimizer state with the names of a model's parameters as its keys, or their
    numbers in an optimizer. A local call; the tensors are the same.

    `model`: an unsharded one, or a sharded one. `optim`, `optim_input`: as in
    `shard_full_optim_state_dict`. Raises `InvalidArgument` for keys that are none of these.
    """
    key_type = parse_enum(OptimStateKeyType, optim_state_key_type, "optim_state_key_type")
    by_id = params_by_id(model)
    params = [p for group in _optimizer_of(model, optim_input, optim).param_groups for p in group["params"]]
    names = [by_id[id(param)].name for param in params]
    wanted = dict(enumerate(names)) if key_type is OptimStateKeyType.PARAM_NAME else {n: i for i, n in enumerate(names)}
    keys = {**wanted, **{key: key for key in wanted.values()}}
    groups = optim_state_dict["param_groups"]
    unknown = [
        key for key in [*optim_state_dict["state"], *(n for each in groups for n in each["params"])] if key not in keys
    ]
    if unknown:
        raise InvalidArgument(
            f"the optimizer state has {', '.join(map(str, unknown[:5]))}, and the model's parameters are "
            f"{', '.join(names[:5])}, ...: it is of another model",
            op="rekey_optim_state_dict",
        )
    return {
        "state": {keys[key]: entries for key, entries in optim_state_dict["state"].items()},
        "param_groups": [{**each, "params": [keys[key] for key in each["params"]]} for each in groups],
    }


def _optimizer_of(model: nn.Module, optim_input, optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Return an optimizer, or one that has only the parameter groups."""
    if optim is not None:
        return optim
    return torch.optim.Optimizer(model.parameters() if optim_input is None else optim_input, {})
