"""Initialisation of modules that were built on the meta device and sharded there.

An initialisation uses shapes, and the shape of a shard would give the wrong fan-in. So it runs on
full parameters, of which each rank then keeps its shard. `materialize` does this module by module. Where
a unit was made of meta parameters, its modules' own `INIT_METHODS` do it when they are called, as
FSDP2's programs call them after ``module.to_empty(device=...)``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container

import torch
from torch import nn

from ..errors import InvalidUsage
from .managed_params import units_in
from .state.state_dict import unsharded_params, write_back_params
from .unit import Unit

__all__ = ["INIT_METHODS", "has_meta", "initialise", "materialize", "wrap_init_methods"]

# Methods that users call to initialise a module's parameters.
INIT_METHODS = ("reset_parameters", "_reset_parameters", "init_weights", "_init_weights", "initialize_weights")


def wrap_init_methods(unit: Unit) -> None:
    """Run the initialisation methods of a unit's modules on full parameters. They are collectives
    then.
    """
    for module in unit.module().modules():
        for name in INIT_METHODS:
            method = getattr(module, name, None)
            if callable(method) and not hasattr(method, "_runs_on_full"):
                object.__setattr__(module, name, _on_full(module, method, unit))


def _on_full(module: nn.Module, method: Callable, unit: Unit) -> Callable:
    @functools.wraps(method)
    def call(*args, **kwargs):
        units = dict.fromkeys((unit, *units_in(module)))
        missing = [each for each in units if any(group.flat.is_meta for group in each.groups)]
        if missing:
            raise InvalidUsage(
                f"{missing[0].params[0].name} of {missing[0].name} is on the meta device: module.to_empty(device=...) "
                "gives it memory, or materialize() memory and values",
                op=method.__name__,
            )
        with unsharded_params([each for each in units if not each.registration.has_substitutes]):
            return method(*args, **kwargs)

    call._runs_on_full = True
    return call


def materialize(
    module: nn.Module,
    device: torch.device | str | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Allocate and initialise what of a module is on the meta device, module by module; return the
    module.

    For each module inside that holds such parameters or buffers itself, outermost first: call
    ``param_init_fn(module)``, as FSDP1's, which must allocate and initialise them; or, without one,
    ``module.to_empty(recurse=False)`` and ``module.reset_parameters()``. Both get full parameters,
    and each rank keeps its shard: the peak is one module's memory. A local call, in which all ranks
    draw the same random numbers as one process without sharding would, if they begin with the same
    seed. `device`: where it computes; None: where the units do. Raises `InvalidUsage` for a module
    that has no ``reset_parameters``, and for one that the function leaves on the meta device.
    """
    units = units_in(module)
    for unit in units:
        unit.reshard()
    if device is None:
        device = units[0].device if units else torch.device("cpu")
    params: dict[int, list] = {}
    for unit in units:
        for param in unit.params if any(group.flat.is_meta for group in unit.groups) else ():
            for holder, _ in param.places:
                params.setdefault(id(holder), []).append((unit, param))
    of_units = {id(param.shard) for unit in units for param in unit.params}
    todo = [each for each in module.modules() if id(each) in params or has_meta(each, of_units)]
    for unit in units:
        for group in unit.groups:
            group.allocate()
    for each in todo:
        _initialise(each, params.get(id(each), []), torch.device(device), param_init_fn)
    return module


def has_meta(module: nn.Module, excluded: Container[int] = ()) -> bool:
    """Whether a module itself holds parameters or buffers on the meta device, besides those of
    these ids.
    """
    held = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return any(tensor.is_meta and id(tensor) not in excluded for tensor in held)


def initialise(module: nn.Module, device: torch.device, init, error: Callable[[str], Exception]) -> None:
    """Allocate and initialise what a module itself holds: by `init`, or its `reset_parameters`.

    `error` makes the error for a module that has none.
    """
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise error(f"{type(module).__name__} is on the meta device and has no reset_parameters(): give param_init_fn")
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()


def _initialise(module: nn.Module, held: list, device: torch.device, init) -> None:
    """Initialise what a module holds itself, with full parameters as substitutes of the shards."""
    for _, param in held:
        full = torch.empty(param.shape, dtype=param.shard.dtype, device="meta")
        param.substitute = nn.Parameter(full, requires_grad=param.shard.requires_grad)
    try:
        for unit, param in held:
            unit.registration.register_substitutes([param])
        with torch.no_grad():
            initialise(module, device, init, functools.partial(InvalidUsage, op="materialize"))
        write_back_params([param for _, param in held], module)
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            raise InvalidUsage(f"param_init_fn left a buffer of {type(module).__name__} on the meta device")
    finally:
        for unit, param in held:
            unit.registration.restore([param])
