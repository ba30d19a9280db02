"""torch.distributed.checkpoint.state_dict's functions for sharded modules and their optimizers.

``get_state_dict``, ``get_model_state_dict``, ``get_optimizer_state_dict`` and their counterparts
with ``set`` call four functions of their module, which are replaced here: for a model without units
they are torch's own. Entries that are sharded are DTensors where all of a model's units are over
process groups, and `Piece` objects otherwise.
"""

from __future__ import annotations

import functools

from torch import nn

from ...torch_patches import patch_state_dict
from ..managed_params import units_in
from .dtensor_calls import patch_tensor_calls
from .model import set_model_state_dict
from .optimizer import get_optimizer_state_dict, set_optimizer_state_dict
from .own_state_dict import patch_own_state_dict
from .state_dict import GetOptions, use_get_options
from .torch_checkpoint import patch_torch_checkpoint

__all__ = ["patch_torch_state_dict"]


@functools.cache
def patch_torch_state_dict() -> None:
    """Let torch's functions for distributed state dicts take sharded modules, and what is read of a
    shard or saved of it be of the whole parameter.
    """
    patch_tensor_calls()
    patch_torch_checkpoint()
    patch_own_state_dict()
    patch_state_dict(
        _get_model_state_dict=_get_model, _load_model_state_dict=_load_model, _get_optim_state_dict=_get_optim,
        _load_optim_state_dict=_load_optim,
    )  # fmt: skip


def _has_groups(model: nn.Module) -> bool:
    """Whether all of a model's units are over process groups of torch's."""
    return all(unit.ranks.group is not None for unit in units_in(model))


# The arguments are those of torch's functions, after the function itself; `info` has StateDictOptions' attributes.


def _get_model(own, model: nn.Module, info):
    if not units_in(model):
        return own(model, info)
    full, on_cpu = info.full_state_dict, info.cpu_offload
    # With ignore_frozen_params torch's function needs all keys on all ranks.
    rank0_only = full and on_cpu and not info.ignore_frozen_params
    with use_get_options(GetOptions(full, on_cpu, rank0_only, not full and _has_groups(model))):
        return own(model, info)


def _load_model(own, model: nn.Module, state_dict, info):
    if not units_in(model) or not info.handle_model or not (state_dict or info.broadcast_from_rank0):
        return own(model, state_dict, info)
    return set_model_state_dict(model, state_dict, options=info)


def _get_optim(own, model: nn.Module, optimizers, info):
    if not units_in(model) or not info.handle_optim:
        return own(model, optimizers, info)
    use_dtensor = not info.full_state_dict and _has_groups(model)
    return get_optimizer_state_dict(model, optimizers, options=info, use_dtensor=use_dtensor)


def _load_optim(own, model: nn.Module, optimizers, state_dict, info):
    if not units_in(model) or not info.handle_optim:
        return own(model, optimizers, state_dict, info)
    return set_optimizer_state_dict(model, optimizers, state_dict, options=info)
