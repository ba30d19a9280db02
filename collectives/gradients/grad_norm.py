"""Norm of the reduced gradient over all buckets and ranks."""

from __future__ import annotations

import math

import torch

__all__ = ["norm_by_parameter", "norm_over_ranks"]


def norm_by_parameter(buckets) -> torch.Tensor:
    """Return the 2-norm of reduced buckets, with bits that depend on the gradients alone; fp64.

    They don't depend on where buckets and the engine's chunks begin. Every rank makes a pass over
    all gradients, and adds up the parameters' squares exactly (on the host).
    """
    parts = [part for bucket in buckets for part in bucket.parts()]
    squares = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts])
    if squares.is_cuda or not squares.isfinite().all():
        return squares.sum().sqrt()
    return torch.tensor(math.fsum(squares.tolist()), dtype=torch.float64, device="cpu").sqrt()


def norm_over_ranks(comm, tensors, p: float, *, foreach: bool | None = None, dtype=None) -> torch.Tensor:
    """Return the p-norm of all ranks' tensors taken as one: fp64, on the communicator's device. A
    collective.

    `tensors`: those that this rank alone has, of any floating dtypes and devices; `p`: above 0, or
    infinity. The tensors' own norms are found in their own dtype, as torch's ``clip_grad_norm_``
    does with that `foreach`, or in `dtype`.
    """
    total = _local_total(tensors, p, comm.device, foreach, dtype)
    if comm.size > 1:
        _all_reduce_total(comm, total, p)
    if math.isinf(p):
        return total[0]
    return total[0].sqrt() if p == 2 else total[0].pow(1.0 / p)


def _local_total(tensors, p: float, device, foreach, dtype) -> torch.Tensor:
    """Return the sum of powers, or the largest value, as a float64 tensor of one element."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    kinds: dict[tuple, list] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = []
    for members in kinds.values():
        if foreach is False or dtype is not None:
            found = [torch.linalg.vector_norm(each, p, dtype=dtype) for each in members]
        else:
            found = torch._foreach_norm(members, p)
        norms.append(torch.stack(found).to(device, torch.float64))
    norms = torch.cat(norms)
    return (norms.max() if math.isinf(p) else norms.pow(p).sum()).reshape(1)


def _all_reduce_total(comm, total: torch.Tensor, p: float) -> None:
    if not math.isinf(p):
        comm.all_reduce(total, "sum")
        return
    # NaN is sent as a second element: engines may lose it in a maximum.
    both = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf)[0], total.isnan()[0].double()])
    comm.all_reduce(both, "max")
    total.copy_(both[0].masked_fill(both[1] != 0, math.nan).reshape(1))
