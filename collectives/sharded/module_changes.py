"""Changes that users make to a module after it is sharded: requires_grad, hooks of parameters, new
parameters, other memory.

A parameter has two forms. Users hold the shard, and autograd the full one: what is set on one must
be set on the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import TensorBase
from .managed_params import managed_parameters
from .module_group import members_of

__all__ = [
    "AddedParamCheck", "ReplacedShardCheck", "check_not_written", "copy_hooks", "managed_modules", "param_versions",
    "sync_attributes",
]  # fmt: skip

_data_ptr, _numel = TensorBase.data_ptr, TensorBase.numel


def copy_hooks(param, original: nn.Parameter) -> None:
    """Copy the hooks of an original parameter to its two forms.

    Gradient hooks go on the full form, as under DDP: they get this rank's gradient before it is
    reduced. Post-accumulate hooks go on the shard, where the scheduler calls them.
    """
    if original._backward_hooks:
        param.full._backward_hooks = param.shard._backward_hooks = original._backward_hooks
    if original._post_accumulate_grad_hooks:
        param.shard._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks


def sync_attributes(unit) -> None:
    """Copy what was set on one form of a parameter since the last forward to the other. A local
    call.

    Raises `InvalidUsage` where requires_grad was changed in a unit with a HookState.
    """
    changed = False
    for group in unit.groups:
        for param in group.params:
            shard, full = param.shard, param.full
            if full._backward_hooks is not shard._backward_hooks:
                if full._backward_hooks is None:
                    full._backward_hooks = shard._backward_hooks  # one dictionary, so that a handle removes from both
                elif shard._backward_hooks is None:
                    shard._backward_hooks = full._backward_hooks
            if shard.requires_grad is full.requires_grad is param.requires_grad:
                continue
            if unit.reducer is not None:
                raise InvalidUsage(
                    f"{param.name}.requires_grad was changed after it was sharded with a HookState, whose wires and "
                    "optimizer are made for what it was: set it before fully_shard"
                )
            changed = True
            param.requires_grad = not param.requires_grad
            shard.requires_grad_(param.requires_grad)
            full.requires_grad_(param.requires_grad)
            param.expects_grad = param.requires_grad
            if param.requires_grad:
                group.requires_grad = True  # for good: a group without gradients on any rank isn't reduced
                unit.register_grad_hook(param)
    if changed:
        unit.gradients.update_trainable()


class AddedParamCheck:
    """Finds trainable parameters that were added to a unit's modules after they were sharded."""

    def __init__(self, module: nn.Module, ignored):
        self._roots = [weakref.ref(each) for each in members_of(module)]
        self._ignored = {id(param) for param in ignored}
        self._record()

    def _record(self) -> None:
        self._modules = [weakref.ref(each) for root in self._roots for each in managed_modules(root())]
        self._held_before = list(map(_held, self._modules))

    def check(self, params) -> None:
        """Raise `InvalidUsage`, by name, for a trainable parameter that no unit has: no rank would
        reduce it.
        """
        if list(map(_held, self._modules)) == self._held_before:
            return
        known = self._ignored | {id(form) for param in params for form in (param.shard, param.full)}
        for root in self._roots:
            for names, _, param in managed_parameters(root(), stop=lambda each: hasattr(each, "_unit")):
                if param.requires_grad and id(param) not in known:
                    raise InvalidUsage(
                        f"{names[0]} of this {type(root()).__name__} was added after it was sharded, so that each rank "
                        "would train its own: change modules before fully_shard, or shard the new module, too"
                    )
        self._record()


class ReplacedShardCheck:
    """Finds shards of a group that were given other memory, as by ``param.data = ...``.

    `dtype`, `store`: those of the group's shards.
    """

    def __init__(self, params, dtype: torch.dtype, store: torch.device):
        self._params = params
        self._dtype = dtype
        self._store = store
        self.record()

    def record(self) -> None:
        """Record the addresses and sizes of the shards as they are now."""
        self._addresses = [param.shard.data_ptr() for param in self._params]
        self._counts = [param.shard.numel() for param in self._params]

    def check(self, shards: list[nn.Parameter]) -> bool:
        """Return whether shards were given other memory of the same size since `record`.

        Raises `InvalidArgument`, with the parameter's name, for another size, dtype or device.
        """
        if list(map(_data_ptr, shards)) == self._addresses and list(map(_numel, shards)) == self._counts:
            return False
        for param, count in zip(self._params, self._counts, strict=True):
            data = param.shard.data
            if data.numel() != count:
                raise InvalidArgument(
                    f"{param.name} was resized after it was sharded: this rank's piece has {data.numel()} elements "
                    f"and had {count}; change modules before fully_shard, or values only"
                )
            if data.dtype != self._dtype:
                raise InvalidArgument(
                    f"{param.name} was made {data.dtype} after it was sharded as {self._dtype}: convert the module "
                    "before fully_shard, or compute in another dtype by mp_policy"
                )
            if count and data.device.type not in (self._store.type, "meta"):
                raise InvalidArgument(
                    f"{param.name} was moved to {data.device} after it was sharded on {self._store}: move the module "
                    "before fully_shard"
                )
        return True


def managed_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside that are no units."""
    yield module
    for child in module.children():
        if not hasattr(child, "_unit"):
            yield from managed_modules(child)


def _held(reference) -> tuple | None:
    module = reference()
    if module is None:
        return None
    there = sum(param is not None for param in module._parameters.values())
    return there, *map(id, module._modules.values())


def param_versions(unit) -> list[int]:
    """Return the version counters of a unit's full parameters, for `check_not_written`."""
    return [param.full._version for param in unit.params]


def check_not_written(unit, before: list[int]) -> None:
    """Raise `InvalidUsage`, by name, where a forward has written to a gathered parameter: the write
    would be lost.
    """
    for param, version in zip(unit.params, before, strict=True):
        if param.full._version != version:
            raise InvalidUsage(
                f"the forward has written to {param.name} in place, and only its piece is kept: leave out what does "
                "that (an Embedding's max_norm), or give the parameter to ignored_params"
            )
