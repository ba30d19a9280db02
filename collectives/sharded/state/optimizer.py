"""Optimizer state by the parameters' names: full tensors, or this rank's shards; and back into the
optimizers.

The state is ``{"state": {name: {"step": ..., "exp_avg": ...}}, "param_groups": [...]}`` with
``{"params": [names], "lr": ...}`` for each group, as in torch.distributed.checkpoint.state_dict. An
entry with an element for each of the parameter's is a full tensor, or a `ShardTensor`; all others
(``step``) are as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InvalidArgument, InvalidUsage
from ...optim import FusedOptimizer
from ..full_param_optimizer import FullParamOptimizer
from ..managed_params import units_in
from ..mesh import Ranks
from .dist_wrapper import DistWrapper, get_module_scheduler
from .dtensor import as_dtensor, as_full_tensor, shard_mesh
from .fqns import NamedParam, is_scalar, params_by_id
from .shard_tensor import ShardTensor
from .state_dict import GetOptions, read_options, to_cpu

__all__ = [
    "gather_full_state", "get_optimizer_state_dict", "local_state_dict", "on_cpu", "optimizers_of",
    "scatter_from_rank0", "set_optimizer_state_dict", "sharded_state",
]  # fmt: skip


def optimizers_of(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return a list of optimizers from one, or from several."""
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise InvalidArgument(f"optimizers must be torch.optim.Optimizers, not {type(each).__name__}")
    return found


# ---- Getting.


def get_optimizer_state_dict(
    model: nn.Module, optimizers, *, full_state_dict: bool = False, cpu_offload: bool = False,
    rank0_only: bool = False, use_dtensor: bool = False, options=None,
) -> dict[str, Any]:  # fmt: skip
    """Return the state of a model's optimizers, one or several, by the names of parameters. A
    collective, which blocks.

    `full_state_dict`: whole tensors, gathered unit by unit, on each rank or, with `rank0_only`, on
    rank 0, and an empty dictionary elsewhere; otherwise this rank's shards, for
    torch.distributed.checkpoint, or DTensors with `use_dtensor`, as in `get_model_state_dict`.
    `cpu_offload`: on the host. `options`: torch's StateDictOptions instead of the first three. An
    optimizer that has not stepped has no state; for shards and DTensors it gets one of zeros, so
    that a checkpoint can be loaded into it. Raises `InvalidUsage` for parameters that aren't the
    model's, and `InvalidArgument` for state that is neither per element nor a number.
    """
    form = read_options(options, full_state_dict, cpu_offload, rank0_only, use_dtensor)
    optimizers = optimizers_of(optimizers)
    if form.dtensor:
        for each in optimizers:
            _init_optim_state(each)
    if form.gathers:
        return gather_full_state(model, [(each, None) for each in optimizers], form)
    made = sharded_state(model, optimizers, fill=True)
    return on_cpu(made) if form.on_cpu else made


def on_cpu(made: dict[str, Any]) -> dict[str, Any]:
    """Return state by names with its tensors on the host."""
    states = {name: {key: to_cpu(v) for key, v in state.items()} for name, state in made["state"].items()}
    return {**made, "state": states}


