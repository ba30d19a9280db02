"""The forward and backward hooks of a unit's modules."""

from __future__ import annotations

import torch
from torch import nn

from .precision import cast_floating, find_tensors, map_tensors
from .state import prepare_load
from .unit import Unit

__all__ = ["run_forward"]


def run_forward(unit: Unit, forward, args: tuple, kwargs: dict):
    """Call a module's forward with its unit gathered, and prepare the unit's backward."""
    scheduler, policy = unit.scheduler, unit.mp_policy
    scheduler.begin_forward(unit)
    try:
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        if torch.is_grad_enabled():
            args, kwargs = _watch_inputs(unit, args, kwargs)
        output = forward(*args, **kwargs)
        output = _detach_from_buffer(unit, output)
        if policy.output_dtype is not None:
            output = cast_floating(output, policy.output_dtype)
        if torch.is_grad_enabled():
            _watch_outputs(unit, output)
    except BaseException:
        scheduler.abort_forward()
        raise
    scheduler.end_forward(unit)
    return output


class _PostBackward(torch.autograd.Function):
    """An identity of a unit's inputs, whose backward runs when the gradients of all of them are there.

    The engine runs the nodes of a unit's parameters before it, since they are of later operations.
    """

    @staticmethod
    def forward(ctx, unit, *inputs):
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx, *grads):
        ctx.unit.scheduler.post_backward(ctx.unit)
        return None, *grads


def _watch_inputs(unit: Unit, args, kwargs):
    """Pass the inputs that want gradients through one node of autograd's graph."""
    inputs = [tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad]
    if not inputs or not unit.requires_grad:
        return args, kwargs
    watched = _PostBackward.apply(unit, *inputs)
    unit.add_node(watched[0].grad_fn)
    replaced = {id(old): new for old, new in zip(inputs, watched, strict=True)}
    return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), (args, kwargs))


def _watch_outputs(unit: Unit, output) -> None:
    """Gather the unit again when the first gradient of an output is there."""

    def gather(_grad):
        unit.scheduler.pre_backward(unit)

    for tensor in find_tensors(output):
        if tensor.requires_grad:
            tensor.grad_fn  # noqa: B018  (torch makes the node of a view that was changed through another one only here)
            tensor.register_hook(gather)


def _detach_from_buffer(unit: Unit, output):
    """Return the output with copies of tensors that view the gathered parameters, which the reshard frees."""
    if not unit.frees_memory:
        return output
    storages = unit.gathered_storages()

    def separate(tensor):
        return tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor

    return map_tensors(separate, output)


class ShardedModule(nn.Module):
    """The class that `fully_shard` adds to a module's own."""

    def __call__(self, *args, **kwargs):
        return run_forward(self._unit, super().__call__, args, kwargs)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        prepare_load(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
