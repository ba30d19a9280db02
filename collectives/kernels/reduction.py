"""reduce_n: n arrays into one in a single pass, with scale, cast, norm and non-finite count."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy
import torch

from .._nccl import OPS
from ..arrays import DTYPE_NAMES, ITEMSIZE, TORCH_CODES, TORCH_DTYPES, Buffer, Reader, shown
from ..errors import InvalidArgument
from ..layout import TILE
from . import abi
from .dtypes import FLOATING, FP32_OVERFLOW
from .execution import Statistics, bump_versions, check_statistics, run
from .rows import Rows
from .scalars import read_scale
from .tensor_list import TensorList, device_of, read_array

__all__ = ["Sources", "kernel_of", "reduce_n"]

_OP = "reduce_n"  # for the errors
_F64 = TORCH_CODES[torch.float64]
_KERNELS = {
    "float32": abi.REDUCE,
    "bfloat16": abi.REDUCE_BF16,
    "float16": abi.REDUCE_F16,
    "float8_e4m3fn": abi.REDUCE_E4M3,
    "float8_e5m2": abi.REDUCE_E5M2,
    "float64": abi.REDUCE_F64,
    "int8": abi.REDUCE_INT8,
    "uint8": abi.REDUCE_INT8,
    "int32": abi.REDUCE_INT32,
    "uint32": abi.REDUCE_INT32,
    "int64": abi.REDUCE_INT64,
    "uint64": abi.REDUCE_INT64,
}


class Sources:
    """The arrays of a reduction, checked once, and the table of their addresses where the kernel
    can read it.

    Args:
        sources: torch, NumPy or CuPy arrays of one dtype, size and device, from one up, with no
            limit, which are kept alive.

    Raises:
        InvalidArgument: Names the first array that can't be used.
    """

    def __init__(self, sources: Iterable):
        if isinstance(sources, (torch.Tensor, numpy.ndarray, str, bytes, dict)) or not isinstance(sources, Iterable):
            raise _wrong(f"the sources must come as a list of arrays, not as {type(sources).__name__}")
        self.arrays = tuple(sources)
        if not self.arrays:
            raise _wrong("there is no source: give at least one array")
        reader = Reader(device_of(self.arrays[0]), owner="source 0")
        found = self._list = TensorList(self.arrays, reader, _OP, "source {}".format)
        first = found.buffer(0)
        reader.check_reducible(first, _OP)
        for i, (code, count) in enumerate(zip(found.codes, found.counts, strict=True)):
            if code != first.code:
                dtype = found.buffer(i).dtype
                raise _wrong(f"source {i} is {dtype} and source 0 is {first.dtype}: all must have one dtype")
            if count != first.count:
                raise _wrong(f"source {i} has {count} elements and source 0 has {first.count}: use equal sizes")
            _check_alignment(found.addresses[i], code, f"source {i}")
        self.device = reader.device
        self.code = first.code
        self.count = first.count
        self.nbytes = first.nbytes
        self.rows = Rows(found.table_of_addresses(), self.device)
        self._by_address = sorted((ptr, i) for i, ptr in enumerate(found.addresses))

    def __reduce__(self):
        return type(self), (self.arrays,)  # a copy's arrays lie elsewhere

    @property
    def dtype(self) -> torch.dtype:
        """The arrays' dtype."""
        return TORCH_DTYPES[self.code]

    def verify(self) -> None:
        """Raise ``InvalidArgument`` if an array's memory has been freed or exchanged since."""
        i = self._list.find_moved()
        if i is not None:
            raise _wrong(
                f"source {i} was freed or got other memory since this table was made, or its size or strides were "
                "changed: make a new Sources"
            )

    def overlapped_by(self, out: Buffer) -> int | None:
        """Return the index of a source that ``out`` overlaps without being just that source; None:
        there is none.
        """
        if not out.nbytes:
            return None
        first = bisect_right(self._by_address, (out.ptr - self.nbytes, len(self.arrays)))
        last = bisect_left(self._by_address, (out.ptr + out.nbytes, 0))
        for ptr, i in self._by_address[first:last]:
            if ptr != out.ptr or self.nbytes != out.nbytes:
                return i
        return None


