"""fully_shard: make a module a unit, in place."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Variable

from ..sharded.managed_params import managed_parameters
from .unit import Unit


class Root:
    def __init__(self):
        self.task = None
        self.pending = []


_root = Root()


def fully_shard(module: nn.Module, *, mesh, reshard_after_forward: bool = True, block: int = 1, **options) -> nn.Module:
    found = managed_parameters(module, (), stop=lambda each: hasattr(each, "_ragged_unit"))
    unit = Unit(found, mesh, block=block, **options)
    unit.reshard_after_forward = reshard_after_forward
    module._ragged_unit = unit
    module.register_forward_pre_hook(lambda module, args, kwargs: _pre_forward(unit, args, kwargs), with_kwargs=True, prepend=True)
    module.register_forward_hook(lambda module, args, output: _post_forward(unit, output))
    return module


class _PostBackward(torch.autograd.Function):
    """An identity of the unit's inputs; its backward comes when their gradients are there."""

    @staticmethod
    def forward(ctx, unit, *inputs):
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx, *grads):
        _post_backward(ctx.unit)
        return None, *grads


def _pre_forward(unit, args, kwargs):
    unit.unshard()
    if torch.is_grad_enabled():
        at = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]
        if at:
            made = _PostBackward.apply(unit, *[args[index] for index in at])
            args = list(args)
            for index, tensor in zip(at, made, strict=True):
                args[index] = tensor
            args = tuple(args)
    return args, kwargs


def _post_forward(unit, output):
    if unit.reshard_after_forward or not torch.is_grad_enabled():
        unit.reshard()
    if torch.is_grad_enabled():
        for each in output if isinstance(output, tuple) else (output,):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.grad_fn
                each.register_hook(lambda grad: _pre_backward(unit))
    return output


def _pre_backward(unit):
    unit.unshard()
    if _root.task is None:
        _root.task = 1
        Variable._execution_engine.queue_callback(_end_backward)
    if unit not in _root.pending:
        _root.pending.append(unit)


def _post_backward(unit):
    if unit in _root.pending:
        _root.pending.remove(unit)
        unit.reshard()
        unit.reduce()


def _end_backward():
    _root.task = None
    for unit in list(_root.pending):
        _post_backward(unit)
