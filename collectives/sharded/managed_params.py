"""Lookup of the parameters that a unit manages, and of the units in a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["check_parameter", "device_of", "managed_parameters", "units_in"]


def managed_parameters(
    module: nn.Module, ignored: Iterable[nn.Parameter] = (), stop=lambda module: False
) -> list[tuple[list[str], list[tuple[nn.Module, str]], nn.Parameter]]:
    """Return (names, places, parameter) of a module's parameters, each once.

    Modules for which `stop` is true, and those inside, are left out.
    """
    ignored = set(map(id, ignored))
    found: dict[int, tuple] = {}
    seen: set[int] = set()

    def visit(each: nn.Module, prefix: str) -> None:
        if id(each) in seen:
            for name, param in each.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
                if id(param) in found:
                    found[id(param)][0].append(name)
            return
        seen.add(id(each))
        for attribute, param in each._parameters.items():
            if param is None or id(param) in ignored:
                continue
            names, places, _ = found.setdefault(id(param), ([], [], param))
            names.append(prefix + attribute)
            places.append((each, attribute))
        for name, child in each._modules.items():
            if child is not None and not stop(child):
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return list(found.values())


def units_in(module: nn.Module, *, recurse: bool = True) -> list[Unit]:
    """Return the units of a module and of those inside, outermost first."""
    members = module.modules() if recurse else [module]
    return list(dict.fromkeys(each._sharded_unit for each in members if hasattr(each, "_sharded_unit")))


def device_of(model: nn.Module) -> torch.device:
    """Return the device for what of a model is on the meta device: the units', and without units the host."""
    units = units_in(model)
    return units[0].device if units else torch.device("cpu")


def check_parameter(param: nn.Parameter, name: str) -> None:
    """Raise `InvalidArgument`, with the parameter's name, for one that can't be sharded."""
    if param.layout != torch.strided:
        raise InvalidArgument(f"{name} is {param.layout}: only strided parameters can be sharded: ignored_params")
    if isinstance(param, DTensor):
        raise InvalidArgument(
            f"{name} is distributed already, a DTensor or a shard of an outer unit: shard inner modules before outer "
            "ones, or give it to ignored_params"
        )
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise InvalidArgument(f"{name} has no shape yet: run a forward of its lazy module before it is sharded")
