"""Fully qualified names of a model's parameters, as state dicts have them, and the sharded
parameter of each name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from ...errors import InvalidArgument
from ..full_param_optimizer import FullParamOptimizer
from ..managed_params import named_params
from ..param import ShardedParam
from ..param_owners import OwnedParam
from .state_dict import as_shard_tensor

__all__ = ["NamedParam", "clean_tensor_name", "is_scalar", "params_by_id", "sharded_params_by_fqn"]

# Infixes of torch.compile and of activation checkpointing. DistributedDataParallel's is a prefix.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def is_scalar(key: str, value: torch.Tensor) -> bool:
    """Whether an entry of optimizer state is one number for the parameter, whatever its shape:
    ``step``, and those of torch's NAdam and ASGD.
    """
    return key == "step" or (value.dim() == 0 and key in ("mu_product", "eta", "mu"))


def clean_tensor_name(name: str) -> str:
    """Return a name without the infixes of wrappers."""
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


@dataclasses.dataclass(frozen=True)
class NamedParam:
    """A parameter by its name: `param` is the object on this rank, `sharded` its `ShardedParam`, or
    None. `owned`: where a `FullParamOptimizer` has its state, whole and on one rank; `param` then has
    the full shape.
    """

    name: str
    param: nn.Parameter
    sharded: ShardedParam | None
    owned: OwnedParam | None = None

    @property
    def has_state(self) -> bool:
        """Whether this rank has a part of its optimizer state."""
        return self.owned.is_here if self.owned is not None else self.param.numel() > 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.param.shape if self.sharded is None else self.sharded.shape

    @property
    def device(self) -> torch.device:
        """Device on which to allocate its state; optimizers move loaded state to where the
        parameter is.
        """
        return torch.device("cpu") if self.param.is_meta else self.param.device

    def is_per_element(self, key: str, value) -> bool:
        """Whether an entry of its optimizer state has an element for each of the parameter's on
        this rank.
        """
        return isinstance(value, torch.Tensor) and not is_scalar(key, value) and value.shape == self.param.shape

    def as_entry(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the parameter's elements here as an entry of a sharded state dict."""
        return value if self.sharded is None else as_shard_tensor(self.sharded, value)

    def load_entry(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return an entry as the optimizer here takes it: its own copy, from a tensor of the whole
        shape or a shard.
        """
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
    """Return the units' sharded parameters by all their names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        unit = getattr(module, "_unit", None)
        for param, names in () if unit is None else named_params(unit, module):
            for name in names:
                found.setdefault(clean_tensor_name(f"{prefix}.{name}" if prefix else name), param)
    return found


def params_by_id(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[int, NamedParam]:
    """Return a model's parameters by their ids, each with its first name; of units, their shards.
    `optimizers`: in whose state dicts they are named.
    """
    found: dict[int, NamedParam] = {}
    of_units = set()
    for name, param in sharded_params_by_fqn(model).items():
        found.setdefault(id(param.shard), NamedParam(name, param.shard, param))
        of_units |= {id(param.shard), id(param.full), id(param.substitute)}
    for name, param in model.named_parameters():
        if id(param) not in of_units:
            found[id(param)] = NamedParam(clean_tensor_name(name), param, None)
    for optimizer in optimizers:
        if isinstance(optimizer, FullParamOptimizer):
            owned = optimizer.full_params
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if id(param) in found:
                    each = owned.get(id(param))  # None: whole on each rank, and so is its state
                    whole = param if each is None else each.full
                    found[id(param)] = NamedParam(found[id(param)].name, whole, None, each)
    return found
