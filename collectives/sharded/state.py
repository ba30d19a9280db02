"""State dicts of sharded modules: shards, or whole tensors; and back.

`module.state_dict()` has shards, as RaggedTensors, and sends nothing. What is loaded may be whole tensors, shards of
any bounds, or DTensors of any placement: each value becomes this rank's part of the parameter. A DTensor that is placed
in another way is gathered for that, one at a time, which is a collective of the ranks of its mesh.
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
from ..torch_compat import tree_map_only
from ..torch_patches import patch_distribution, patch_state_dict
from .managed_params import units_in
from .placement import RaggedShard
from .ragged_tensor import RaggedTensor

__all__ = [
    "as_shards", "clean_name", "gather_entries", "get_model_state_dict", "inner_module", "is_first",
    "load_into_shards", "named_in_errors", "part_of", "read_options", "scatter_from_rank0", "set_model_state_dict",
    "unsharded_params", "wants_shards", "watch_state_dicts", "whole_of",
]  # fmt: skip

_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of checkpoint wrappers


@contextlib.contextmanager
def named_in_errors(what: str) -> Iterator[None]:
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


def whole_of(value: torch.Tensor) -> torch.Tensor:
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
            with named_in_errors(f"load_state_dict() of {key}"):
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
    keeps = not rank0_only or is_first(module)
    made: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for key in [key for key in entries if key.startswith(prefix)]:
        value = entries[key]
        if isinstance(value, torch.Tensor):
            same = id(params.get(key, value))
            if same not in made:
                with named_in_errors(f"state_dict() of {key}"):
                    whole = whole_of(value)
                made[same] = (whole.cpu() if to_cpu else whole) if keeps else value
            entries[key] = made[same]
        if not keeps:
            del entries[key]


def is_first(module: nn.Module) -> bool:
    """Whether this is the first rank of a module's units, or of torch.distributed without units."""
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
        with named_in_errors(f"the whole parameters of unit {unit.name}, at {param.name}"):
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
    full, to_cpu, rank0_only = read_options(options, full_state_dict, cpu_offload, rank0_only)
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


def read_options(options, full: bool, to_cpu: bool, rank0_only: bool) -> tuple[bool, bool, bool]:
    """Return whether whole tensors are wanted, on the host, on the first rank only: as arguments, or options, say."""
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
        with named_in_errors("set_model_state_dict(broadcast_from_rank0=True)"):
            model_state_dict = scatter_from_rank0(model, model_state_dict, lambda path: own.get(keys.get(path[0])))
    given = {keys.get(name, name): value for name, value in model_state_dict.items()}
    return inner.load_state_dict(given, strict=strict, assign=any(param.is_meta for param in inner.parameters()))


def scatter_from_rank0(model: nn.Module, given: Any, param_of: Callable[[tuple], Any]):
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
