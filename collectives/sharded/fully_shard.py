"""fully_shard: make a module a unit, in place."""

from __future__ import annotations

from torch import nn

from .hooks import ShardedModule
from .managed_params import managed_parameters
from .state import watch_loads
from .unit import Unit

_classes: dict[type, type] = {}


def fully_shard(module: nn.Module, *, mesh, reshard_after_forward: bool = True, mp_policy=None, block: int = 1) -> nn.Module:
    found = managed_parameters(module, (), stop=lambda each: isinstance(each, ShardedModule))
    unit = Unit(found, mesh, mp_policy=mp_policy, block=block)
    unit.reshard_after_forward = reshard_after_forward
    object.__setattr__(module, "_unit", unit)
    watch_loads(unit)
    module.__class__ = _class_of(type(module))
    return module


def _class_of(cls: type) -> type:
    if cls not in _classes:
        body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (ShardedModule, cls), body)
    return _classes[cls]
