"""Norms of gradients that lie in pieces on the ranks, and what makes torch.nn.utils' functions see them.

torch's ``clip_grad_norm_`` and ``get_total_norm`` would give each rank the norm of its own pieces, and each would clip
by another factor. So from the first sharded module on they are a collective where pieces' gradients are among what
they are given: one all-reduce of a number, after which all ranks have the same bits.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.utils.clip_grad as torchs
from torch import nn

from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import is_traceable_wrapper_subclass as is_wrapper
from .scheduler import open_schedulers

__all__ = ["clip_grad_norm_", "global_norm", "patch_clip_grad_norm"]


def global_norm(comm, tensors, norm_type: float, *, foreach: bool | None = None) -> torch.Tensor:
    """Give the norm of all ranks' tensors as if they were one: float64, on the communicator's device. A collective.

    `tensors`: what is this rank's alone, of any floating dtypes and devices; `norm_type`: above 0, or infinity.
    """
    total = _local(tensors, norm_type, comm.device, foreach)
    if comm.size > 1:
        _exchange(comm, total, norm_type)
    return _rooted(total, norm_type)


def _local(tensors, p: float, device, foreach) -> torch.Tensor:
    """Give [the sum of powers, or the largest], float64 of one element."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    kinds: dict[tuple, list] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = []
    for members in kinds.values():
        found = [torch.linalg.vector_norm(each, p) for each in members] if foreach is False else None
        found = torch._foreach_norm(members, p) if found is None else found
        norms.append(torch.stack(found).to(device, torch.float64))
    norms = torch.cat(norms)
    return (norms.max() if math.isinf(p) else norms.pow(p).sum()).reshape(1)


def _exchange(comm, total: torch.Tensor, p: float) -> None:
    if not math.isinf(p):
        comm.all_reduce(total, "sum", algorithm="native")
        return
    # NaN goes beside the largest: engines may lose it there.
    both = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf)[0], total.isnan()[0].double()])
    comm.all_reduce(both, "max", algorithm="native")
    total.copy_(both[0].masked_fill(both[1] != 0, math.nan).reshape(1))


def _rooted(total: torch.Tensor, p: float) -> torch.Tensor:
    if math.isinf(p):
        return total[0]
    return total[0].sqrt() if p == 2 else total[0].pow(1.0 / p)


def owns_shard(unit) -> bool:
    """Tell whether a unit's pieces on this rank count: of what several ranks hold, only one's does."""
    ranks = unit.ranks
    if ranks.shard is None:
        return ranks.world.rank == 0
    return ranks.replicas is None or ranks.replicas.rank == 0


def total_norm(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> torch.Tensor | None:
    """Give torch's ``get_total_norm`` of gradients, over all ranks; None where none is of a piece.

    A gradient that isn't of a piece counts once, as rank 0 has it, so that all ranks clip alike.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    by_scheduler = _sorted(tensors)
    if not by_scheduler:
        return None
    p = float(norm_type)
    if not p > 0:
        raise InvalidArgument(
            f"norm_type must be above 0 for gradients of sharded parameters, not {norm_type!r:.40}",
            op="clip_grad_norm_",
        )
    device, dtype = tensors[0].device, functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    totals = [global_norm(scheduler.comm, mine, p, foreach=foreach).to(device) for scheduler, mine in by_scheduler]
    total = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), p)
    total = total.to(dtype.to_real())
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def _sorted(tensors) -> list[tuple]:
    """Give (order, those of the tensors that count on this rank), for each order whose pieces have some of them."""
    by_grad, by_memory = {}, {}
    for scheduler in open_schedulers():
        for unit in scheduler.units:
            for group in unit.trainable:
                if group.grad is not None and group.grad.numel():
                    by_memory[group.grad.untyped_storage().data_ptr()] = (scheduler, unit)
            for param in unit.params:
                if param.shard.grad is not None:
                    by_grad[id(param.shard.grad)] = (scheduler, unit)
    found: dict[int, tuple] = {}
    others = []
    for tensor in tensors:
        known = by_grad.get(id(tensor))
        # A DTensor, of torch's own FSDP2 say, has no memory: its local part does.
        if known is None and tensor.layout == torch.strided and tensor.numel() and not is_wrapper(tensor):
            known = by_memory.get(tensor.untyped_storage().data_ptr())
        if known is None:
            others.append(tensor)
            continue
        scheduler, unit = known
        members = found.setdefault(id(scheduler), (scheduler, []))[1]
        if owns_shard(unit):
            members.append(tensor)
    rows = list(found.values())
    if rows and rows[0][0].comm.rank == 0:
        rows[0][1].extend(others)
    return rows


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, units, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """Clip the gradients of a module's pieces, and of its parameters that aren't sharded, by their norm; give it.

    A collective: all ranks must call it. Raises `InvalidUsage` where the gradients are gone, since a `HookState` has
    stepped its optimizer inside of the backward, and RuntimeError on all ranks with `error_if_nonfinite`.
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
        return torchs.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    return torch.zeros((), device=params[0].device) if params else torch.tensor(0.0)


@functools.cache
def patch_clip_grad_norm() -> None:
    """Let torch.nn.utils' functions give the norm over all ranks where they are given pieces' gradients."""
    local = torchs._get_total_norm

    def over_ranks(wrapped, tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        if not isinstance(tensors, torch.Tensor):
            tensors = list(tensors)
        found = total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        return wrapped(tensors, norm_type, error_if_nonfinite, foreach) if found is None else found

    # The function object itself changes, so that whoever has imported it by name calls the new one, too.
    names = local.__code__.co_freevars
    if names == ("func",):
        cell = local.__closure__[0]
        cell.cell_contents = functools.wraps(cell.cell_contents)(functools.partial(over_ranks, cell.cell_contents))
    else:
        patched = functools.wraps(local)(torch.no_grad()(functools.partial(over_ranks, local)))
        torchs._get_total_norm = patched
        nn.utils.get_total_norm = patched
