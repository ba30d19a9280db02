"""Registration of a unit's parameters on its modules: as shards, full parameters or substitutes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable

from torch import nn

from ..errors import InvalidArgument
from .gathering_parameters import HeldParameters, make_parameters, set_gathering
from .param import ShardedParam

__all__ = ["ParamRegistration"]


class ParamRegistration:
    """Registers one form of a unit's parameters on its modules. `form`: "shard" or "full".

    A substitute is what the modules hold in place of that form while a state dict is made or
    loaded, or while an initialisation runs.
    """

    def __init__(self, params: list[ShardedParam]):
        self._params = params
        self._held: list[HeldParameters] = []  # those whose lookups are intercepted
        self._find_places()
        self.register("shard")

    def _find_places(self) -> None:
        # Registering sets the modules' dictionaries directly, unless a module overrides __setattr__
        # (nn.LSTM).
        self._by_dict, self._by_setattr = [], []
        for param in self._params:
            for holder, attribute in param.places:
                if type(holder).__setattr__ is nn.Module.__setattr__:
                    self._by_dict.append((holder._parameters, attribute, param))
                else:
                    self._by_setattr.append((holder, attribute, param))

    def intercept_reads(self, unit: weakref.ref, on_read: Callable[[weakref.ref], None]) -> None:
        """Call ``on_read(unit)`` before a parameter is looked up on its module while the shards are
        registered.
        """
        names: dict[nn.Module, set[str]] = {}
        for param in self._params:
            for holder, attribute in param.places:
                names.setdefault(holder, set()).add(attribute)
        for holder, attributes in names.items():
            held = make_parameters(holder._parameters, attributes, unit, on_read)
            holder.__dict__["_parameters"] = held
            self._held.append(held)
        self._find_places()
        set_gathering(self._held, self.form == "shard")

    def register(self, form: str) -> None:
        """Have the modules hold every parameter in this form."""
        self.form = form
        if self._by_setattr:
            set_gathering(self._held, False)  # __setattr__ may look up what it replaces
        held_of = operator.attrgetter(form)
        for parameters, attribute, param in self._by_dict:
            parameters[attribute] = held_of(param)
        for holder, attribute, param in self._by_setattr:
            setattr(holder, attribute, getattr(param, form))
        set_gathering(self._held, form == "shard")

    def check_shards(self) -> None:
        """Raise `InvalidArgument`, by name, where a module no longer holds a parameter's shard."""
        for parameters, attribute, param in self._by_dict:
            if parameters.get(attribute) is not param.shard:
                raise InvalidArgument(
                    f"{param.name} was exchanged for another parameter after it was sharded: change modules before "
                    "fully_shard, and values in place"
                )

    def register_substitutes(self, params: list[ShardedParam] | None = None) -> None:
        """Have the modules hold the `substitute` of these parameters, or of all, until `restore`."""
        for param in self._params if params is None else params:
            _set_on_modules(param, param.substitute)

    def restore(self, params: list[ShardedParam] | None = None) -> None:
        """Have the modules hold what they held before the substitutes, which are dropped."""
        for param in self._params if params is None else params:
            _set_on_modules(param, getattr(param, self.form))
            param.substitute = None

    @property
    def has_substitutes(self) -> bool:
        """Whether the modules hold a substitute."""
        return any([param.substitute is not None for param in self._params])


def _set_on_modules(param: ShardedParam, value) -> None:
    for holder, attribute in param.places:
        if type(holder).__setattr__ is nn.Module.__setattr__:
            holder._parameters[attribute] = value
        else:
            setattr(holder, attribute, value)
