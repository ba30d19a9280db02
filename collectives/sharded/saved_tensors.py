"""Saved-tensor hooks that let a unit be resharded between its forward and its backward.

Autograd saves views of gathered parameters (a transposed weight, say), each of which would keep the
gathered buffer until the backward. FSDP2 empties the buffer's storage instead, and fills it again
for the backward, with no hooks. That can't be done here:

- A view that a user keeps has the forward's values for as long as it lives. Nothing tells such a
  view from those that autograd has saved, since all of them count as users of one storage. To read
  a view of an emptied storage ends the process, or gives what lies at a wrong address: torch checks
  the address in few operations, and by an error message of ours only in builds with CUDA.
- Gathered buffers on the host are the engine's memory. ``resize_`` can't free or restore a storage
  of such memory, and a storage of malloc's takes a staging copy and new pages in each all-gather.
  ``UntypedStorage._swap_data_ptr_`` could exchange its memory, in torch 2.13 but not in 2.8.
"""

from __future__ import annotations

import contextlib

import torch

from ..errors import InvalidUsage
from ..torch_compat import TensorBase, top_saved_tensors_hooks
from .param_group import ParamGroup
from .unit import Unit

__all__ = ["Buffer", "look_up_saved_params", "saved_buffers", "saves_tensors"]

_data_ptr = TensorBase.data_ptr


# The first address of a group's gathered buffer, the one after its last, the group, and its unit.
Buffer = tuple[int, int, ParamGroup, Unit]


def saved_buffers(unit: Unit) -> list[Buffer]:
    """Return a unit's gathered buffers, without those of full parameters that are memory that stays."""
    buffers = []
    for group in unit.groups:
        if group.gathered is not None and not group.shares_memory:
            begin = group.gathered.data_ptr()
            buffers.append((begin, begin + group.gathered.nbytes, group, unit))
    return buffers


def saves_tensors() -> bool:
    """Whether autograd's hooks must get every tensor: under torch's checkpointing, whose hooks keep
    nothing.
    """
    outer = top_saved_tensors_hooks()
    return outer is not None and outer[0].__module__ == "torch.utils.checkpoint"


def look_up_saved_params(buffers: list[Buffer]) -> contextlib.AbstractContextManager:
    """Return a context inside which autograd saves references to gathered parameters, not the
    parameters.

    A tensor that autograd saves and that views one of `buffers`, to which others may be added, is
    replaced by its place in it. When the backward needs it, its unit is gathered again, and the
    tensor is looked up there. Other tensors go to the hooks that were active before.
    """
    outer = top_saved_tensors_hooks()

    # Both run for every tensor that autograd saves: no function of Python's is called where it can
    # be left out.

    def save(tensor):
        try:
            at = _data_ptr(tensor) or tensor.untyped_storage().data_ptr()  # its storage's, if it has no elements
        except (NotImplementedError, RuntimeError):  # sparse ones, and others that have none
            at = 0
        for begin, end, group, unit in buffers:
            if begin <= at < end:
                form = tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
                return _Saved((group, unit, group.steps, at - begin, *form))
        return tensor if outer is None else outer[0](tensor)

    def load(saved):
        if type(saved) is not _Saved:
            return saved if outer is None else outer[1](saved)
        group, unit, steps, offset, dtype, size, stride, is_conj, is_neg = saved
        if steps != group.steps:
            raise InvalidUsage(
                f"{unit!r} was stepped by an optimizer between a forward and its backward, which needs the "
                "parameters that the forward has used: call backward() before optimizer.step()"
            )
        unit.scheduler.unshard_for_backward(unit)
        flat = group.gathered
        flat = flat if flat.dtype is dtype else flat.view(dtype)
        tensor = flat.as_strided(size, stride, flat.storage_offset() + offset // dtype.itemsize)
        if is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if is_neg else tensor

    return torch.autograd.graph.saved_tensors_hooks(save, load)


class _Saved(tuple):
    """A tensor that autograd saved: a group, its unit, the group's count of optimizer steps, the
    tensor's place in its gathered buffer in bytes, and the tensor's form.
    """

    __slots__ = ()
