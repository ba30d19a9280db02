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
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from ...errors import InvalidArgument
from ..managed_params import units_in
from ..state.optimizer import gather_full_state, local_state_dict, on_cpu, scatter_from_rank0, sharded_state
from ..state.state_dict import GetOptions
from .arguments import parse_enum

__all__ = [
    "full_optim_state_dict", "get_state_dict_type", "optim_state_dict", "optim_state_dict_to_load",
    "scatter_full_optim_state_dict", "set_state_dict_type", "state_dict_type",
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

    `optim` must be given; `optim_input` and `group` change nothing.
    """
    if optim is None:
        raise InvalidArgument("give the optimizer as optim=", op="scatter_full_optim_state_dict")
    given = scatter_from_rank0(model, full_optim_state_dict, [optim])
    return local_state_dict(model, optim, given)
