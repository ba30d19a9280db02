"""Gradient statistics: the sum of squares and the number of non-finite values, as a float64 tensor
of two elements.
"""

from __future__ import annotations

import threading

import torch

from ..kernels import Statistics, measure, reduce_n

__all__ = ["add_grad_stats", "add_statistics", "get_statistics", "measure_grads"]

_local = threading.local()


def add_grad_stats(values: torch.Tensor, grad_stats: torch.Tensor) -> None:
    """Add the sum of squares and the number of non-finite values of `values` to `grad_stats`, in
    one pass.
    """
    if values.numel():
        found = get_statistics(values.device)
        reduce_n([values], values, statistics=found)
        add_statistics(found, grad_stats)


def measure_grads(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the [sum of squares, count of non-finite values] of flat gradients on one device, of
    any floating dtypes: float64, by one kernel, which writes to none of them.
    """
    total, found = torch.zeros(2, dtype=torch.float64, device=device), get_statistics(device)
    measure(grads, found)
    add_statistics(found, total)
    return total


def add_statistics(found: Statistics | None, grad_stats) -> None:
    """Add a kernel's `Statistics` to `grad_stats`; None adds nothing."""
    if found is not None:
        grad_stats[0] += found.sum_of_squares[0]
        grad_stats[1] += found.nonfinite[0]


def get_statistics(device: torch.device) -> Statistics:
    """Return the `Statistics` of this thread, device and CUDA stream: kernels of two streams run at
    the same time.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = _local.__dict__.setdefault("statistics", {})
    key = (device, stream)
    if key not in known:
        known[key] = Statistics(device)
    return known[key]
