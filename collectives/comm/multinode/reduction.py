"""Reductions over nodes in host memory, in node order, by the fused kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE, TORCH_CODES
from ...kernels import abi
from ...kernels.execution import Statistics, run_on_host
from ...kernels.reduction import kernel_of
from ...layout import TILE

__all__ = ["NodeReducer", "PremulSums", "ReduceSpec"]

_F32 = DTYPES["float32"]
_SUM, _AVG = OPS["sum"], OPS["avg"]
_TORCH = {code: dtype for dtype, code in TORCH_CODES.items()}
_FLOATING = {code for code, dtype in _TORCH.items() if dtype.is_floating_point}
_EXACT = (OPS["max"], OPS["min"])  # they round nothing, so 16-bit types need no wider type between nodes
_OP_CODES = tuple(OPS.values())
_FIRST_CREATED_OP = 1 << 20  # op numbers of premultiplied sums
_BLOCK = 1 << 16  # elements of an average over a number of ranks that is no power of two


class ReduceSpec(NamedTuple):
    """The dtype and op of a reduction, as NCCL's codes.

    ``scalar``: the factor of a premultiplied sum; op is sum then.
    """

    dtype: int
    op: int
    scalar: float | int | None = None

    @property
    def needs_float32(self) -> bool:
        """Whether the nodes' sums are exchanged as fp32: narrower types whose op rounds."""
        return self.dtype in _FLOATING and ITEMSIZE[self.dtype] < 4 and self.op not in _EXACT


class PremulSums:
    """The premultiplied sums that a communicator has created, with op numbers of its own."""

    def __init__(self):
        self._scalars: dict[int, float | int] = {}
        self._created = 0

    def create(self, scalar: float | int) -> int:
        """Create a premultiplied sum with this rank's factor. Return its op number."""
        self._created += 1
        self._scalars[_FIRST_CREATED_OP + self._created] = scalar
        return _FIRST_CREATED_OP + self._created

    def destroy(self, op: int) -> None:
        """Free an op of `create`."""
        self._scalars.pop(op, None)

    def find_spec(self, dtype: int, op: int) -> ReduceSpec | None:
        """Return the `ReduceSpec` of an op of NCCL's or of `create`; None for an unknown op."""
        scalar = self._scalars.get(op)
        if scalar is not None:
            return ReduceSpec(dtype, _SUM, scalar)
        return ReduceSpec(dtype, op) if op in _OP_CODES else None


class NodeReducer:
    """Reduces arrays of several nodes, given by address, into one.

    ``size``: the number of ranks, for averages.
    """

    def __init__(self, size: int):
        self._size = size

    def widen(self, source: int, out: int, count: int, spec: ReduceSpec) -> None:
        """Convert ``count`` elements to fp32, times the factor of a premultiplied sum."""
        factor = 1.0 if spec.scalar is None else torch.tensor(spec.scalar, dtype=_TORCH[spec.dtype]).item()
        _run_kernel([source], out, count, spec.dtype, _F32, _SUM, factor)

    def reduce(self, sources: list[int], out: int, count: int, dtype: int, spec: ReduceSpec) -> None:
        """Reduce the nodes' arrays of ``dtype`` in node order; round once to the result's dtype."""
        if not count:
            return
        if spec.op != _AVG:
            op = _SUM if spec.scalar is not None else spec.op
            _run_kernel(sources, out, count, dtype, spec.dtype, op)
            return
        size = self._size
        if dtype in _FLOATING and not size & (size - 1):  # the same bits as the division
            _run_kernel(sources, out, count, dtype, spec.dtype, _SUM, 1.0 / size)
            return
        # The kernel divides by the number of its sources: zeros, which change nothing, make up the
        # number of ranks.
        block = min(count, _BLOCK)
        zeros = torch.full((block,), -0.0 if dtype in _FLOATING else 0, dtype=_TORCH[dtype])
        padding = [zeros.data_ptr()] * (size - len(sources))
        for start in range(0, count, block):
            some = [source + start * ITEMSIZE[dtype] for source in sources]
            dst = out + start * ITEMSIZE[spec.dtype]
            _run_kernel(some + padding, dst, min(block, count - start), dtype, spec.dtype, _AVG)

    def add_stats(self, parts: Iterable[tuple[int, int]], dtype: int, stats_out: int) -> None:
        """Add the sum of squares and the count of non-finite elements to two doubles.

        ``parts``: (address, elements); ``stats_out``: address of the doubles.
        """
        sums = (ctypes.c_double * 2).from_address(stats_out)
        for address, count in parts:
            if not count:
                continue
            found = Statistics()
            table = (ctypes.c_uint64 * 1)(address)
            work = abi.Work(-(-count // TILE), 0, 0)
            args = abi.ReduceArgs(work, ctypes.addressof(table), 1, address, count, 0, 1.0, _SUM, dtype, dtype, 0)
            found.begin(args.work, found.device, "share")
            run_on_host(kernel_of(dtype, dtype), args)  # in place: the elements stay as they are
            found.finish(args.work.tiles)
            sums[0] += found.sum_of_squares.item()
            sums[1] += found.nonfinite.item()


def _run_kernel(
    sources: Sequence[int], out: int, count: int, dtype: int, out_dtype: int, op: int, scale: float = 1.0
) -> None:
    table = (ctypes.c_uint64 * len(sources))(*sources)
    args = abi.ReduceArgs(
        abi.Work(-(-count // TILE), 0, 0), ctypes.addressof(table), len(sources), out, count, 0, scale, op, dtype,
        out_dtype, 0,
    )  # fmt: skip
    if count:
        run_on_host(kernel_of(dtype, out_dtype), args)
