"""Names of parameters, for messages and for state that outlives a process.

A gradient bucket has parameters and no names. The names come from registered modules: modules on
which a DDP hook is registered (`torch_patches` records these), and modules that are registered with
a `ParameterNames`. State is saved by the names in its own `ParameterNames`. These depend only on
the modules that were registered there and on their order: not on other objects of the process, nor
on when Python collects garbage.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .torch_patches import find_hooked_ddps

__all__ = ["ParameterNames", "find_ddp", "find_names"]

_message_names = WeakIdKeyDictionary()  # parameter -> its name in the module that was registered first


class ParameterNames:
    """Names of the parameters that one state serves.

    They are unique over the modules that were registered with it.

    If a module has a name that an earlier module had, the name becomes "2:" and the name, then
    "3:", in the order of registration. That order is the program's and so the same on all ranks. A
    module keeps its number when it dies.
    """

    def __init__(self):
        self._names = WeakIdKeyDictionary()  # parameter -> name
        self._taken: set[str] = set()
        self._lazy: list[weakref.WeakMethod] = []

    def register(self, module: torch.nn.Module) -> None:
        """Name a module's parameters as ``module.named_parameters()`` does."""
        self.add(module.named_parameters())

    def add(self, named) -> None:
        """Add names: an iterable of (name, parameter). A parameter that has a name keeps it."""
        for name, parameter in named:
            if parameter not in self._names:
                number, free = 1, name
                while free in self._taken:
                    number += 1
                    free = f"{number}:{name}"
                self._taken.add(free)
                self._names[parameter] = free
            _message_names.setdefault(parameter, name)

    def add_lazily(self, method) -> None:
        """Call a bound method, which calls `add`, at the first lookup of an unknown parameter.

        Held weakly.
        """
        self._lazy.append(weakref.WeakMethod(method))

    def lookup(self, parameters) -> list[str | None]:
        """Return each parameter's name; None for a parameter in no registered module.

        A module with a hook that was not registered here is registered at the first lookup of one
        of its parameters. A user's own hook that calls `fused_allreduce` needs that.
        """
        parameters = list(parameters)
        if any(parameter not in self._names for parameter in parameters):
            lazy, self._lazy = self._lazy, []
            for method in [reference() for reference in lazy]:
                if method is not None:
                    method()
        for parameter in parameters:
            if parameter not in self._names and (ddps := find_hooked_ddps(parameter)):
                self.register(ddps[-1].module)
        return [self._names.get(parameter) for parameter in parameters]

    def has(self, parameter) -> bool:
        """Return whether a parameter has a name here."""
        return parameter in self._names

    def unmatched(self, names) -> list[str]:
        """Return those names that no registered module has had so far."""
        return [name for name in names if name not in self._taken]


def find_names(parameters) -> list[str | None]:
    """Return each parameter's own name in a module with a hook or a state, for messages.

    None where there is none. Parameters of two modules may have the same name.
    """
    found = []
    for parameter in parameters:
        if parameter not in _message_names:
            for ddp in find_hooked_ddps(parameter)[-1:]:
                for name, each in ddp.module.named_parameters():
                    _message_names.setdefault(each, name)
        found.append(_message_names.get(parameter))
    return found


def find_ddp(parameters) -> torch.nn.parallel.DistributedDataParallel | None:
    """Return the DDP object, with a hook, that synchronises these parameters of one bucket.

    None where there is none. If there are several, such as a second one over the same parameters,
    it is the one whose hook was registered last.
    """
    ddps = find_hooked_ddps(parameters[0])
    if len(ddps) > 1:
        for parameter in parameters[1:]:
            others = find_hooked_ddps(parameter)
            ddps = [ddp for ddp in ddps if any(ddp is other for other in others)]
    return ddps[-1] if ddps else None
