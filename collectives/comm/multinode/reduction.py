"""What is done to a reduction's arrays before and after it goes over nodes, by the fused kernels."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from ..._nccl import DTYPES, OPS
from ...kernels import abi
from ...kernels.execution import Statistics, run_on_host
from ...kernels.reduction import kernel_of
from ...layout import TILE
from ..algorithms.plan import round_to_dtype

__all__ = ["ReduceSpec", "add_stats", "widen"]

_F32 = DTYPES["float32"]
_SUM = OPS["sum"]


class ReduceSpec(NamedTuple):
    """The dtype and op of a reduction, as NCCL's codes.

    ``scalar``: the factor of a premultiplied sum; op is sum then.
    """

    dtype: int
    op: int
    scalar: float | int | None = None


def widen(source: int, out: int, count: int, spec: ReduceSpec) -> None:
    """Convert ``count`` elements to fp32, times the factor of a premultiplied sum."""
    factor = 1.0 if spec.scalar is None else round_to_dtype(spec.scalar, spec.dtype)
    _run_kernel(source, out, count, spec.dtype, _F32, factor)


def add_stats(address: int, count: int, dtype: int, stats_out: int) -> None:
    """Add the sum of squares and the count of non-finite elements to two doubles.

    ``stats_out``: address of the doubles.
    """
    found = Statistics()
    # In place: the elements stay as they are.
    if _run_kernel(address, address, count, dtype, dtype, statistics=found):
        sums = (ctypes.c_double * 2).from_address(stats_out)
        sums[0] += found.sum_of_squares.item()
        sums[1] += found.nonfinite.item()


def _run_kernel(
    source: int, out: int, count: int, dtype: int, out_dtype: int, scale: float = 1.0,
    statistics: Statistics | None = None,
) -> bool:  # fmt: skip
    """Scale and cast an array. Return whether there was anything to do."""
    if not count:
        return False
    table = (ctypes.c_uint64 * 1)(source)
    args = abi.ReduceArgs(
        abi.Work(-(-count // TILE), 0, 0), ctypes.addressof(table), 1, out, count, 0, scale, _SUM, dtype, out_dtype, 0
    )
    if statistics is not None:
        statistics.begin(args.work, statistics.device, "share")
    run_on_host(kernel_of(dtype, out_dtype), args)
    if statistics is not None:
        statistics.finish(args.work.tiles)
    return True
