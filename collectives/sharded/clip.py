"""Norms of gradients that are sharded over the ranks, and the patch that gives them to
torch.nn.utils' functions.

torch's ``clip_grad_norm_`` and ``get_total_norm`` would return the norm of each rank's own shards,
and each rank would clip by another factor. From the first sharded module on they are collectives
where they are called with shards' gradients: one all-reduce of a number, after which all ranks have
the same bits.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.utils.clip_grad as torch_clip
from torch import nn

from ..errors import InvalidArgument, InvalidUsage
from ..gradients.grad_norm import norm_over_ranks
from ..torch_compat import is_traceable_wrapper_subclass as is_wrapper
from ..torch_patches import patch_total_norm
from .scheduler import open_schedulers

__all__ = ["clip_grad_norm_", "patch_clip_grad_norm"]


def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> torch.Tensor | None:
    """Return what torch's ``get_total_norm`` returns, over all ranks; None where no gradient is of
    a shard.

    A gradient that isn't of a shard counts once, as rank 0 has it, so that all ranks clip by the
    same factor.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    by_scheduler = _group_by_scheduler(tensors)
    if not by_scheduler:
        return None
    p = float(norm_type)
    if not p > 0:
        raise InvalidArgument(
            f"norm_type must be above 0 for gradients of sharded parameters, not {norm_type!r:.40}",
            op="clip_grad_norm_",
        )
    device, dtype = tensors[0].device, functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    totals = [norm_over_ranks(scheduler.comm, mine, p, foreach=foreach).to(device) for scheduler, mine in by_scheduler]
    total = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), p)
    total = total.to(dtype.to_real())
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def _group_by_scheduler(tensors) -> list[tuple]:
    """Return (scheduler, tensors that count on this rank) for each scheduler whose shards have some
    of the tensors.
    """
    by_grad, by_memory = {}, {}
    for scheduler in open_schedulers():
        for unit in scheduler.units:
            for group in unit.gradients.trainable:
                if group.gradients.flat is not None and group.gradients.flat.numel():
                    by_memory[group.gradients.flat.untyped_storage().data_ptr()] = (scheduler, unit)
            for param in unit.params:
                if param.shard.grad is not None:
                    by_grad[id(param.shard.grad)] = (scheduler, unit)
    found: dict[int, tuple] = {}
    others = []
    for tensor in tensors:
        known = by_grad.get(id(tensor))
        # A DTensor, as torch's FSDP2 has them, has no storage; its local tensor does.
        if known is None and tensor.layout == torch.strided and tensor.numel() and not is_wrapper(tensor):
            known = by_memory.get(tensor.untyped_storage().data_ptr())
        if known is None:
            others.append(tensor)
            continue
        scheduler, unit = known
        members = found.setdefault(id(scheduler), (scheduler, []))[1]
        if unit.ranks.is_first_replica:
            members.append(tensor)
    rows = list(found.values())
    if rows and rows[0][0].comm.rank == 0:
        rows[0][1].extend(others)
    return rows


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, units, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """Clip the gradients of a module's shards, and of its parameters that aren't sharded, by their
    norm; return the norm.

    A collective: all ranks must call it. Raises `InvalidUsage` where a `HookState` has stepped its
    optimizer inside the backward, which frees the gradients, and RuntimeError on all ranks with
    `error_if_nonfinite`.
    """
    for unit in units:
        if unit.reducer is not None and unit.reducer.steps:
            raise InvalidUsage(
                "this module's optimizer is stepped inside of the backward, which lets the gradients go: clip by the "
                "HookState's max_norm",
                op="clip_grad_norm_",
            )
    forms = {id(form) for unit in units for param in unit.params for form in (param.shard, param.full)}
    params = [param.shard for unit in units for param in unit.params]
    params += [param for param in module.parameters() if id(param) not in forms]
    if any(param.grad is not None for param in params):
        return torch_clip.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    return torch.zeros((), device=params[0].device) if params else torch.tensor(0.0, device="cpu")


@functools.cache
def patch_clip_grad_norm() -> None:
    """Patch torch.nn.utils' functions to return the norm over all ranks for shards' gradients."""
    patch_total_norm(total_norm)
