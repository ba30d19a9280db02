"""Names of a model's parameters as state dicts have them, and what each one is here: a unit's slot, or itself."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ...errors import InvalidArgument
from ..param import ShardedParam
from .state_dict import as_shard_tensor

__all__ = ["NamedParam", "clean_tensor_name", "params_by_id", "sharded_params_by_fqn"]

# What wrappers put between: torch.compile, activation checkpointing; DistributedDataParallel's is at the beginning.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_tensor_name(name: str) -> str:
    """Give a name without what wrappers have put into it."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


@dataclasses.dataclass(frozen=True)
class NamedParam:
    """A parameter by its name: its `param` here, and the `slot` where it is a unit's."""

    name: str
    param: nn.Parameter
    sharded: ShardedParam | None

    @property
    def shape(self) -> torch.Size:
        """The whole parameter's."""
        return self.param.shape if self.sharded is None else self.sharded.shape

    @property
    def device(self) -> torch.device:
        """Where state for it can be put now; optimizers move what they load to where the parameter is."""
        return torch.device("cpu") if self.param.is_meta else self.param.device

    def is_per_element(self, key: str, value) -> bool:
        """Tell whether an entry of the parameter's optimizer state has an element for each of the parameter's here."""
        return isinstance(value, torch.Tensor) and key != "step" and value.shape == self.param.shape

    def as_entry(self, value: torch.Tensor) -> torch.Tensor:
        """Give a tensor that lies as the parameter here, as an entry of a state dict of pieces."""
        return value if self.sharded is None else as_shard_tensor(self.sharded, value)

    def load_entry(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Give, as the optimizer here needs it, its own copy of an entry of the whole shape, or of a piece."""
        if value.shape != self.shape:
            raise InvalidArgument(
                f"{key} of {self.name} has shape {list(value.shape)} in the state dict, and the parameter has "
                f"{list(self.shape)}: it is of another model"
            )
        if self.sharded is None:
            return value.detach().clone()
        here = torch.empty(self.param.shape, dtype=value.dtype, device=self.device)
        as_shard_tensor(self.sharded, here).copy_(value)
        return here


def sharded_params_by_fqn(model: nn.Module) -> dict[str, ShardedParam]:
    """Give the units' slots by all their names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        unit = getattr(module, "_unit", None)
        for param in () if unit is None else unit.params:
            for name in param.names:
                found.setdefault(clean_tensor_name(f"{prefix}.{name}" if prefix else name), param)
    return found


def params_by_id(model: nn.Module) -> dict[int, NamedParam]:
    """Give a model's parameters by their ids, each with its first name; of units, their pieces."""
    found: dict[int, NamedParam] = {}
    of_units = set()
    for name, param in sharded_params_by_fqn(model).items():
        found.setdefault(id(param.shard), NamedParam(name, param.shard, param))
        of_units |= {id(param.shard), id(param.full), id(param.substitute)}
    for name, param in model.named_parameters():
        if id(param) not in of_units:
            found[id(param)] = NamedParam(clean_tensor_name(name), param, None)
    return found
