"""State dicts of sharded modules and of their optimizers: shards, or whole tensors; and back.

`module.state_dict()` and `optimizer.state_dict()` have shards, as RaggedTensors, and send nothing. What
is loaded may be whole tensors, shards of any bounds, or DTensors of any placement: each value becomes
this rank's part of the parameter. A DTensor that is placed in another way is gathered for that, one at
a time, which is a collective of the ranks of its mesh.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.agree import all_gather_bytes
from ..errors import CollectivesError, InvalidArgument, InvalidUsage
from ..torch_compat import init_optimizer_state, tree_map_only
from ..torch_patches import patch_distribution, patch_optimizer_load, patch_state_dict
from .managed_params import units_in
from .placement import RaggedShard
from .ragged_tensor import RaggedTensor

__all__ = [
    "as_shards", "clean_name", "gather_entries", "gather_optimizer_state", "get_model_state_dict",
    "get_optimizer_state_dict", "inner_module", "load_into_shards", "local_optimizer_state", "optimizer_state",
    "optimizers_of", "part_of", "scatter_optimizer_state", "set_model_state_dict", "set_optimizer_state_dict",
    "unsharded_params", "wants_shards", "watch_state_dicts",
]  # fmt: skip

_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of checkpoint wrappers
# Entries that are one number, which a parameter of one element could also have elementwise.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in errors of collectives what this rank was in."""
    try:
        yield
    except CollectivesError as error:
        raise error.with_addition(f" (in {what}: all ranks must call it)") from error


# ---- One tensor.


def part_of(value: torch.Tensor, like: RaggedTensor) -> torch.Tensor:
    """Return this rank's part of a tensor of the same whole shape, in memory of `value` where it can.

    Args:
        value: A whole tensor, which all ranks have; a shard; or a DTensor of any placement. The last, and a
            shard of other bounds or another mesh, is gathered: a collective of the ranks of its mesh.
        like: A shard of the wanted bounds.

    Raises:
        InvalidArgument: The shapes differ.
    """
    if value.shape != like.shape:
        raise InvalidArgument(f"its shape is {list(value.shape)}, and the parameter's is {list(like.shape)}")
    if not isinstance(value, DTensor):
        return like.ragged.cut(value.detach(), like.shard_rank)
    if isinstance(value, RaggedTensor) and value.ragged == like.ragged and value.device_mesh == like.device_mesh:
        return value._local_tensor.detach()
    mesh = value.device_mesh
    if mesh.get_coordinate() is None:
        raise InvalidArgument(f"it is a DTensor of {mesh}, of which this rank is no member")
    if isinstance(value, RaggedTensor) and mesh.get_group(mesh.ndim - 1).size() != len(value.ragged.counts):
        raise InvalidArgument(
            f"it is one of {len(value.ragged.counts)} shards of another job, of other ranks: save whole tensors, "
            "or use collectives.sharded.save and load"
        )
    full = value.detach().full_tensor()
    return like.ragged.cut(full, like.shard_rank).clone()


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor in memory of its own; of a DTensor, a collective."""
    if isinstance(value, DTensor):
        made = value.detach().full_tensor()
        return made.clone() if all(each.is_replicate() for each in value.placements) else made
    return value.detach().clone()


# ---- A module's own state_dict() and load_state_dict().


class _Form(threading.local):
    shards = False


_form = _Form()


@contextlib.contextmanager
def as_shards() -> Iterator[None]:
    before, _form.shards = _form.shards, True
    try:
        yield
    finally:
        _form.shards = before


def wants_shards() -> bool:
    """Whether ``state_dict()`` is to return shards, whatever a module's own setting is."""
    return _form.shards


class _Hook:
    """A hook of a module with parameters of a unit, which it makes sharded first. Copies of the module have no unit."""

    def __init__(self, unit=None):
        self._unit = None if unit is None else weakref.ref(unit)

    def __reduce__(self):
        return type(self), ()

    def _shard_unit(self) -> None:
        unit = None if self._unit is None else self._unit()
        if unit is not None:
            unit.to_sharded()


class _SaveHook(_Hook):
    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._shard_unit()


