"""An optimizer's own ``state_dict()`` and ``load_state_dict()`` where it steps shards.

What it returns are `LocalShard` objects, which know their place. What is loaded may be those, or an
unsharded optimizer's state, of which each rank keeps its part; state of other shards is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...errors import InvalidArgument
from ...optim import FusedOptimizer
from ...torch_patches import patch_optimizer_state
from ..full_param_optimizer import steps_full_params
from ..scheduler import find_units
from .dtensor_calls import LocalShard, ShardPlace
from .fqns import is_scalar
from .shard_tensor import ShardTensor

__all__ = ["patch_own_state_dict"]


def patch_own_state_dict() -> None:
    """Let optimizers' own state dicts know shards."""
    patch_optimizer_state(_describe, _convert)


def _places(optimizer: Optimizer) -> dict[int, ShardPlace]:
    """Return the places of the shards that an optimizer steps, by their ids."""
    if steps_full_params(optimizer):
        return {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {id(each.shard): ShardPlace(unit, each) for unit in find_units(params) for each in unit.params}


def _by_number(optimizer: Optimizer, given: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """Return an optimizer's parameters by their numbers in a state dict, whose order is the same."""
    own = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    return dict(zip(numbers, own, strict=len(numbers) == len(own)))


def _describe(optimizer: Optimizer, made: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with a `LocalShard` for each entry of a shard's elements."""
    places = _places(optimizer)
    if not places or not {"state", "param_groups"} <= made.keys():  # a hook of the program's has returned another one
        return made
    params = _by_number(optimizer, made)
    state = dict(made["state"])
    for number, entries in state.items():
        param = params.get(number)
        place = places.get(id(param))
        if place is not None and isinstance(entries, dict):
            state[number] = {
                key: LocalShard.of(value, place)
                if type(value) is torch.Tensor and not is_scalar(key, value) and value.shape == param.shape
                else value
                for key, value in entries.items()
            }
    return {**made, "state": state}


def _convert(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return what torch's own ``load_state_dict`` is to load on this rank."""
    places = _places(optimizer)
    if not places or not isinstance(given, dict) or not {"state", "param_groups"} <= given.keys():
        return given
    params = _by_number(optimizer, given)
    state = dict(given["state"])
    for at, (number, param) in enumerate(params.items()):
        place, entries = places.get(id(param)), state.get(number)
        if place is not None and isinstance(entries, dict):
            state[number] = _take(optimizer, f"parameter {at}, {place.name},", param, place, entries)
    return {**given, "state": state}


def _take(optimizer, what: str, param: torch.Tensor, place: ShardPlace, entries: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a parameter's state.

    Where an optimizer is not one of torch's or ours, it may have entries of any shape beside those
    with an element for each of the parameter's.
    """
    known = isinstance(optimizer, FusedOptimizer) or type(optimizer).__module__.startswith("torch.optim.")
    made: dict[str, Any] = {}
    unknown = {}
    for key, value in entries.items():
        made[key] = value
        if not isinstance(value, torch.Tensor) or is_scalar(key, value):
            continue
        there = value if isinstance(value, ShardTensor) else getattr(value, "_place", None)
        if isinstance(value, DTensor):
            raise InvalidArgument(
                f"{key} of {what} is a DTensor: load it by set_optimizer_state_dict", op="load_state_dict"
            )
        if there is not None:
            if not place.same(there):
                raise _of_others(key, what, value, param, place)
            made[key] = (value.local if there is value else value.detach()).view(param.shape)
        elif value.shape == param.shape:
            continue
        elif value.shape == place.shape:
            made[key] = value.detach().reshape(-1)[place.start :][: place.count].clone().view(param.shape)
        elif value.dim() > 0:
            unknown[key] = value
    per_element = len(unknown) < sum(isinstance(v, torch.Tensor) and not is_scalar(k, v) for k, v in made.items())
    if unknown and (known or not per_element):
        key, value = next(iter(unknown.items()))
        raise _of_others(key, what, value, param, place)
    return made


def _of_others(key: str, what: str, value: torch.Tensor, param: torch.Tensor, place: ShardPlace) -> InvalidArgument:
    return InvalidArgument(
        f"{key} of {what} has shape {list(value.shape)} in the state dict: neither that of the parameter, "
        f"{list(place.shape)}, nor of this rank's shard, {list(param.shape)}, elements {place}. It is of another "
        "model, another rank, or another number of ranks: for these use collectives.sharded.save and load, or "
        "get_optimizer_state_dict and set_optimizer_state_dict",
        op="load_state_dict",
    )
