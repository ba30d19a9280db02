"""Averages on the engines: which operation of the communicator takes one, and what the values are
divided by before or after it.

The host engine divides in the pass that sums, and so do the ring and direct algorithms. NCCL's own
average multiplies each rank's values before it sums (ncclDevPreMulSum), and such a sum is never taken
by NVSwitches: for floats NCCL's src/include/device.h (ncclNvlsSupported) has plain sums alone. So
with NCCL the values are summed, and divided after the sum, by the number of ranks in fp32 as
elsewhere. fp16 is divided before, since a sum of it may overflow.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from .bucket import Scaling

__all__ = ["ReductionPlan", "all_reduce_average", "plan_average", "plan_division", "plan_reduction"]

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ReductionPlan(NamedTuple):
    """A reduction over the ranks: `op` of the communicator, and the factors before and after it."""

    op: object = "sum"
    scale_before: float = 1.0
    divisor_before: int = 1
    divisor_after: int = 1
    scale_after: float = 1.0

    def before(self, values: torch.Tensor) -> None:
        """Apply the factors before the reduction, in place."""
        if self.divisor_before != 1:
            values.div_(self.divisor_before)
        if self.scale_before != 1.0:
            values.mul_(self.scale_before)

    def after(self, values: torch.Tensor) -> None:
        """Apply the factors after the reduction, in place."""
        if self.divisor_after != 1:
            values.div_(self.divisor_after)
        if self.scale_after != 1.0:
            values.mul_(self.scale_after)

    @property
    def statistics_factor(self) -> float:
        """What `after` multiplies a sum of squares by."""
        return (self.scale_after / self.divisor_after) ** 2

    @functools.lru_cache(maxsize=256)  # noqa: B019  plans are values
    def fold_after(self) -> tuple[ReductionPlan, float]:
        """Return the plan without the factors after the reduction, and these as one factor for a
        pass that multiplies anyway, where that gives the same bits: where the divisor is a power of
        two. Else the plan as it is, and 1.
        """
        divisor = self.divisor_after
        if divisor & (divisor - 1) or (divisor != 1 and self.scale_after != 1.0):
            return self, 1.0
        return self._replace(divisor_after=1, scale_after=1.0), self.scale_after / divisor

    def fold_into_step(self, dtype: torch.dtype) -> tuple[ReductionPlan, float]:
        """Return the plan without the factors after the reduction, and these as one factor for an
        optimizer's step, which doesn't round the product to the gradients' `dtype`. So only a power
        of two gives the same bits, and not of fp16, whose small values lose bits when they are
        divided. Else the plan as it is, and 1: that pass is over this rank's n-th part alone.
        """
        plan, factor = self.fold_after()
        exact = dtype is not torch.float16 and math.frexp(factor)[0] == 0.5
        return (plan, factor) if exact else (self, 1.0)


def plan_reduction(comm, scaling: Scaling, dtype: torch.dtype, algorithm: str | None = None) -> ReductionPlan:
    """Return how a communicator reduces values of a dtype by an algorithm, with a scaling's factors.

    `algorithm`: as the collective takes it.
    """
    return _plan(comm.size, scaling, dtype, _sums(comm, dtype, algorithm))


@functools.lru_cache(maxsize=256)
def _plan(size: int, scaling: Scaling, dtype: torch.dtype, sums: bool) -> ReductionPlan:
    prescale, divisor, postscale = scaling
    if prescale != 1.0:
        postscale = postscale / divisor if divisor else postscale
        return ReductionPlan(scale_before=prescale, scale_after=postscale) if sums else ReductionPlan(
            prescale, scale_after=postscale
        )  # fmt: skip
    if not divisor:
        return ReductionPlan(scale_after=postscale)
    if divisor == size and not sums:
        return ReductionPlan("avg", scale_after=postscale)
    if sums and dtype is torch.float16:
        return ReductionPlan(divisor_before=divisor, scale_after=postscale)
    if divisor == size:
        return ReductionPlan(divisor_after=divisor, scale_after=postscale)
    return ReductionPlan(scale_after=postscale / divisor)


def plan_average(comm, dtype: torch.dtype) -> ReductionPlan:
    """Return how a communicator averages values of a dtype over its ranks."""
    return plan_reduction(comm, Scaling(divisor=comm.size), dtype)


def plan_division(comm, divisor: float, dtype: torch.dtype, algorithm: str | None = None) -> ReductionPlan:
    """Return how a communicator sums values of a dtype over its ranks and divides the sum by any
    number.

    `algorithm`: as the collective takes it.
    """
    if divisor in (1, comm.size):
        return plan_reduction(comm, Scaling(divisor=0 if divisor == 1 else comm.size), dtype, algorithm)
    if not _sums(comm, dtype, algorithm):
        return ReductionPlan(1.0 / divisor)
    if dtype is torch.float16:
        return ReductionPlan(scale_before=1.0 / divisor)
    return ReductionPlan(scale_after=1.0 / divisor)


def _sums(comm, dtype: torch.dtype, algorithm: str | None) -> bool:
    """Return whether the values are to be summed alone, and divided in another pass."""
    return not comm._on_host and algorithm in (None, "native") and dtype in _SUMMED


def all_reduce_average(comm, values: torch.Tensor) -> None:
    """Average a tensor over a communicator's ranks, in place, as `Communicator.all_reduce` does with
    "avg".
    """
    plan = plan_average(comm, values.dtype)
    plan.before(values)
    comm.all_reduce(values, plan.op)
    plan.after(values)
