"""Names of parameters, for messages and for state that outlives a process.

A gradient bucket has parameters and no names. They come from the modules that are registered: those on which a hook is
(see `torch_changes`), and those that are given to a `Names`. What a state saves goes by the names in its own `Names`,
which depend on nothing but the modules that were registered with it, and their order: not on what else lives in the
process, nor on when Python collects what is dead.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .torch_patches import ddps_of

__all__ = ["Names", "module_of", "names_of"]

_own = WeakIdKeyDictionary()  # parameter -> its name in the module that was registered first, for messages


class Names:
    """The names of the parameters that one state serves: their own ones in the modules that were registered with it.

    Where a module has a name that an earlier one has had, it is "2:" and the name, then "3:": in the order in which
    they were registered, which is the program's and so the same on all ranks. A module keeps its number when it dies.
    """

    def __init__(self):
        self._names = WeakIdKeyDictionary()  # parameter -> name
        self._taken: set[str] = set()
        self._later: list[weakref.WeakMethod] = []

    def register(self, module: torch.nn.Module) -> None:
        """Name a module's parameters as ``module.named_parameters()`` does."""
        self.add(module.named_parameters())

    def add(self, named) -> None:
        """Name parameters: (name, parameter) of each. One that has a name already keeps it."""
        for name, parameter in named:
            if parameter not in self._names:
                number, free = 1, name
                while free in self._taken:
                    number += 1
                    free = f"{number}:{name}"
                self._taken.add(free)
                self._names[parameter] = free
            _own.setdefault(parameter, name)

    def add_later(self, method) -> None:
        """Have a bound method called, which calls `add`, when a name is first looked for that isn't known."""
        self._later.append(weakref.WeakMethod(method))

    def of(self, parameters) -> list[str | None]:
        """Give each parameter's name; None for one that is in no registered module.

        A module with a hook that was not registered here, as one of the user's own that calls `fused_allreduce`, is
        registered when its first parameter is asked for.
        """
        parameters = list(parameters)
        if any(parameter not in self._names for parameter in parameters):
            later, self._later = self._later, []
            for method in [reference() for reference in later]:
                if method is not None:
                    method()
        for parameter in parameters:
            if parameter not in self._names and (ddps := ddps_of(parameter)):
                self.register(ddps[-1].module)
        return [self._names.get(parameter) for parameter in parameters]

    def has(self, parameter) -> bool:
        """Whether a parameter has a name here already."""
        return parameter in self._names

    def unknown(self, names) -> list[str]:
        """Give those names that no module registered so far has had."""
        return [name for name in names if name not in self._taken]


def names_of(parameters) -> list[str | None]:
    """Give each parameter's own name in a module with a hook or with a state, for messages; None where there is none.

    Two modules' parameters may have the same.
    """
    found = []
    for parameter in parameters:
        if parameter not in _own:
            for ddp in ddps_of(parameter)[-1:]:
                for name, each in ddp.module.named_parameters():
                    _own.setdefault(each, name)
        found.append(_own.get(parameter))
    return found


def module_of(parameters) -> torch.nn.parallel.DistributedDataParallel | None:
    """Give the DDP object, with a hook, that synchronises these parameters of one bucket; None where there is none.

    Where there are several, one made anew over the same parameters, say, it is that whose hook was registered last.
    """
    ddps = ddps_of(parameters[0])
    if len(ddps) > 1:
        for parameter in parameters[1:]:
            others = ddps_of(parameter)
            ddps = [ddp for ddp in ddps if any(ddp is other for other in others)]
    return ddps[-1] if ddps else None
