"""Lists of tensors as the one array that a communicator takes, and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from ..errors import InvalidArgument
from ..gradients.parameter_views import find_in_place
from ..torch_compat import AsyncCollectiveTensor

__all__ = ["as_dense", "flat_view", "gather_buffer", "join", "run_all", "single", "store_back"]


def single(tensors, name: str, rank: int) -> torch.Tensor:
    """Return the tensor of an argument that torch passes as a list of one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgument(f"takes one tensor for each rank, not {len(tensors)}", op=name, rank=rank)
    return tensors[0]


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is contiguous memory with no pending conjugation, else a copy.

    Of the result of a functional collective, such as tensor parallelism's, it waits for the tensor inside.
    """
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"takes dense tensors, not {tensor.layout}: of sparse ones only all_reduce takes a sum")
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if tensor.is_complex() and tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous()


def store_back(tensor: torch.Tensor, dense: torch.Tensor) -> Callable[[], None] | None:
    """Return the function that copies a result into the caller's tensor; None where it is there."""
    if dense is tensor:
        return None

    def store():
        with torch.no_grad():
            tensor.copy_(dense)

    return store


def run_all(functions: Iterable[Callable[[], None] | None]) -> Callable[[], None] | None:
    """Return one function that calls those which aren't None; None where there are none."""
    functions = [each for each in functions if each is not None]
    if not functions:
        return None

    def run():
        for each in functions:
            each()

    return run


def flat_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat tensor over tensors that lie one behind the other, such as ``chunk``'s, or None."""
    if any(each.dtype != tensors[0].dtype or not each.is_contiguous() for each in tensors):
        return None
    *offsets, total = itertools.accumulate((each.numel() for each in tensors), initial=0)
    return find_in_place(tensors, offsets, total)


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors in one flat tensor, in place if they lie so already."""
    flat = flat_view(tensors)
    return torch.cat([as_dense(each).detach().reshape(-1) for each in tensors]) if flat is None else flat


def gather_buffer(outs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Return a flat tensor for the contents of equal `outs`, and the function that stores them there.

    The function is None where the flat tensor is a view of them.
    """
    flat = flat_view(outs)
    if flat is not None:
        return flat, None
    flat = outs[0].new_empty(sum(each.numel() for each in outs))

    def store():
        with torch.no_grad():
            parts = flat.split([each.numel() for each in outs])
            torch._foreach_copy_(list(outs), [part.view(each.shape) for part, each in zip(parts, outs, strict=True)])

    return flat, store
