"""Saved-tensor hooks that let a unit be resharded between its forward and its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ..errors import InvalidUsage
from ..torch_compat import top_saved_tensors_hooks
from .unit import Unit

__all__ = ["look_up_saved_params"]


@contextlib.contextmanager
def look_up_saved_params(unit: Unit, unshard: Callable[[], None]):
    """Save references to gathered parameters for the backward, not the parameters, inside the
    block.

    A tensor that autograd saves and that views the unit's gathered buffer is replaced by its place
    in that buffer. When the backward needs it, `unshard()` gathers the unit again, and the tensor
    is looked up there. Other tensors go to the hooks that were active before. Under torch's
    checkpointing, whose hooks keep nothing and must get every tensor, this does nothing.
    """
    outer = top_saved_tensors_hooks()
    if outer is not None and outer[0].__module__ == "torch.utils.checkpoint":
        yield
        return
    here = {}
    for group in unit.groups:
        if group.gathered is not None:
            here[group.gathered.untyped_storage().data_ptr()] = group

    def save(tensor):
        group = here.get(_storage_address(tensor))
        if group is None:
            return tensor if outer is None else outer[0](tensor)
        base = group.gathered.storage_offset() * group.gathered.element_size()
        offset = tensor.storage_offset() - base // tensor.element_size()
        return _Saved(group, group.steps, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def load(saved):
        if type(saved) is not _Saved:
            return saved if outer is None else outer[1](saved)
        if saved.steps != saved.group.steps:
            raise InvalidUsage(
                f"{unit!r} was stepped by an optimizer between a forward and its backward, which needs the "
                "parameters that the forward has used: call backward() before optimizer.step()"
            )
        unshard()
        flat = saved.group.gathered
        flat = flat if flat.dtype == saved.dtype else flat.view(saved.dtype)
        return flat.as_strided(saved.size, saved.stride, flat.storage_offset() + saved.offset)

    with torch.autograd.graph.saved_tensors_hooks(save, load):
        yield


class _Saved:
    """A tensor that autograd saved: its place in a group's gathered buffer."""

    __slots__ = ("dtype", "group", "offset", "size", "steps", "stride")

    def __init__(self, group, steps, dtype, size, stride, offset):
        self.group = group
        self.steps = steps
        self.dtype = dtype
        self.size = size
        self.stride = stride
        self.offset = offset


def _storage_address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones, and others that have none
        return 0
