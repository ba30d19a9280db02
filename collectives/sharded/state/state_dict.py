"""State dicts of a sharded module: ``state_dict()`` and ``load_state_dict()`` of full tensors, or
of this rank's shards.

While a unit's part of a state dict is made or loaded, its modules hold substitutes of the shards:
full tensors, gathered unit by unit, or `ShardTensor` objects. So the modules' own hooks and key
names work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictType

from ...errors import InvalidArgument, InvalidUsage
from ..managed_params import named_params
from ..unit import Unit
from .dtensor import as_dtensor, shard_mesh
from .shard_tensor import ShardTensor

__all__ = [
    "GetOptions",
    "as_shard_tensor",
    "make_state_dict",
    "post_load_state_dict",
    "pre_load_state_dict",
    "read_options",
    "to_cpu",
    "unsharded_params",
    "use_get_options",
    "write_back_params",
]


@dataclasses.dataclass(frozen=True)
class GetOptions:
    """How tensors are returned: `full`, or as shards; `on_cpu`: on the host; `rank0_only`: nothing
    on the other ranks; `dtensor`: shards as DTensors.
    """

    full: bool = True
    on_cpu: bool = False
    rank0_only: bool = False
    dtensor: bool = False

    @property
    def gathers(self) -> bool:
        """Whether making them is a collective."""
        return self.full or self.dtensor

    @staticmethod
    def of(kind: StateDictType, config: StateDictConfig | OptimStateDictConfig) -> GetOptions:
        """Convert FSDP1's settings."""
        full = kind is StateDictType.FULL_STATE_DICT
        rank0_only, dtensor = (getattr(config, name, False) for name in ("rank0_only", "_use_dtensor"))
        return GetOptions(full, config.offload_to_cpu, full and rank0_only, not full and dtensor)


_now = threading.local()  # .form: the options that `use_get_options` has set in this thread


@contextlib.contextmanager
def use_get_options(form: GetOptions):
    """Use these options for state dicts inside the block, whatever the units' own are."""
    before, _now.form = getattr(_now, "form", None), form
    try:
        yield
    finally:
        _now.form = before


def _get_options_of(unit: Unit) -> GetOptions:
    """Return the options with which a unit's state dict is to be made now."""
    form, settings = getattr(_now, "form", None), unit.state_dict_settings
    if form is None and settings is not None:
        return GetOptions.of(settings.state_dict_type, settings.state_dict_config)
    return form or GetOptions()


def to_cpu(value):
    """Return a tensor on the host, and anything else as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def as_shard_tensor(param, tensor: torch.Tensor | None = None) -> ShardTensor:
    """Return a parameter's shard, or a tensor of the same shape, as an entry of a state dict."""
    here = param.shard if tensor is None else tensor
    return ShardTensor(here, param.shape, param.start)


def _substitute_shards(unit: Unit) -> None:
    for param in unit.params:
        param.substitute = nn.Parameter(as_shard_tensor(param), requires_grad=param.shard.requires_grad)
    unit.registration.register_substitutes()


