"""The forward and backward hooks of a unit's modules."""

from __future__ import annotations

import torch
from torch import nn

from ..torch_compat import is_transformed, untraced
from .precision import cast_floating, find_tensors, map_tensors
from .unit import Unit

__all__ = ["run_forward"]


@untraced(recursive=False)
def run_forward(module: nn.Module, forward, args: tuple, kwargs: dict):
    """Call a module's forward with its unit gathered, and prepare the unit's backward."""
    unit = module._sharded_unit
    scheduler, policy = unit.scheduler, unit.mp_policy
    try:
        scheduler.begin_forward(unit, module)
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        is_plain = not is_transformed()
        if is_plain and torch.is_grad_enabled():
            args, kwargs = _watch_inputs(unit, args, kwargs)
        output = forward(*args, **kwargs)
        if is_plain:
            output = _copy_parameters(unit, output)
        if policy.output_dtype is not None:
            output = cast_floating(output, policy.output_dtype)
        if torch.is_grad_enabled() and not (is_plain and _watch_outputs(unit, output)):
            _watch_parameters(unit)
        is_last = scheduler.is_recomputing or unit.leave(module)
        if not scheduler.is_recomputing:
            unit.check_not_written()
    except BaseException:
        scheduler.abort_forward()
        raise
    scheduler.end_forward(unit, is_last=is_last)
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
    if not inputs:
        unit.is_open_ended = True
        return args, kwargs
    watched = _PostBackward.apply(unit, *inputs)
    unit.add_node(watched[0].grad_fn)
    replaced = {id(old): new for old, new in zip(inputs, watched, strict=True)}
    return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), (args, kwargs))


def _watch_outputs(unit: Unit, output) -> bool:
    """Gather the unit again when the first gradient of an output is there; return whether any can come."""

    versions = unit.versions

    def gather(_grad):
        unit.scheduler.pre_backward(unit, versions)

    outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
    for tensor in outputs:
        tensor.grad_fn  # noqa: B018  (torch makes the node of a view that was changed through another one only here)
        tensor.register_hook(gather)
    return bool(outputs)


def _watch_parameters(unit: Unit) -> None:
    """Keep a unit gathered until the end of a backward, which gradients of its parameters announce.

    It is for outputs without hooks that the backward calls: those of torch.func's transforms, and
    objects of classes in which no tensors are looked for.
    """
    if not unit.requires_grad:
        return
    unit.stays_gathered = True

    def note(_param):
        unit.scheduler.note_backward(unit)

    for param in unit.params:
        if param.full.requires_grad and not param.full._post_accumulate_grad_hooks:
            param.full.register_post_accumulate_grad_hook(note)


def _copy_parameters(unit: Unit, output):
    """Return the output with copies of tensors that view the gathered parameters, which the reshard frees."""
    if not unit.frees_memory:
        return output
    storages = unit.gathered_storages()

    def separate(tensor):
        return tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor

    return map_tensors(separate, output)
