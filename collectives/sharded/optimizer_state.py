"""State dicts of optimizers of sharded parameters: shards, or whole tensors, by names; and back.

`optimizer.state_dict()` has shards, as RaggedTensors, and sends nothing. What is loaded may be whole tensors, shards of
any bounds, or DTensors of any placement, with the parameters' names or their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import init_optimizer_state, tree_map_only
from ..torch_patches import patch_optimizer_load
from .managed_params import units_in
from .ragged_tensor import RaggedTensor
from .state import (
    clean_name,
    inner_module,
    is_first,
    named_in_errors,
    part_of,
    read_options,
    scatter_from_rank0,
    whole_of,
)

__all__ = [
    "gather_optimizer_state", "get_optimizer_state_dict", "local_optimizer_state", "optimizer_state", "optimizers_of",
    "scatter_optimizer_state", "set_optimizer_state_dict",
]  # fmt: skip

# Entries that are one number, which a parameter of one element could also have elementwise.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def optimizers_of(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return a list of optimizers from one, or from several."""
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgument(f"optimizers must be torch.optim.Optimizers, not {type(optimizer).__name__}")
    return several


def _names_by_id(model: nn.Module) -> dict[int, str]:
    for unit in units_in(model):
        unit.to_sharded()
    return {id(param): clean_name(name) for name, param in inner_module(model).named_parameters()}


def _names_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, by groups."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise InvalidUsage(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is not the model's: give the "
                    "model of whose parameters() the optimizer was made, after it was sharded"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizers, *, raw: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return optimizers' state with the parameters' names as keys, in shards. A local call.

    Args:
        raw: What the optimizer's own ``state_dict()`` has returned; None: call that.

    Raises:
        InvalidUsage: A parameter isn't the model's.
        InvalidArgument: An entry has several elements and is no DTensor: each rank has other ones.
    """
    names = _names_by_id(model)
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers_of(optimizers):
        given = optimizer.state_dict() if raw is None else raw
        params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        own = _names_of(optimizer, names)
        flat = [name for group in own for name in group]
        for number, name, param in zip(numbers, flat, params, strict=True):
            if number in given["state"]:
                made["state"][name] = entries = given["state"][number]
                if isinstance(param, RaggedTensor):
                    _check_entries(name, param, entries)
        made["param_groups"] += [
            {**group, "params": members} for group, members in zip(given["param_groups"], own, strict=True)
        ]
    return made


def _check_entries(name: str, param: RaggedTensor, entries: dict) -> None:
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
            raise InvalidArgument(
                f"{key} of {name} is a plain tensor {list(value.shape)}, and the parameter is sharded: state is put "
                "together from the ranks where it is made of the parameter, as torch.zeros_like(param) does"
            )


def get_optimizer_state_dict(
    model: nn.Module, optimizers, *, full_state_dict: bool = False, cpu_offload: bool = False,
    rank0_only: bool = False, options=None,
) -> dict[str, Any]:  # fmt: skip
    """Return the state of a model's optimizers, one or several, by the names of parameters.

    In shards it is a local call, and an optimizer that has not stepped gets state to load into: the optimizer itself
    stays without.

    Args:
        full_state_dict: Whole tensors: a collective, which blocks.
        cpu_offload: As of `get_model_state_dict`.
        rank0_only: As of `get_model_state_dict`.
        options: As of `get_model_state_dict`.

    Raises:
        InvalidUsage: A parameter isn't the model's.
        InvalidArgument: An entry can't be put together from the ranks.
    """
    full, to_cpu, rank0_only = read_options(options, full_state_dict, cpu_offload, rank0_only)
    optimizers = optimizers_of(optimizers)
    fresh = [] if full else [optimizer for optimizer in optimizers if not optimizer.state]
    for optimizer in fresh:
        init_optimizer_state(optimizer)
    made = optimizer_state(model, optimizers)
    for optimizer in fresh:
        optimizer.state.clear()
    if full:
        return gather_optimizer_state(model, made, to_cpu=to_cpu, rank0_only=rank0_only)
    return {**made, "state": tree_map_only(torch.Tensor, torch.Tensor.cpu, made["state"])} if to_cpu else made


@torch.no_grad()
def gather_optimizer_state(
    model: nn.Module, made: dict[str, Any], *, to_cpu: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """Return what `optimizer_state` returns with whole tensors, gathered one by one. A collective; blocks."""
    keeps = not rank0_only or is_first(model)

    def gather(value):
        whole = whole_of(value)
        return (whole.cpu() if to_cpu else whole) if keeps else None

    state = {}
    for name, entries in made["state"].items():
        with named_in_errors(f"get_optimizer_state_dict() of {name}"):
            state[name] = tree_map_only(torch.Tensor, gather, entries)
    return {**made, "state": state} if keeps else {}


def set_optimizer_state_dict(
    model: nn.Module, optimizers, optim_state_dict: dict[str, Any], *, broadcast_from_rank0: bool = False,
    options=None,
) -> None:  # fmt: skip
    """Load the result of `get_optimizer_state_dict`, or of torch's function of that name for the unsharded model.

    Whole tensors, shards and DTensors, by names; or an unsharded optimizer's own ``state_dict()``, whose numbers are
    the places in this optimizer. Each rank calls it: a local call for whole tensors and shards of the same bounds.

    Args:
        broadcast_from_rank0: The first rank has whole tensors, the others nothing: a collective, tensor by tensor.
        options: torch's ``StateDictOptions`` instead of it.

    Raises:
        InvalidArgument: It is the state of another model, by name. Nothing is loaded then.
    """
    optimizers = optimizers_of(optimizers)
    if broadcast_from_rank0 or (options is not None and options.broadcast_from_rank0):
        optim_state_dict = scatter_optimizer_state(model, optim_state_dict)
    loads = [local_optimizer_state(model, optimizer, optim_state_dict) for optimizer in optimizers]
    for optimizer, local in zip(optimizers, loads, strict=True):
        optimizer.load_state_dict(local)


def scatter_optimizer_state(model: nn.Module, given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the whole state that rank 0 has, by names, as shards. A collective."""
    _names_by_id(model)
    params = {clean_name(name): param for name, param in inner_module(model).named_parameters()}

    def param_of(path: tuple):
        return params.get(path[1]) if path[0] == "state" and len(path) == 3 else None

    with named_in_errors("set_optimizer_state_dict(broadcast_from_rank0=True)"):
        return scatter_from_rank0(model, given, param_of)


