"""Hooks around a unit's forward, and the autograd hooks that run its backward."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from typing import Any

import torch
from torch import nn

from ..torch_compat import current_graph_task_id, tree_flatten, tree_map, untraced
from .module_changes import check_not_written, param_versions
from .param_reads import ForwardReads
from .saved_tensors import look_up_saved_params, saved_buffers, saves_tensors
from .scheduler import Scheduler
from .unit import Unit

__all__ = ["register_grad_hooks", "run_forward"]


@untraced(recursive=False)
def run_forward(module: nn.Module, forward, args: tuple, kwargs: dict) -> Any:
    """Call a sharded module's forward with its unit unsharded, and register the hooks of its
    backward.
    """
    unit = module._unit
    scheduler, group = unit.scheduler, unit.module_group
    in_backward = current_graph_task_id() != -1  # activation checkpointing recomputes a forward
    is_first = group is None or in_backward or group.enter(module)
    scheduler.enter_forward(unit, in_backward)
    try:
        policy = unit.mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        scheduler.pre_forward(unit, in_backward, prefetch=is_first)
        registers_hook = torch.is_grad_enabled() and (not in_backward or not unit.pending_backwards)
        if registers_hook:
            _register_post_backward_hook(unit, scheduler, (args, kwargs))
        saves = torch.is_grad_enabled() and not in_backward and not saves_tensors()
        # Also without buffers of its own, since what it reads of units inside is looked up, too. Torch's check of
        # in-place changes leaves out what hooks save, so there are none where no memory is freed.
        buffers = saved_buffers(unit) if saves and unit.gathers else []
        if not saves or not (buffers or scheduler.planner.frees_inside(unit)):
            buffers = None
        with (
            contextlib.nullcontext() if buffers is None else look_up_saved_params(buffers),
            ForwardReads(unit, in_backward, saves, buffers),
        ):
            before = param_versions(unit) if unit.gathers and not in_backward else []
            output = forward(*args, **kwargs)
        if before:
            check_not_written(unit, before)
        is_last = not in_backward and (group is None or group.leave(module))
        if is_last and scheduler.reshards_after_forward(unit):
            unit.reshard(post_forward=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            _register_pre_backward_hook(unit, scheduler, output)
        if policy.output_dtype is not None:
            output = _cast(output, policy.output_dtype)
    except BaseException as error:
        scheduler.abort_forward(error, in_backward)
        raise
    scheduler.post_forward(unit, in_backward)
    return output


def _cast(tree, dtype: torch.dtype):
    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return _map(cast, tree)


def _map(function, tree):
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: _map(function, getattr(tree, field.name)) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **{name: value for name, value in fields.items() if value is not None})
    return tree_map(function, tree)


def _tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) is tuple:
        return [leaf for each in tree for leaf in _tensors(each)]
    leaves = []
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return leaves


def _register_pre_backward_hook(unit: Unit, scheduler: Scheduler, output) -> None:
    """Register the pre-backward hook: the first gradient of an output unshards the unit."""

    def pre_backward_hook(_grad):
        scheduler.pre_backward(unit)

    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(pre_backward_hook)


def _register_post_backward_hook(unit: Unit, scheduler: Scheduler, inputs) -> None:
    """Register the hook that ends a unit's backward: when its inputs have gradients, so do its
    parameters.
    """

    def post_backward_hook(_grad):
        if scheduler.graph_task is not None and unit.pending_backwards:
            unit.pending_backwards -= 1
            if not unit.pending_backwards:
                if unit.reduce_grads and unit.gradients.has_gradients():
                    scheduler.post_backward(unit)
                else:
                    scheduler.reshard_in_backward(unit)

    tensors = [tensor for tensor in _tensors(inputs) if tensor.requires_grad and not tensor.is_leaf]
    unit.pending_backwards += 1  # a forward without such inputs never reports its end, so nothing ends too early
    if len(tensors) == 1:
        tensors[0].register_hook(post_backward_hook)
    elif tensors:
        # Torch's hook and its nodes hold each other, and so the graph below: without remove() only
        # gc frees it.
        handle = torch.autograd.graph.register_multi_grad_hook(
            tensors, lambda _grads: (handle.remove(), post_backward_hook(None))
        )


def register_grad_hooks(unit: Unit, scheduler: Scheduler) -> None:
    """Register the hooks that reduce a unit when its last expected gradient was computed."""
    here = weakref.ref(unit)

    def post_accumulate_hook(at, _param):  # holds no parameter: gc doesn't see what autograd's hooks hold
        unit = here()
        param = unit.params[at]
        scheduler.begin_backward()
        if unit.gradients.record_grad(param):
            scheduler.post_backward(unit)

    numbers = {id(param): at for at, param in enumerate(unit.params)}

    def register_hook(param):
        if not param.has_grad_hook:
            param.has_grad_hook = True
            at = numbers[id(param)]
            param.full.register_post_accumulate_grad_hook(functools.partial(post_accumulate_hook, at))

    for param in unit.params:
        if param.requires_grad:
            register_hook(param)
    unit.register_grad_hook = register_hook
