"""Names of a model's parameters as state dicts have them, and what each one is here: a unit's slot, or itself."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ...errors import InvalidArgument
from ..param import Slot
from .state_dict import piece_of

__all__ = ["Named", "clean", "named_parameters", "named_slots"]

# What wrappers put between: torch.compile, activation checkpointing; DistributedDataParallel's is at the beginning.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """Give a name without what wrappers have put into it."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


@dataclasses.dataclass(frozen=True)
class Named:
    """A parameter by its name: its `param` here, and the `slot` where it is a unit's."""

    name: str
    param: nn.Parameter
    slot: Slot | None

    @property
    def shape(self) -> torch.Size:
        """The whole parameter's."""
        return self.param.shape if self.slot is None else self.slot.shape

    @property
    def device(self) -> torch.device:
        """Where state for it can be put now; optimizers move what they load to where the parameter is."""
        return torch.device("cpu") if self.param.is_meta else self.param.device

    def holds(self, key: str, value) -> bool:
        """Tell whether an entry of the parameter's optimizer state has an element for each of the parameter's here."""
        return isinstance(value, torch.Tensor) and key != "step" and value.shape == self.param.shape

    def entry(self, value: torch.Tensor) -> torch.Tensor:
        """Give a tensor that lies as the parameter here, as an entry of a state dict of pieces."""
        return value if self.slot is None else piece_of(self.slot, value)

    def take(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Give, as the optimizer here needs it, its own copy of an entry of the whole shape, or of a piece."""
        if value.shape != self.shape:
            raise InvalidArgument(
                f"{key} of {self.name} has shape {list(value.shape)} in the state dict, and the parameter has "
                f"{list(self.shape)}: it is of another model"
            )
        if self.slot is None:
            return value.detach().clone()
        here = torch.empty(self.param.shape, dtype=value.dtype, device=self.device)
        piece_of(self.slot, here).copy_(value)
        return here


def named_slots(model: nn.Module) -> dict[str, Slot]:
    """Give the units' slots by all their names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        unit = getattr(module, "_unit", None)
        for slot in () if unit is None else unit.slots:
            for name in slot.names:
                found.setdefault(clean(f"{prefix}.{name}" if prefix else name), slot)
    return found


def named_parameters(model: nn.Module) -> dict[int, Named]:
    """Give a model's parameters by their ids, each with its first name; of units, their pieces."""
    found: dict[int, Named] = {}
    of_units = set()
    for name, slot in named_slots(model).items():
        found.setdefault(id(slot.piece), Named(name, slot.piece, slot))
        of_units |= {id(slot.piece), id(slot.full), id(slot.shown)}
    for name, param in model.named_parameters():
        if id(param) not in of_units:
            found[id(param)] = Named(clean(name), param, None)
    return found
