"""Norm of the reduced gradient over all buckets and ranks, and the coefficient that clips by it."""

from __future__ import annotations

import math

import torch

__all__ = ["clip_coefficient", "norm_by_parameter", "norm_of_shards"]


def clip_coefficient(norm, max_norm: float):
    """Return min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` clips.

    `norm`: a float on the host, where the result is a float, and NaN for NaN; a tensor on CUDA,
    where it is a tensor.
    """
    coefficient = max_norm / (norm + 1e-6)
    if isinstance(coefficient, torch.Tensor):
        return coefficient.clamp(max=1.0)
    return min(1.0, coefficient) if not math.isnan(coefficient) else math.nan


def norm_by_parameter(buckets) -> torch.Tensor:
    """Return the 2-norm of reduced buckets, with bits that depend on the gradients alone; fp64.

    They don't depend on where buckets and the engine's chunks begin. Every rank makes a pass over
    all gradients, and adds up the parameters' squares exactly (on the host).
    """
    squares = []
    for bucket in buckets:
        ends = [*bucket.offsets[1:], bucket.flat.numel()]
        for begin, end in zip(bucket.offsets, ends, strict=True):
            squares.append(torch.linalg.vector_norm(bucket.flat[begin:end], dtype=torch.float64).square())
    squares = torch.stack(squares)
    if squares.is_cuda or not squares.isfinite().all():
        return squares.sum().sqrt()
    return torch.tensor(math.fsum(squares.tolist()), dtype=torch.float64).sqrt()


def norm_of_shards(comm, shards: list[torch.Tensor], p: float) -> torch.Tensor:
    """Return the p-norm of all ranks' shards as if they were one tensor; fp64. A collective."""
    norms = [torch.linalg.vector_norm(shard, p, dtype=torch.float64) for shard in shards if shard.numel()]
    found = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=comm.device)
    if p == math.inf:
        found = found.max().reshape(1)
        comm.all_reduce(found, "max", algorithm="native")
        return found[0]
    found = found.pow(p).sum().reshape(1)
    comm.all_reduce(found, "sum", algorithm="native")
    return found[0].pow(1.0 / p)