class _LoadHook(_Hook):
    """Converts the values for a module's own sharded parameters before torch copies them.

    Values of another shape stay: torch names them, "size mismatch for ...".
    """

    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *_) -> None:
        self._shard_unit()
        for name, param in module._parameters.items():
            key = prefix + name
            value = state_dict.get(key)
            if not isinstance(param, RaggedTensor) or not isinstance(value, torch.Tensor):
                continue
            if not param.dim() and value.shape == (1,):  # as torch takes it
                value = value.reshape(())
            if value.shape != param.shape:
                continue
            with _naming(f"load_state_dict() of {key}"):
                value = param.detach().like(part_of(value, param))
            if local_metadata.get("assign_to_params_buffers") and not param.is_meta:
                param.copy_(value)
                value = param  # torch assigns the object that is there: its memory is the unit's
            state_dict[key] = value


def watch_state_dicts(unit) -> None:
    """Have the modules of a unit's parameters save shards, and convert what they load; once for a unit."""
    for module in dict.fromkeys(module for param in unit.params for module, _ in param.places):
        module.register_state_dict_pre_hook(_SaveHook(unit))
        module.register_load_state_dict_pre_hook(_LoadHook(unit))


def load_into_shards(module: nn.Module, unit, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Have a unit ready for a load by one of its modules: with ``assign=True`` not on the meta device.

    Called before torch's ``_load_from_state_dict`` of the module; the hooks of `watch_state_dicts` convert the values.

    Raises:
        InvalidUsage: A parameter on the meta device is not in the state dict.
    """
    if not local_metadata.get("assign_to_params_buffers") or not any(param.sharded.is_meta for param in unit.params):
        return
    given = {id(param) for name, param in _named(module) if prefix + name in state_dict}
    for name, param in _named(module):
        if param.is_meta and id(param) not in given:
            raise InvalidUsage(
                f"{prefix}{name} is on the meta device and not in the state dict: give it values first, by to_empty() "
                "and an initialisation, or load a state dict of all parameters",
                op="load_state_dict",
            )
    for group in unit.groups:
        for param in group.params:
            made = param.sharded.detach().like(torch.empty_like(param.local, device=group.store))
            torch.utils.swap_tensors(param.sharded, nn.Parameter(made, requires_grad=param.sharded.requires_grad))
    unit.rehome()


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a module's parameters by all their names."""
    return list(module.named_parameters(remove_duplicate=False))


# ---- Whole tensors.


@torch.no_grad()
def gather_entries(
    module: nn.Module, entries: dict[str, Any], prefix: str = "", *, to_cpu: bool = False, rank0_only: bool = False
) -> None:
    """Replace a module's shards in its state dict by whole tensors, one after the other. A collective; blocks.

    Args:
        entries: What the module's ``state_dict(prefix=prefix)`` has added to, changed in place.
        to_cpu: Whole tensors are on the host. The peak of memory is the model and one parameter.
        rank0_only: Ranks but the first of the module's mesh remove the entries.
    """
    params = {prefix + name: param for name, param in _named(module)}
    keeps = not rank0_only or _is_first(module)
    made: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for key in [key for key in entries if key.startswith(prefix)]:
        value = entries[key]
        if isinstance(value, torch.Tensor):
            same = id(params.get(key, value))
            if same not in made:
                with _naming(f"state_dict() of {key}"):
                    whole = _whole(value)
                made[same] = (whole.cpu() if to_cpu else whole) if keeps else value
            entries[key] = made[same]
        if not keeps:
            del entries[key]


def _is_first(module: nn.Module) -> bool:
    units = units_in(module)
    if units:
        return units[0].world.rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
@torch.no_grad()
def unsharded_params(
    units: Iterable, *, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Have the modules of units hold whole parameters, of the shards' dtype, in a block. A collective; blocks.

    Args:
        writeback: Keep this rank's part of what is written to the parameters, and with `with_grads` of the
            gradients.
        rank0_only: Only the first rank has whole parameters, the others have shards. Without `writeback`.
        offload_to_cpu: The whole parameters are on the host.
        with_grads: The parameters have whole gradients.

    Raises:
        InvalidArgument: `rank0_only` with `writeback`: the other ranks would not get what is written.
    """
    if rank0_only and writeback:
        raise InvalidArgument("rank0_only needs writeback=False: the ranks without whole parameters can't write")
    params = []
    for unit in units:
        unit.to_sharded()
        params += [(unit, param) for param in unit.params]
    held = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.detach().full_tensor()
        return whole.cpu() if offload_to_cpu else whole

    for unit, param in params:
        with _naming(f"the whole parameters of unit {unit.name}, at {param.name}"):
            data = gather(param.sharded)
            grad = gather(param.sharded.grad) if with_grads and param.sharded.grad is not None else None
        if not rank0_only or unit.world.rank == 0:
            whole = nn.Parameter(data, requires_grad=param.sharded.requires_grad)
            whole.grad = grad
            held.append((param, whole))
    units = {unit for unit, _ in params}
    for param, whole in held:
        _hold(param, whole)
    for unit in units:
        unit.holds_copies = True
    try:
        with torch.enable_grad():
            yield
        for param, whole in held if writeback else ():
            _write_back(param.sharded, whole)
            if with_grads and whole.grad is not None and param.sharded.grad is not None:
                _write_back(param.sharded.grad, whole.grad)
    finally:
        for unit in units:
            unit.holds_copies = False
        for param, _ in held:
            _hold(param, param.sharded)


def _hold(param, form: nn.Parameter) -> None:
    for module, attribute in param.places:
        module._parameters[attribute] = form


def _write_back(shard: RaggedTensor, whole: torch.Tensor) -> None:
    shard.copy_(shard.detach().like(part_of(whole, shard).to(shard._local_tensor.device)))


# ---- A model's state dict, by functions with the names of torch.distributed.checkpoint.state_dict's.


def clean_name(name: str) -> str:
    """Return a name without the infixes of wrappers."""
    return functools.reduce(lambda cleaned, infix: cleaned.replace(infix, ""), _INFIXES, name)


def inner_module(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def get_model_state_dict(
    model: nn.Module, *, full_state_dict: bool = False, cpu_offload: bool = False, rank0_only: bool = False,
    options=None,
) -> dict[str, Any]:  # fmt: skip
    """Return a model's parameters and buffers, by the unsharded model's names.

    Args:
        full_state_dict: Whole tensors: a collective, which blocks. Otherwise shards, which view this rank's memory: a
            local call.
        cpu_offload: On the host.
        rank0_only: With `full_state_dict`: on the first rank, and an empty dictionary on the others.
        options: torch's ``StateDictOptions`` instead of these; its ``cpu_offload`` with ``full_state_dict`` implies
            the first rank only.
    """
    full, to_cpu, rank0_only = _read_options(options, full_state_dict, cpu_offload, rank0_only)
    inner = inner_module(model)
    with as_shards():
        made = inner.state_dict()
    if full:
        gather_entries(inner, made, to_cpu=to_cpu, rank0_only=rank0_only)
    elif to_cpu:
        made = {key: tree_map_only(torch.Tensor, torch.Tensor.cpu, value) for key, value in made.items()}
    if options is not None and options.ignore_frozen_params:
        for name, param in _named(inner):
            if not param.requires_grad:
                made.pop(name, None)
    return {clean_name(key): value for key, value in made.items()}


def _read_options(options, full: bool, to_cpu: bool, rank0_only: bool) -> tuple[bool, bool, bool]:
    if options is not None:
        full, to_cpu = options.full_state_dict, options.cpu_offload
        rank0_only = full and to_cpu
    if rank0_only and not full:
        raise InvalidArgument("rank0_only needs full_state_dict=True: of a shard each rank has its own part")
    return full, to_cpu, rank0_only


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, strict: bool = True, broadcast_from_rank0: bool = False,
    options=None,
):  # fmt: skip
    """Load whole tensors, shards or DTensors into a model; return what ``load_state_dict`` returns.

    Each rank calls it. A local call for whole tensors and shards of the same bounds, else a collective.

    Args:
        strict: As of ``load_state_dict``.
        broadcast_from_rank0: The first rank has whole tensors, the others nothing: a collective, tensor by tensor.
        options: torch's ``StateDictOptions`` instead of these.

    Raises:
        RuntimeError: As ``load_state_dict`` does, for missing or unexpected keys and other shapes.
    """
    if options is not None:
        strict, broadcast_from_rank0 = options.strict, options.broadcast_from_rank0
    inner = inner_module(model)
    with as_shards():
        own = inner.state_dict(keep_vars=True)
    keys = {clean_name(key): key for key in own}
    if broadcast_from_rank0:
        with _naming("set_model_state_dict(broadcast_from_rank0=True)"):
            model_state_dict = _scatter(model, model_state_dict, lambda path: own.get(keys.get(path[0])))
    given = {keys.get(name, name): value for name, value in model_state_dict.items()}
    return inner.load_state_dict(given, strict=strict, assign=any(param.is_meta for param in inner.parameters()))


def _scatter(model: nn.Module, given: Any, param_of: Callable[[tuple], Any]):
    """Return what rank 0 has, with each tensor of a parameter's shape as a shard. A collective.

    `param_of`: returns the parameter of a path of keys, or None.
    """
    units = units_in(model)
    if not units:
        raise InvalidUsage("broadcast_from_rank0: nothing in this model is sharded: load it on each rank")
    comm = units[0].world
    paths: list[tuple] = []
    tensors: list[torch.Tensor] = []

    def describe(value, path: tuple):
        if isinstance(value, torch.Tensor):
            paths.append((path, value.shape, value.dtype))
            tensors.append(value)
            return None
        if isinstance(value, dict):
            return {key: describe(each, (*path, key)) for key, each in value.items()}
        return value

    data = pickle.dumps((describe(given, ()), paths)) if comm.rank == 0 else b""
    made, paths = pickle.loads(all_gather_bytes(comm, data)[0])
    for at, (path, shape, dtype) in enumerate(paths):
        whole = torch.empty(shape, dtype=dtype, device=comm.device)
        if comm.rank == 0:
            whole.copy_(tensors[at].detach().full_tensor() if isinstance(tensors[at], DTensor) else tensors[at])
        if whole.numel():
            comm.broadcast(whole.view(-1).view(torch.uint8), root=0)
        param = param_of(path)
        if isinstance(param, RaggedTensor) and param.shape == shape and whole.numel() > 1:
            whole = param.detach().like(part_of(whole, param).clone())
        functools.reduce(dict.__getitem__, path[:-1], made)[path[-1]] = whole
    return made


# ---- An optimizer's state.


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
    full, to_cpu, rank0_only = _read_options(options, full_state_dict, cpu_offload, rank0_only)
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
    keeps = not rank0_only or _is_first(model)

    def gather(value):
        whole = _whole(value)
        return (whole.cpu() if to_cpu else whole) if keeps else None

    state = {}
    for name, entries in made["state"].items():
        with _naming(f"get_optimizer_state_dict() of {name}"):
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

    with _naming("set_optimizer_state_dict(broadcast_from_rank0=True)"):
        return _scatter(model, given, param_of)


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
            with _naming(f"load_state_dict() of an optimizer, at {number}"):
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
        return _whole(value) if isinstance(known, torch.Tensor) and not isinstance(known, DTensor) else value
    return value.detach().clone()


# ---- torch's own functions.


def _cut_distributed(own, tensor, device_mesh=None, placements=None, **options):
    """torch's ``distribute_tensor`` of a tensor that all ranks have, for shards of any bounds."""
    placement = placements[-1] if placements else None
    if not isinstance(placement, RaggedShard):
        return own(tensor, device_mesh, placements, **options)
    extent = (len(tensor) if tensor.dim() else 0) if placement.by_rows else tensor.numel()
    if extent != placement.bounds[-1]:
        return tensor  # of another model: the load names it
    return RaggedTensor.from_full(tensor, device_mesh, placement)


@torch.no_grad()
def _copy_distributed(own, local_state_dict: dict, keys: list[str], *args, **options) -> None:
    """torch's ``_distribute_tensors``: pairs (shard, whole tensor) become the shard with the tensor's values."""
    for key in keys:
        pair = local_state_dict.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], RaggedTensor):
            shard, whole = pair
            if whole.shape != shard.shape:
                local_state_dict[key] = whole  # of another model: the load names it
            elif shard.is_meta:
                local_state_dict[key] = shard.detach().like(part_of(whole, shard).clone())
            else:
                shard._local_tensor.copy_(part_of(whole, shard))
                local_state_dict[key] = shard
    own(local_state_dict, keys, *args, **options)


def _get_as_shards(own, *args, **options):
    with as_shards():
        return own(*args, **options)


patch_state_dict(_get_model_state_dict=_get_as_shards)
patch_distribution(distribute_tensor=_cut_distributed, _distribute_tensors=_copy_distributed)
patch_optimizer_load(_convert_optimizer_state)