def reduce_n(
    sources: Sources | Iterable,
    out,
    *,
    op: str = "sum",
    scale: float | torch.Tensor = 1.0,
    statistics: Statistics | None = None,
) -> None:
    """Reduce n arrays into one, element by element, times ``scale`` and cast to ``out``'s dtype.

    Elements are reduced in the order of the sources, in fp32 (fp64 where sources or ``out`` are);
    then averaged, then multiplied by the scale; here the statistics are taken; and rounded to
    ``out``'s dtype once, to nearest even; fp8 saturates. Integers wrap, and their average truncates
    toward zero. min and max are NaN where any source is. The bits are the same on every device, but
    for the sign and payload of a NaN. Before that last rounding a sum is off by at most (n - 1) *
    2^-24 (fp64: 2^-53) of the sum of the magnitudes, to first order (N. Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, section 4.2), and an average or a scale adds 2^-24 of
    the result.

    On the host it is done when this returns; on a GPU it is queued on torch's current stream.
    Autograd doesn't see what is written.

    Args:
        sources: Arrays of one dtype, size and device (torch, NumPy, CuPy), or a `Sources` made of
            them, which saves the checks.
        out: An array of that size and device; of any floating dtype (fp64, fp32, fp16, bf16, fp8
            e4m3 and e5m2) where the sources are floating, of their dtype where they are integers.
            It may be one of the sources as a whole, and must not overlap one otherwise.
        op: "sum", "prod", "min", "max", or "avg", which divides the sum by n.
        scale: For floating types: a finite number, or an fp32 tensor of one element on the device,
            read when the kernel runs.
        statistics: For floating types: gets the sum of squares and the count of non-finite
            elements.

    Raises:
        InvalidArgument: Before anything is written.
    """
    if isinstance(sources, Sources):
        table = sources
        table.verify()
    else:
        table = Sources(sources)
    if not isinstance(op, str) or op not in OPS:
        raise _wrong(f"op must be one of {', '.join(repr(known) for known in OPS)}, not {shown(op)}")
    reader = Reader(table.device, owner="source 0")
    place = read_array(reader, out, _OP, "out", writes=True)
    _check_alignment(place.ptr, place.code, "out")
    _check_out(table, place)
    floating = table.code in FLOATING
    scale_at = 0
    if type(scale) is not float or not -FP32_OVERFLOW < scale < FP32_OVERFLOW or not floating:
        scale, scale_at = _parse_scale(scale, reader, place, floating, _F64 in (table.code, place.code))
    args = abi.ReduceArgs(
        abi.Work(-(-table.count // TILE), 0, 0), table.rows.address, len(table.arrays), place.ptr, table.count,
        scale_at, scale, OPS[op], table.code, place.code, 0,
    )  # fmt: skip
    if statistics is not None:
        check_statistics(statistics, _OP)
        if not floating:
            name = DTYPE_NAMES[table.code]
            raise _wrong(f"statistics are for floating types, and the sources are {name}: leave them out")
        statistics.begin(args.work, table.device, _OP, place.overlaps)
    if args.work.tiles:
        run(kernel_of(table.code, place.code), args, table.device, table.rows)
        bump_versions([out])
    if statistics is not None:
        statistics.finish(args.work.tiles)


def kernel_of(source: int, out: int) -> abi.Kernel:
    """Return the kernel that reduces arrays of one dtype into one of another; dtypes are NCCL's
    codes.
    """
    return abi.REDUCE_WIDE if out == _F64 and source != _F64 else _KERNELS[DTYPE_NAMES[source]]


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(message, op=_OP)


def _check_alignment(address: int, code: int, what: str) -> None:
    width = ITEMSIZE[code]
    if address % width:
        raise _wrong(f"{what} begins at address {address:#x}, which is no multiple of its elements' {width} bytes")


def _check_out(table: Sources, out: Buffer) -> None:
    name = DTYPE_NAMES[table.code]
    if out.dtype != name:
        if table.code not in FLOATING:
            raise _wrong(f"out is {out.dtype} and the sources are {name}: integers must have one dtype")
        if out.code not in FLOATING:
            raise _wrong(f"out is {out.dtype} and the sources are {name}: use a floating dtype")
    if out.count != table.count:
        raise _wrong(f"out has {out.count} elements and source 0 has {table.count}: use equal sizes")
    wrong = table.overlapped_by(out)
    if wrong is not None:
        raise _wrong(f"out overlaps source {wrong}: it may be one of the sources as a whole; else use other memory")


def _parse_scale(scale, reader: Reader, out: Buffer, floating: bool, wide: bool) -> tuple[float, int]:
    """Return a scale as a number, and the address of one more factor or 0."""
    number, place = read_scale(scale, reader, wide or not floating, _OP)
    if not floating and (place is not None or number != 1):
        raise _wrong("a scale is for floating types, and the sources are integers: leave it out")
    if place is None:
        return number, 0
    if out.overlaps(place.ptr, 4):
        raise _wrong("the scale lies inside of out: use a copy of it")
    return number, place.ptr