@torch.inference_mode(False)
@torch.no_grad()
def _substitute_full_params(unit: Unit, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gather a unit and register on its modules what `convert` makes of each full parameter, a view
    of the gathered buffer.
    """
    for group, flat in zip(unit.groups, unit.scheduler.all_gather_master_shards(unit), strict=True):
        for param in group.params:
            full = convert(param.full_view(flat))
            param.substitute = nn.Parameter(full, requires_grad=param.shard.requires_grad)
    unit.registration.register_substitutes()


def _clone(device: torch.device | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies a tensor to a device; None: to its own."""
    return lambda full: full.to(full.device if device is None else device, copy=True)


@contextlib.contextmanager
def unsharded_params(
    units: list[Unit], *, keep: bool = True, gradients: bool = False, device: torch.device | None = None,
    rank0_only: bool = False,
):  # fmt: skip
    """Register full parameters, in the dtypes of the shards, on the units' modules inside the
    block. A collective.

    `keep`: copy to the shards what is written to them. `gradients`: the full gradients, too.
    `device`: where clones are to lie; None: views of the gathered buffer. `rank0_only`: the other
    ranks' modules hold their shards.
    """
    try:
        for unit in units:
            unit.reshard()
            unit.host_copies.wait()
            if rank0_only and unit.ranks.world.rank:
                unit.scheduler.all_gather_master_shards(unit)
            else:
                clone = device is not None or not keep
                _substitute_full_params(unit, _clone(device) if clone else lambda full: full)
            if gradients:
                unit.scheduler.agreement.barrier(f"summon_full_params(with_grads=True) of unit {unit.index}")
                unit.gradients.gather()
        yield
    finally:
        for unit in units:
            if unit.registration.has_substitutes:
                if keep:
                    write_back_params(unit.params)
                    if gradients:
                        unit.gradients.write_back()
                unit.registration.restore()


@torch.no_grad()
def write_back_params(params: list, module: nn.Module | None = None) -> None:
    """Copy to the shards what a module, or the first module of each parameter, now holds in place
    of the substitute.
    """
    for param in params:
        holder, attribute = next(place for place in param.places if module is None or place[0] is module)
        held = holder._parameters[attribute]
        if held.is_meta and not param.shard.is_meta:
            raise InvalidUsage(f"{param.name} was left on the meta device by its initialisation")
        as_shard_tensor(param).copy_(held)
        if not param.shard.is_inference():
            torch.autograd.graph.increment_version(param.shard)


# ---- Getting.


def make_state_dict(unit: Unit, make, args: tuple, kwargs: dict):
    """Call a module's own `state_dict` with substitutes for its unit's parameters, as the options
    say.
    """
    form = _get_options_of(unit)
    first = unit.ranks.world.rank == 0
    if form.dtensor:
        mesh = shard_mesh(unit.ranks, unit.device)
        _substitute_full_params(unit, lambda full: as_dtensor(full, unit.ranks, mesh))
    elif form.full and (first or not form.rank0_only):
        _substitute_full_params(unit, _clone(torch.device("cpu") if form.on_cpu else None))
    else:
        if form.full:
            unit.scheduler.all_gather_master_shards(unit)  # a collective that rank 0 needs
        _substitute_shards(unit)
    try:
        made = make(*args, **kwargs)
    finally:
        unit.registration.restore()
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    if form.rank0_only and not first:
        for key in [key for key in made if key.startswith(prefix)]:
            del made[key]
    elif form.on_cpu:
        for key, value in made.items():
            if key.startswith(prefix):
                made[key] = to_cpu(value)
    return made


# ---- Loading.


def pre_load_state_dict(unit: Unit, state_dict: dict, prefix: str, module: nn.Module) -> None:
    """Register substitutes that copy this rank's part of full tensors, of shards, and of DTensors.

    A local call. What is on the meta device is allocated.
    """
    unit.reshard()
    unit.host_copies.wait()
    empty = [param for group in unit.groups if group.flat.is_meta for param in group.params]
    for group in unit.groups:
        group.allocate()
    for name, inner in module.named_modules(prefix=prefix.removesuffix(".")):
        for key, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_meta and f"{name}.{key}".removeprefix(".") in state_dict:
                inner._buffers[key] = torch.empty_like(buffer, device=unit.device)
    _substitute_shards(unit)
    unit.unfilled = set(empty) if unit.module_group is None else unit.unfilled | set(empty)
    for param, _ in named_params(unit, module):
        param.substitute.filled = param not in unit.unfilled or not param.count


def post_load_state_dict(unit: Unit, module: nn.Module) -> None:
    """Copy to the shards what was assigned, and register the shards on the modules."""
    if not unit.registration.has_substitutes:
        return
    try:
        for param, _ in named_params(unit, module):
            holder, attribute = param.places[0]
            unit.unfilled.discard(param)
            if not param.substitute.filled and holder._parameters[attribute] is param.substitute:
                raise InvalidUsage(
                    f"{param.name} was on the meta device and is not in the state dict: give it values first, by "
                    "materialize()",
                    op="load_state_dict",
                )
        write_back_params(unit.params)
    finally:
        unit.registration.restore()
        unit.scheduler.forget_steps()


# ---- Torch's options.


def read_options(
    options, full_state_dict: bool, cpu_offload: bool, rank0_only: bool, use_dtensor: bool = False
) -> GetOptions:
    """Convert keyword arguments, or torch's StateDictOptions instead of the first three.

    With torch's options, full state on the host is for rank 0 only.
    """
    if use_dtensor and (full_state_dict if options is None else getattr(options, "full_state_dict", False)):
        raise InvalidArgument("full_state_dict gives full tensors, and use_dtensor DTensors: give one of them")
    if options is None:
        if rank0_only and not full_state_dict:
            raise InvalidArgument("rank0_only gives full tensors to rank 0: give full_state_dict=True, too")
        full, on_cpu = bool(full_state_dict), bool(cpu_offload)
        return GetOptions(full, on_cpu, bool(rank0_only), bool(use_dtensor))
    if not hasattr(options, "full_state_dict"):
        raise InvalidArgument(f"options must be a StateDictOptions, not {type(options).__name__}")
    if getattr(options, "flatten_optimizer_state_dict", False):
        raise InvalidArgument("flatten_optimizer_state_dict is not offered: leave it out")
    full, on_cpu = options.full_state_dict, options.cpu_offload
    return GetOptions(full, on_cpu, full and on_cpu, bool(use_dtensor))
