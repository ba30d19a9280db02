"""reduce_n: n arrays into one, in one pass."""

from __future__ import annotations

import numbers
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy
import torch

from .._nccl import OPS
from ..arrays import TORCH_CODES, Place, Reader
from ..errors import InvalidArgument
from ..layout import TILE
from . import abi
from .execution import Statistics, run

__all__ = ["Sources", "reduce_n"]

_FLOATING = {code for dtype, code in TORCH_CODES.items() if dtype.is_floating_point}


class Sources:
    """The arrays of a reduction, checked once, and the table of their addresses where the kernel can read it.

    ``sources``: from one up, with no limit, torch, NumPy or CuPy arrays of one dtype, size and device. They are kept
    alive. Raises ``InvalidArgument``, which names the first array that won't do.
    """

    def __init__(self, sources: Iterable):
        self.arrays = tuple(sources)
        if not self.arrays:
            raise _wrong("there is no source: give at least one array")
        reader = Reader(_device_of(self.arrays[0]), owner="source 0")
        places = [_placed(reader, array, f"source {i}") for i, array in enumerate(self.arrays)]
        first = places[0]
        reader.reducible(first, "reduce_n")
        for i, place in enumerate(places):
            if place.dtype != first.dtype:
                raise _wrong(f"source {i} is {place.dtype} and source 0 is {first.dtype}: all must have one dtype")
            if place.count != first.count:
                raise _wrong(f"source {i} has {place.count} elements and source 0 has {first.count}: use equal sizes")
        self.device = reader.device
        self.dtype = first.dtype
        self.code = first.code
        self.count = first.count
        self.nbytes = first.nbytes
        addresses = numpy.array([place.ptr for place in places], dtype=numpy.uint64)
        self.table = torch.from_numpy(addresses.view(numpy.int64)).to(self.device)
        self._by_address = sorted((place.ptr, i) for i, place in enumerate(places))
        self._tensors = [
            (i, array, place.ptr)
            for i, (array, place) in enumerate(zip(self.arrays, places, strict=True))
            if isinstance(array, torch.Tensor)
        ]

    def check(self) -> None:
        """Raise ``InvalidArgument`` where a tensor's memory was given back or exchanged since."""
        for i, tensor, ptr in self._tensors:
            if tensor.data_ptr() != ptr:
                raise _wrong(f"source {i} was freed or got other memory since this table was made: make a new Sources")

    def overlapped_by(self, out: Place) -> int | None:
        """Give the index of a source that ``out`` overlaps without being just that source; None: there is none."""
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
    """Reduce n arrays into one: ``out[i] = scale * op(sources[0][i], sources[1][i], ...)``.

    ``sources``: arrays of one dtype, size and device (torch, NumPy, CuPy), or a `Sources` made of them, which saves the
    checks and on a GPU the copy of the addresses. ``out``: an array of that size, for floating types (fp64, fp32, fp16,
    bf16, fp8 e4m3 and e5m2) of any floating dtype, for integers of the sources' dtype. It may be one of the sources as a
    whole, and must not overlap one otherwise. ``op``: "sum", "prod", "min", "max", or "avg", which divides the sum by n.

    Elements are reduced in the order of the sources: in fp32 (fp64 where sources or ``out`` are fp64), averaged, scaled,
    and rounded to ``out``'s dtype once, to nearest, ties to even; fp8 saturates. Integers wrap, their average truncates
    toward zero. min and max give NaN where any source has it. Of a NaN the payload and sign are unspecified, all other
    bits are the same on every device. A sum of n values is off by at most (n - 1) * 2^-24 (fp64: 2^-53) of the sum of their
    magnitudes to first order (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2), an average and a
    scale by 2^-24 of the result each, and then comes the rounding to ``out``'s dtype.

    ``scale``: for floating types; a number, or a float32 tensor of one element on the same device, read when the kernel
    runs. ``statistics``: for floating types, of the values just before that rounding.

    Returns when ``out`` is written on the host; on a GPU the work is queued on torch's current stream. Raises
    ``InvalidArgument`` before anything is written.
    """
    table = sources if isinstance(sources, Sources) else Sources(sources)
    if table is sources:
        table.check()
    if not isinstance(op, str) or op not in OPS:
        raise _wrong(f"op must be one of {', '.join(repr(known) for known in OPS)}, not {op!r}")
    reader = Reader(table.device, owner="source 0")
    place = _placed(reader, out, "out", writes=True)
    floating = table.code in _FLOATING
    _check_out(table, place, floating)
    scale, scale_at = _scale(reader, scale, place, floating)
    if statistics is not None and not floating:
        raise _wrong(f"statistics are for floating types, the sources are {table.dtype}: leave them out")
    args = abi.ReduceArgs(
        abi.Work(-(-table.count // TILE), 0, 0), table.table.data_ptr(), len(table.arrays), place.ptr, table.count,
        scale_at, scale, OPS[op], table.code, place.code, 0,
    )
    if statistics is not None:
        statistics.begin(args.work, table.device, "reduce_n")
    if args.work.tiles:
        run(abi.REDUCE, args, table.device)
    if statistics is not None:
        statistics.finish(args.work.tiles)


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(message, op="reduce_n")


def _device_of(array) -> torch.device:
    if isinstance(array, torch.Tensor):
        return array.device
    index = getattr(getattr(array, "device", None), "id", None)  # CuPy's
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _placed(reader: Reader, array, what: str, writes: bool = False) -> Place:
    place = reader.place(array, "reduce_n", writes=writes, what=what)
    # A view into a storage that was freed (resized to 0, as sharding does) may have an address all the same: its offset.
    if isinstance(array, torch.Tensor) and place.count:
        needed = (array.storage_offset() + place.count) * array.element_size()
        if array.untyped_storage().nbytes() < needed:
            raise _wrong(f"{what} has no memory: its storage was freed")
    return place


def _check_out(table: Sources, out: Place, floating: bool) -> None:
    if out.dtype != table.dtype and not (floating and out.code in _FLOATING and out.label is None):
        raise _wrong(
            f"out is {out.dtype} and the sources are {table.dtype}: "
            + ("use a floating dtype" if floating else f"use {table.dtype}")
        )
    if out.count != table.count:
        raise _wrong(f"out has {out.count} elements and source 0 has {table.count}: use equal sizes")
    wrong = table.overlapped_by(out)
    if wrong is not None:
        raise _wrong(f"out overlaps source {wrong}: it may be one of the sources as a whole, else use memory of its own")


def _scale(reader: Reader, scale, out: Place, floating: bool) -> tuple[float, int]:
    """Give (factor, address of one more factor or 0)."""
    if not floating and not (isinstance(scale, numbers.Real) and scale == 1):
        raise _wrong("a scale is for floating types: leave it out for integers")
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        return float(scale), 0
    if not isinstance(scale, torch.Tensor):
        raise _wrong(f"scale must be a number or a float32 tensor of one element, not {scale!r}")
    place = _placed(reader, scale, "scale")
    if place.code != TORCH_CODES[torch.float32] or place.count != 1:
        raise _wrong(f"scale must be a number or a float32 tensor of one element, not {place.count} of {place.dtype}")
    if out.ptr <= place.ptr < out.ptr + out.nbytes:
        raise _wrong("out overlaps the scale: use memory of its own")
    return 1.0, place.ptr
