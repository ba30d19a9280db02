"""Memory that an optimizer's step writes, to refuse arrays and scalars that overlap it."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch

from ..arrays import ITEMSIZE, TORCH_CODES
from . import abi
from .parameter_arrays import ArrayNames

__all__ = ["WrittenMemory"]

_F32, _F64 = TORCH_CODES[torch.float32], TORCH_CODES[torch.float64]
_WRITTEN = ("param", "master", "first", "second", "largest")
_ITEMSIZES = numpy.array([ITEMSIZE.get(code, 0) for code in range(max(ITEMSIZE) + 1)], dtype=numpy.uint64)


class WrittenMemory:
    """Address ranges of the parameters, masters and states in a table's rows, sorted.

    Raises ``InvalidArgument``, which names the arrays, for two that share memory and for one that
    isn't aligned.
    """

    def __init__(self, rows: numpy.ndarray, names: ArrayNames):
        self._names = names
        self._count = len(rows)
        starts = numpy.array([rows[column] for column in _WRITTEN])
        sizes = numpy.empty_like(starts)
        sizes[0] = _ITEMSIZES[rows["param_type"]]
        sizes[1:] = numpy.where(rows["param_type"] == _F64, 8, 4)
        names.check_alignment(starts % sizes != 0, self._label)
        ends = (starts + rows["count"].astype(numpy.uint64) * sizes).ravel()
        starts = starts.ravel()
        origin = numpy.flatnonzero((starts != 0) & (ends > starts))
        origin = origin[numpy.argsort(starts[origin], kind="stable")]
        starts, ends = starts[origin], numpy.maximum.accumulate(ends[origin])
        hit = starts[1:] < ends[:-1]
        if hit.any():
            second = int(numpy.argmax(hit)) + 1
            first = int(numpy.argmax(ends[:second] > starts[second]))
            raise names.error(f"{self._label(origin[first])} and {self._label(origin[second])} overlap")
        self._starts, self._ends, self._origin = starts, ends, origin

    def check_grads(self, rows: numpy.ndarray) -> None:
        """Refuse gradients that aren't aligned, or share memory with what is written."""
        begin, sizes = rows["grad"], _ITEMSIZES[rows["grad_type"]]
        self._names.check_alignment(begin % sizes != 0, lambda hit: self._names.label("grad", hit))
        starts, ends, origin = self._starts, self._ends, self._origin
        if len(starts):
            end = begin + rows["count"].astype(numpy.uint64) * sizes
            before = numpy.searchsorted(starts, end)
            hit = (end > begin) & (before > 0) & (ends[before - 1] > begin)
            if hit.any():
                index = int(numpy.argmax(hit))
                other = int(numpy.argmax(ends[: before[index]] > begin[index]))
                raise self._names.error(f"{self._names.label('grad', index)} and {self._label(origin[other])} overlap")

    def check_scalars(self, scalars: list[abi.Number], name: Callable[[int], str]) -> None:
        """Refuse scalars on the device that the step itself would overwrite: threads read them at
        different times.
        """
        begin = numpy.array([scalar.at for scalar in scalars], dtype=numpy.uint64)
        sizes = _ITEMSIZES[[scalar.type if scalar.at else _F32 for scalar in scalars]]
        self._names.check_alignment(begin % sizes != 0, name)
        starts, ends, origin = self._starts, self._ends, self._origin
        if len(starts):
            before = numpy.searchsorted(starts, begin + sizes)
            hit = (begin > 0) & (before > 0) & (ends[before - 1] > begin)
            if hit.any():
                index = int(numpy.argmax(hit))
                other = self._label(origin[int(numpy.argmax(ends[: before[index]] > begin[index]))])
                raise self._names.error(f"{name(index)} lies inside of {other}, which is written: give a copy")

    def _label(self, origin) -> str:
        column, index = divmod(int(origin), self._count)
        return self._names.label(_WRITTEN[column], index)
