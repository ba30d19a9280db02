"""Initialisation of modules that were built on the meta device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..errors import InvalidUsage
from .managed_params import device_of, units_in
from .mesh import Ranks
from .module import ShardedModule

__all__ = ["cast_buffers", "materialize", "prepare"]


def materialize(
    module: nn.Module,
    device: torch.device | str | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Allocate and initialise what of a module is on the meta device, module by module.

    Each module inside that has such parameters or buffers itself is initialised by its
    ``reset_parameters()``, outermost first. A random initialisation of shards draws the numbers of
    the whole parameter, and each rank keeps its rows: with one seed the ranks have the values of one
    process. Memory: the shards, and one whole parameter. A local call for ``reset_parameters`` of
    torch's modules; an initialisation that reads a parameter is a collective.

    Args:
        module: A module, sharded or not.
        device: Where to allocate. None: where the units compute, and without units the host.
        param_init_fn: A function that allocates and initialises what a module holds itself, as
            FSDP1's.

    Returns:
        The module.

    Raises:
        InvalidUsage: For a module without ``reset_parameters()``, and for one that `param_init_fn`
            leaves on the meta device.
    """
    device = device_of(module) if device is None else device
    for each in list(filter(_has_meta, module.modules())):  # both holders of a tied weight, as in one process
        _initialise(each, torch.device(device), param_init_fn)
    for unit in units_in(module):
        unit.rehome()
    return module


def _has_meta(module: nn.Module) -> bool:
    """Whether a module itself holds parameters or buffers on the meta device."""
    held = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in held)


def _initialise(module: nn.Module, device: torch.device, init: Callable[[nn.Module], None] | None) -> None:
    """Allocate and initialise what a module itself holds: by `init`, or by its ``reset_parameters()``."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects: ties are kept
    try:
        with torch.no_grad():
            if init is not None:
                init(module)
            else:
                _reset(module, device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    if _has_meta(module):
        raise InvalidUsage(
            f"param_init_fn has left parameters or buffers of {type(module).__name__} on the meta device: allocate "
            "them, as by module.to_empty(device=..., recurse=False)",
            op="materialize",
        )


def _reset(module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise InvalidUsage(
            f"{type(module).__name__} is on the meta device and has no reset_parameters(): give param_init_fn",
            op="materialize",
        )
    module.to_empty(device=device, recurse=False)
    reset()


@torch.no_grad()
def prepare(
    module: nn.Module, ranks: Ranks, param_init_fn, skipped: Iterable[nn.Module], ignored: Iterable[nn.Parameter], *,
    sync: bool,
) -> None:  # fmt: skip
    """Initialise what of a module that becomes a unit is on the meta device.

    Args:
        skipped: Modules that are left alone, with those inside. Sharded modules are, too.
        ignored: Parameters that are left alone.
        sync: Then take rank 0's parameters and buffers: a collective.
    """
    members: dict[nn.Module, None] = {}
    _collect(module, {part for each in skipped for part in each.modules()}, members)
    for each in list(filter(_has_meta, members)):
        _initialise(each, ranks.device, param_init_fn)
    if sync:
        left_alone = set(map(id, ignored))
        held = {id(one): one for each in members for one in (*each._parameters.values(), *each._buffers.values())}
        for tensor in held.values():
            if tensor is not None and id(tensor) not in left_alone and tensor.numel():
                whole = tensor.detach().to(ranks.device).contiguous()
                ranks.world.broadcast(whole.view(-1).view(torch.uint8), root=0)
                tensor.copy_(whole)


def _collect(module: nn.Module, skipped: set[nn.Module], members: dict[nn.Module, None]) -> None:
    if module not in skipped and module not in members and not isinstance(module, ShardedModule):
        members[module] = None
        for child in module.children():
            _collect(child, skipped, members)


def cast_buffers(module: nn.Module, dtype: torch.dtype, exempt: tuple[type, ...], skipped: Iterable[nn.Module]) -> None:
    """Cast the floating buffers of a module and of those inside, except of some classes and modules."""
    inside = {part for each in skipped for part in each.modules()}
    for each in module.modules():
        if each not in inside and not isinstance(each, exempt):
            for name, buffer in each._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    each._buffers[name] = buffer.to(dtype)