def sharded_state(
    model: nn.Module, optimizers, *, fill: bool = False, raw: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return optimizers' state by names, sharded, on its device. A local call.

    `fill`: initialise state where there is none. `raw`: the result of the optimizer's own
    ``state_dict()``.
    """
    by_id = params_by_id(model, optimizers)
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        if fill:
            _init_optim_state(optimizer)
        named, groups = _state_by_fqn(optimizer, by_id, raw)
        made["param_groups"] += groups
        for name, state in named.items():
            made["state"][name.name] = {
                key: name.as_entry(value) if name.is_per_element(key, value) else value for key, value in state.items()
            }
    return made


def _state_by_fqn(
    optimizer, by_id: dict[int, NamedParam], raw: dict | None = None
) -> tuple[dict[NamedParam, dict], list[dict]]:
    """Return an optimizer's own state dict, or `raw` instead, by named parameters."""
    raw = optimizer.state_dict() if raw is None else raw
    names: dict[Any, NamedParam] = {}
    groups = []
    for own, group in zip(optimizer.param_groups, raw["param_groups"], strict=True):
        for param, number in zip(own["params"], group["params"], strict=True):
            if id(param) not in by_id:
                raise InvalidUsage(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is not the model's: give the "
                    "model of whose parameters() the optimizer was made"
                )
            names[number] = by_id[id(param)]
        groups.append({**group, "params": [names[number].name for number in group["params"]]})
    state = {}
    for number, entries in raw["state"].items():
        named = names[number]
        for key, value in entries.items():
            if named.sharded is not None and not named.is_per_element(key, value) and _is_large(value):
                raise InvalidArgument(
                    f"{key} of {named.name} has shape {list(value.shape)}, and the parameter's piece here "
                    f"{list(named.param.shape)}: only state with an element for each of the parameter's, or with one "
                    "in all, can be put together from the ranks"
                )
        state[named] = entries
    return state, groups


def _is_large(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() != 1


@torch.no_grad()
def _init_optim_state(optimizer) -> None:
    """Let an optimizer that has not stepped make its state, by a step with gradients of 0 that
    changes nothing.
    """
    if isinstance(optimizer, FullParamOptimizer):
        with optimizer.zero_params() as whole:
            return _init_optim_state(whole)
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if optimizer.state or any(param.grad is not None for param in params):
        return
    options = ("lr", "weight_decay")
    before = [(group, key, group[key]) for group in optimizer.param_groups for key in options if key in group]
    try:
        for param in params:
            param.grad = torch.zeros_like(param)
        for group, key, value in before:
            group[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0
        if isinstance(optimizer, FusedOptimizer):
            optimizer._step_params(None)  # also where a HookState steps it inside of the backward
        else:
            optimizer.step(closure=None)
    finally:
        for group, key, value in before:
            group[key] = value
        for param in params:
            param.grad = None
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0


def gather_full_state(
    model: nn.Module, given: list[tuple[torch.optim.Optimizer, dict | None]], form: GetOptions
) -> dict[str, Any]:
    """Return optimizers' state by names, as full tensors or DTensors. A collective.

    `given`: pairs of an optimizer and its own state dict, or None.
    """
    ranks = DistWrapper(get_module_scheduler(model), "get_optimizer_state_dict")
    by_id = params_by_id(model, [optimizer for optimizer, _ in given])
    here: dict[str, dict] = {}
    groups: list[dict] = []

    def describe() -> dict[str, dict]:
        for optimizer, raw in given:
            named, own = _state_by_fqn(optimizer, by_id, raw)
            groups.extend(own)
            here.update({each.name: state for each, state in named.items()})
        by_name = {named.name: named for named in by_id.values()}
        return {
            name: {key: _describe_entry(by_name[name], key, v) for key, v in state.items()}
            for name, state in here.items()
        }

    merged: dict[str, dict[str, Any]] = {}
    for table in ranks.run_on_all("read its optimizers' state", describe):
        for name, state in table.items():
            for key, entry in state.items():
                known = merged.setdefault(name, {}).setdefault(key, entry)
                if isinstance(entry, torch.dtype) and not isinstance(known, torch.dtype):
                    merged[name][key] = entry

    def check_complete() -> None:
        for named in by_id.values():
            for key, entry in merged.get(named.name, {}).items():
                if isinstance(entry, torch.dtype) and named.has_state and key not in here.get(named.name, {}):
                    raise InvalidUsage(f"{key} of {named.name} is in the optimizers of other ranks and not in this one")

    ranks.run_on_all("find all of its state", check_complete)
    keeps = ranks.rank == 0 or not form.rank0_only
    full = dict(_gather_entries(model, by_id, here, merged, form, keeps))
    if not keeps:
        return {}
    made = {}
    for name in (name for group in groups for name in group["params"]):
        if name in merged:
            made[name] = {
                key: full[name, key] if isinstance(entry, torch.dtype) else _scalar(here.get(name, {}).get(key, entry))
                for key, entry in merged[name].items()
                if (name, key) in full or not isinstance(entry, torch.dtype)
            }
    return {"state": made, "param_groups": groups}


def _describe_entry(named: NamedParam, key: str, value):
    """Return the dtype of an entry with an element for each of the parameter's, and any other entry
    itself.
    """
    if named.is_per_element(key, value):
        return value.dtype
    return to_cpu(value.detach()) if isinstance(value, torch.Tensor) else value


def _scalar(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _gather_entries(model, by_id, here, merged, form: GetOptions, keeps: bool):
    """Yield ((name, key), full tensor or DTensor) of the entries with an element for each of their
    parameter's, unit by unit.
    """

    def copied(full: torch.Tensor, device, ranks: Ranks | None = None, mesh: DeviceMesh | None = None) -> torch.Tensor:
        if mesh is not None:
            made = as_dtensor(full, ranks, mesh)
            return made.cpu() if form.on_cpu else made
        return full.to("cpu" if form.on_cpu else device, copy=True)

    names = {id(named.sharded): named.name for named in by_id.values() if named.sharded is not None}
    for unit in units_in(model):
        mesh = shard_mesh(unit.ranks, unit.device) if form.dtensor else None
        for group in unit.groups:
            kinds: dict[tuple, list] = {}
            for param in group.params:
                for key, entry in merged.get(names.get(id(param)), {}).items():
                    if isinstance(entry, torch.dtype):
                        kinds.setdefault((key, str(entry)), []).append((param, names[id(param)], entry))
            for (key, _), members in sorted(kinds.items()):
                values = [(param, here.get(name, {}).get(key)) for param, name, _ in members]
                flat = group.all_gather_like_shards(values, members[0][2])
                if keeps:
                    for param, name, _ in members:
                        yield (name, key), copied(param.full_view(flat), group.store, unit.ranks, mesh)
    for named in by_id.values():
        for key, entry in merged.get(named.name, {}).items() if named.sharded is None else ():
            value = here.get(named.name, {}).get(key)
            if isinstance(entry, torch.dtype) and named.owned is not None and not form.dtensor:
                value = named.owned.broadcast(value, entry)
            if isinstance(entry, torch.dtype) and keeps and value is not None:
                yield (named.name, key), copied(value.detach(), named.param.device)


# ---- Setting.


def set_optimizer_state_dict(
    model: nn.Module, optimizers, optim_state_dict: dict[str, Any], *, broadcast_from_rank0: bool = False,
    options=None,
) -> None:  # fmt: skip
    """Load the result of `get_optimizer_state_dict`, or of torch's function of that name for the
    unsharded model.

    Full tensors, DTensors, or shards of the same ranks; or an unsharded optimizer's own
    ``state_dict()``, whose numbers are taken for the positions in this optimizer.
    `broadcast_from_rank0`: rank 0 has the full state and the others nothing: a collective, tensor
    by tensor, as with DTensors. Otherwise a local call, to be made on each rank. Raises
    `InvalidArgument` for the state of another model, by name.
    """
    read_options(options, True, False, False)
    optimizers = optimizers_of(optimizers)
    if broadcast_from_rank0 or (options is not None and options.broadcast_from_rank0):
        optim_state_dict = scatter_from_rank0(model, optim_state_dict, optimizers)
    loads = [local_state_dict(model, each, optim_state_dict) for each in optimizers]
    for optimizer, local in zip(optimizers, loads, strict=True):
        optimizer.load_state_dict(local)


def scatter_from_rank0(model: nn.Module, given: dict[str, Any] | None, optimizers=()) -> dict[str, Any]:
    """Return each rank's shards of the full state, by names, that rank 0 has. A collective."""
    by_name = {named.name: named for named in params_by_id(model, optimizers).values()}

    def read() -> dict[tuple, Any]:
        entries = {(name, key): value for name, state in given["state"].items() for key, value in state.items()}
        return {(): (given["param_groups"], list(given["state"])), **entries}

    def take(place: tuple[str, str], whole: torch.Tensor) -> torch.Tensor:
        named, key = by_name.get(place[0]), place[1]
        if named is not None and named.owned is not None and not named.has_state:
            return None
        if named is not None and named.sharded is not None and not is_scalar(key, whole) and whole.shape == named.shape:
            return named.as_entry(named.load_entry(key, whole))
        return whole

    ranks = DistWrapper(get_module_scheduler(model), "set_optimizer_state_dict")
    entries = ranks.scatter_from_rank0(read, take)
    groups, names = entries.pop(())
    state: dict[Any, dict] = {name: {} for name in names}
    for (name, key), value in entries.items():
        state[name][key] = value
    return {"param_groups": groups, "state": state}


def local_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's own ``load_state_dict`` takes on this rank, from state by names. A
    local call.
    """
    if not isinstance(given, dict) or not {"state", "param_groups"} <= given.keys():
        raise InvalidArgument('an optimizer\'s state dict has "state" and "param_groups"')
    by_id = params_by_id(model, [optimizer])
    packed = optimizer.state_dict()["param_groups"]
    _, own_groups = _state_by_fqn(optimizer, by_id, {"state": {}, "param_groups": packed})
    own_names = [name for group in own_groups for name in group["params"]]
    by_name = {named.name: named for named in by_id.values()}
    given = _fqns_from_numbers(given, own_names)
    unknown = [name for name in given["state"] if name not in by_name]
    saved = {name: group for group in given["param_groups"] for name in group["params"]}
    missing = [name for name in own_names if name not in saved]
    if unknown or missing:
        raise InvalidArgument(
            "the optimizer state is of another model"
            + (f"; it has none of {', '.join(missing[:5])}" if missing else "")
            + (f"; the model has no {', '.join(unknown[:5])}" if unknown else "")
        )
    groups = []
    for own, numbers in zip(own_groups, packed, strict=True):
        options = saved[own["params"][0]] if own["params"] else {}
        kept = {key: value for key, value in numbers.items() if key in ("params", "param_names") or key not in options}
        groups.append({**{key: v for key, v in options.items() if key not in ("params", "param_names")}, **kept})
    state = {}
    for number, name in zip([n for group in packed for n in group["params"]], own_names, strict=True):
        if name in given["state"] and (by_name[name].owned is None or by_name[name].has_state):
            state[number] = {key: _load_entry(by_name[name], key, v) for key, v in given["state"][name].items()}
    return {"state": state, "param_groups": groups}


def _load_entry(named: NamedParam, key: str, value):
    if isinstance(value, torch.Tensor):
        value = as_full_tensor(value)
        if not is_scalar(key, value) and (isinstance(value, ShardTensor) or value.shape == named.shape):
            return named.load_entry(key, value)
        if named.sharded is not None and _is_large(value):
            return named.load_entry(key, value)  # which says why not
        return value.detach().clone()
    return value


def _fqns_from_numbers(given: dict[str, Any], own_names: list[str]) -> dict[str, Any]:
    """Convert an optimizer's own state dict, by numbers, to one by names."""
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    if not numbers or any(name in own_names for name in numbers) or not all(str(n).isdigit() for n in numbers):
        return given
    if len(numbers) != len(own_names):
        raise InvalidArgument(
            f"the optimizer state is of {len(numbers)} parameters, by numbers, and this optimizer has "
            f"{len(own_names)}: give it by names, as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict "
            "does"
        )
    names = {str(number): name for number, name in zip(numbers, own_names, strict=True)}
    groups = [{**group, "params": [names[str(n)] for n in group["params"]]} for group in given["param_groups"]]
    return {"state": {names[str(n)]: state for n, state in given["state"].items()}, "param_groups": groups}