def local_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return what ``optimizer.load_state_dict`` takes, from state by names, or by numbers, of any form.

    Raises `InvalidArgument` for the state of another model.
    """
    if not {"state", "param_groups"} <= given.keys():
        raise InvalidArgument('optimizer state must have "state" and "param_groups"')
    names = _names_by_id(model)
    own = _names_of(optimizer, names)
    groups = given["param_groups"]
    if any(isinstance(number, int) for group in groups for number in group["params"]):
        return _convert_optimizer_state(optimizer, given)
    unknown = given["state"].keys() - set(names.values())
    if unknown:
        raise InvalidArgument(f"the optimizer state is of another model: the model has no {min(unknown)}")
    chosen = []
    for members in own:
        group = next((group for group in groups if set(members) <= set(group["params"])), None)
        if group is None:
            missing = next((name for name in members if all(name not in each["params"] for each in groups)), None)
            raise InvalidArgument(
                f"the optimizer state has no {missing}, which is in this optimizer" if missing else
                f"the optimizer state has {members[0]} and the others of its group in several groups"
            )  # fmt: skip
        chosen.append({**group, "params": members})
    state = {name: given["state"][name] for members in own for name in members if name in given["state"]}
    return _convert_optimizer_state(optimizer, {"state": state, "param_groups": chosen})


@torch.no_grad()
def _convert_optimizer_state(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with this rank's parts where the optimizer's parameters are shards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    if len(params) != len(numbers) or not any(isinstance(param, RaggedTensor) for param in params):
        return given  # torch raises, or there is nothing to convert
    owners = dict(zip(numbers, params, strict=True))
    kinds = _example_state(optimizer, given, owners)
    state = {}
    for number, entries in given["state"].items():
        param = owners.get(number)
        if isinstance(param, RaggedTensor):
            known = kinds.get(param, {})
            with named_in_errors(f"load_state_dict() of an optimizer, at {number}"):
                entries = {
                    key: _convert_entry(f"{key} of {number}", key, value, param, known.get(key))
                    for key, value in entries.items()
                }
        state[number] = entries
    return {**given, "state": state}


def _example_state(optimizer: torch.optim.Optimizer, given: dict[str, Any], owners: dict) -> dict:
    """Return the state that an optimizer has, or where that decides what an entry is, state as a step makes it."""
    if optimizer.state:
        return optimizer.state

    def is_open(key: str, value, param) -> bool:
        if not isinstance(param, RaggedTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return False
        return key not in _NUMBERS and (value.shape != param.shape or value.numel() == 1)

    states = given["state"].items()
    if not any(is_open(key, value, owners.get(number)) for number, state in states for key, value in state.items()):
        return {}
    init_optimizer_state(optimizer)
    made = dict(optimizer.state)
    optimizer.state.clear()
    return made


def _convert_entry(what: str, key: str, value, param: RaggedTensor, known):
    """Return an entry as the optimizer here takes it. `known`: the entry that it has now, or None."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(known, torch.Tensor):
        is_shard = isinstance(known, RaggedTensor)
    elif isinstance(value, DTensor):
        is_shard = value.shape == param.shape or isinstance(value, RaggedTensor)
    else:
        is_shard = value.shape == param.shape and (value.numel() > 1 or key not in _NUMBERS)
    if is_shard:
        if isinstance(value, RaggedTensor) and value.placements == param.placements and value.shape == param.shape:
            return value.detach().clone()  # another optimizer may go on with it
        try:
            return param.detach().like(part_of(value, param).clone())
        except InvalidArgument as error:
            raise InvalidArgument(f"the optimizer state is of another model: {what}: {error.message}") from error
    if isinstance(known, DTensor) and not isinstance(value, DTensor):
        return DTensor.from_local(value.detach().clone(), known.device_mesh, known.placements, run_check=False)
    if isinstance(value, DTensor):
        return whole_of(value) if isinstance(known, torch.Tensor) and not isinstance(known, DTensor) else value
    return value.detach().clone()


patch_optimizer_load(_convert_optimizer_state)
