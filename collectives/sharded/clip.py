"""clip_grad_norm_ by one norm of sharded parameters of several meshes and of plain ones, which torch's own refuses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgument, InvalidUsage
from ..rendezvous.process_groups import get_communicator
from .ragged_tensor import RaggedTensor, norms_of

__all__ = ["clip_grad_norm_"]

_OP = "clip_grad_norm_"


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False, foreach: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Clip the gradients of parameters by the norm of all of them; return the norm.

    A collective of the ranks of all meshes; blocks on the host engine. A replica counts once. Plain
    parameters count once, as the first rank of the first mesh has their gradients, so that all ranks clip
    by one factor. A mesh of which this rank isn't a part doesn't count.

    Args:
        parameters: Sharded and plain parameters; those without a gradient don't count.
        max_norm: The largest norm that is left as it is.
        norm_type: The norm's order, above 0, or infinity.
        error_if_nonfinite: Raise where the norm is NaN or infinite.
        foreach: As in torch. The norm has the same bits with any value.

    Returns:
        The norm: a plain tensor of no dimensions, the same on all ranks; 0 without gradients.

    Raises:
        InvalidArgument: For an order of 0 or below.
        InvalidUsage: For gradients that are DTensors of torch's own placements, but replicas.
        RuntimeError: With `error_if_nonfinite`, on all ranks.
    """
    order = float(norm_type)
    if not order > 0:
        raise InvalidArgument(f"norm_type must be above 0, not {norm_type!r:.40}", op=_OP)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in parameters if param.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else "cpu")
    total = torch.linalg.vector_norm(torch.stack(_norms(grads, order)), order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    # torch's own DTensors apart: they can't be in one foreach operation with plain tensors.
    is_torchs = [type(param.grad) is DTensor for param in parameters]
    for kind in set(is_torchs):
        members = [param for param, is_one in zip(parameters, is_torchs, strict=True) if is_one is kind]
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


def _norms(grads: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each gradient over all ranks, in the gradients' order, on the first one's device."""
    kinds: dict[tuple, list[int]] = {}
    for index, grad in enumerate(grads):
        if isinstance(grad, RaggedTensor):
            key = grad._spec.mesh, grad.dtype
        elif isinstance(grad, DTensor) and not all(each.is_replicate() for each in grad.placements):
            raise InvalidUsage(
                f"gradients of RaggedTensors are clipped together with plain ones, and one is a DTensor of "
                f"{grad.placements}: call torch.nn.utils.get_total_norm for these and combine the norms",
                op=_OP,
            )
        else:
            key = None, grad.dtype
        kinds.setdefault(key, []).append(index)
    norms: list = [None] * len(grads)
    for (mesh, _), members in kinds.items():
        if mesh is not None:
            found = norms_of([grads[index] for index in members], order)
        else:
            plain = [getattr(grads[index], "_local_tensor", grads[index]) for index in members]
            found = torch.stack([each.to(plain[0].device) for each in torch._foreach_norm(plain, order)])
            found = _of_first_rank(found, next((mesh for mesh, _ in kinds if mesh is not None), None))
        for index, norm in zip(members, found.to(grads[0].device).unbind(), strict=True):
            norms[index] = norm
    return norms


def _of_first_rank(values: torch.Tensor, mesh) -> torch.Tensor:
    """Return the values that the first rank of a mesh has."""
    if mesh is not None:
        for dim in reversed(range(mesh.ndim)):
            if mesh.size(dim) > 1:
                get_communicator(mesh.get_group(dim), values.device).broadcast(values, root=0)
    return values
