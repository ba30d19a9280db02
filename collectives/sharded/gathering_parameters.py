"""Gathering parameters: a module's ``_parameters`` in which a lookup of a unit's parameter calls a
function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["GatheringParameters", "HeldParameters", "find_unit", "make_parameters", "set_gathering"]


class HeldParameters(dict):
    """A module's ``_parameters`` while its unit is registered unsharded. `names`: those of the unit,
    to which `unit` is a weak reference. `on_read`: see `GatheringParameters`.

    Copies of it are dictionaries.
    """

    __slots__ = ("names", "on_read", "unit")

    def __reduce_ex__(self, protocol):
        return dict, (dict(self),)


class _Unsharded(HeldParameters):
    __slots__ = ()


class GatheringParameters(HeldParameters):
    """The same while its unit is registered sharded: calls ``on_read(unit)`` before one of `names` is
    looked up.
    """

    __slots__ = ()

    def __getitem__(self, name: str):
        if name in self.names:
            self.on_read(self.unit)
        return dict.__getitem__(self, name)


def make_parameters(
    parameters: dict, names: set[str], unit: weakref.ref, on_read: Callable[[weakref.ref], None]
) -> HeldParameters:
    """Return a module's ``_parameters`` as `GatheringParameters`."""
    made = GatheringParameters(parameters)
    made.names, made.unit, made.on_read = names, unit, on_read
    return made


def find_unit(module, name: str):
    """Return the unit that a module's parameter of this name is of; None where it is of none."""
    held = module._parameters
    return held.unit() if isinstance(held, HeldParameters) and name in held.names else None


def set_gathering(parameters: list[HeldParameters], gathering: bool) -> None:
    """Set whether a lookup calls ``on_read(unit)``."""
    cls = GatheringParameters if gathering else _Unsharded
    for each in parameters:
        each.__class__ = cls
