"""Names of parameters, for messages and for state that outlives a process.

A gradient bucket has parameters and no names. They are looked for once, in the modules that were told (`tell`) and in
every DistributedDataParallel object that is alive.
"""

from __future__ import annotations

import gc
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["known_names", "module_of", "names_of", "tell", "tell_later", "tell_names"]

_later: list = []  # functions, as weak references
_told: list = []  # weak references to modules, oldest first
_names = WeakIdKeyDictionary()  # parameter -> name
_ddps = WeakIdKeyDictionary()  # parameter -> weak reference to its DistributedDataParallel object, or _nowhere


def _nowhere() -> None:
    """Stand for a reference to no object."""


def tell(module: torch.nn.Module) -> None:
    """Let the parameters of a module be found, by the names that ``module.named_parameters()`` gives them."""
    _told[:] = [reference for reference in _told if reference() is not None]
    _told.append(weakref.ref(module))
    tell_names(module.named_parameters())


def tell_names(named) -> None:
    """Let parameters be found by names: (name, parameter) of each."""
    named = list(named)
    taken = set(_names.values())
    if not taken.isdisjoint(name for name, _ in named):
        gc.collect()  # a module that nobody holds any more, but in a cycle
        taken = set(_names.values())
    for name, parameter in named:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{number}:{name}"
        if _names.get(parameter) is None:
            _names[parameter] = free


def tell_later(method) -> None:
    """Have a bound method called, which calls `tell_names`, when a name is first looked for that isn't known."""
    _later.append(weakref.WeakMethod(method))


def names_of(parameters) -> list[str | None]:
    """Give each parameter's name: its own in its module, or "2:" and that where another module has the same name.

    None for a parameter that is in no module that was told, nor in a DistributedDataParallel object.
    """
    parameters = list(parameters)
    if any(parameter not in _names for parameter in parameters):
        later, _later[:] = _later[:], []
        for method in [reference() for reference in later]:
            if method is not None:
                method()
    if any(parameter not in _names for parameter in parameters):
        # A walk over all objects takes some ten milliseconds; it is made for each new module once.
        known = {id(reference()) for reference in _told}
        # By type(): isinstance asks the object, and some of torch's answer with a warning.
        new = [
            thing.module
            for thing in gc.get_objects()
            if issubclass(type(thing), torch.nn.parallel.DistributedDataParallel) and id(thing.module) not in known
        ]
        for module in new:
            tell(module)
        for parameter in parameters:
            _names.setdefault(parameter, None)
    return [_names[parameter] for parameter in parameters]


def known_names() -> set[str]:
    """Give the names of all parameters that are alive and in a module that was told or found."""
    return {name for name in _names.values() if name is not None}


def module_of(parameter) -> torch.nn.parallel.DistributedDataParallel | None:
    """Give the DistributedDataParallel object that synchronises a parameter; None where there is none.

    It walks over all objects, some ten milliseconds, once for each such object.
    """
    reference = _ddps.get(parameter)
    if reference is None or (reference is not _nowhere and reference() is None):
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.nn.parallel.DistributedDataParallel):
                for each in thing.module.parameters():
                    _ddps[each] = weakref.ref(thing)
        if reference is _ddps.get(parameter):
            _ddps[parameter] = _nowhere
        reference = _ddps[parameter]
    return reference()
