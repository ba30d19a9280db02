"""Columns of an optimizer's launch: lists with an array for each parameter, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy
import torch

from ..arrays import DTYPE_NAMES, ITEMSIZE, TORCH_CODES, Buffer, Reader
from ..errors import InvalidArgument
from .tensor_list import TensorList, device_of

__all__ = ["ArrayNames", "Column", "dense_strides", "is_dense"]

_OF_GRADIENTS = " and, where it is a Parameter's, assign the copy to p.grad"

# What the messages call an array of each column.
_WORDS = {
    "sgd_step": {"param": "param", "grad": "grad", "master": "master", "first": "momentum"},
    "adam_step": {
        "param": "param",
        "grad": "grad",
        "master": "master",
        "first": "exp_avg",
        "second": "exp_avg_sq",
        "largest": "max_exp_avg_sq",
    },
}


class ArrayNames:
    """How the messages name the arrays of a step, and the error that carries such a message.

    ``op``: "sgd_step" or "adam_step". ``name``: a function of a parameter's index that names it;
    None: by the index.
    """

    def __init__(self, op: str, name: Callable[[int], str] | None):
        self.op = op
        self._name = name
        self._words = _WORDS[op]

    def word(self, column: str) -> str:
        """Return what an array of a column is called."""
        return self._words.get(column, column)

    def label(self, column: str, index: int) -> str:
        """Name one parameter's array of a column."""
        word = self._words[column]
        return f"{word} {index}" if self._name is None else f"{word} of {self._name(index)}"

    def error(self, message: str) -> InvalidArgument:
        """Return an error of the step with this message."""
        return InvalidArgument(message, op=self.op)

    def read_list(self, column: str, arrays) -> list:
        """Return the entries of an argument that must be a list."""
        if isinstance(arrays, torch.Tensor | numpy.ndarray | str | bytes | dict) or not isinstance(arrays, Iterable):
            kind = type(arrays).__name__
            raise self.error(f"{self.word(column)} must be a list, one for each param, not {kind}")
        return list(arrays)

    def check_alignment(self, wrong, label: Callable[[int], str]) -> None:
        """Refuse the first array of which ``wrong``, a mask over all, is true; ``label`` names it
        by its index.
        """
        if wrong.any():
            what = label(int(numpy.argmax(wrong)))
            raise self.error(f"{what} begins at an address that is no multiple of its elements' size")


class Column(TensorList):
    """Arrays of one column of an optimizer's table, one for each parameter.

    ``column``: "param", "grad", "master", "first", "second" or "largest"; ``params``: the column of
    the parameters, None: this is it. All arrays must be on the device of the first parameter, have
    as many elements as their parameter, and be contiguous or dense with the parameter's strides.
    Masters and states may be None: the list then has those that are there, and ``rows`` their
    indices among the parameters.
    """

    __slots__ = ("_names", "_params", "column", "rows", "total")

    def __init__(self, names: ArrayNames, column: str, arrays: list, params: Column | None = None):
        self._names = names
        self._params = params
        self.column = column
        self.total = len(arrays)
        if params is not None and self.total != params.total:
            raise names.error(f"there are {self.total} of {names.word(column)} and {params.total} of param")
        rows = self.rows = range(self.total)
        if not {type(None)}.isdisjoint(map(type, arrays)):
            rows = self.rows = [index for index, array in enumerate(arrays) if array is not None]
            if column in ("param", "grad"):
                missing = next(index for index, array in enumerate(arrays) if array is None)
                raise names.error(f"{names.label(column, missing)} is None")
            arrays = [arrays[index] for index in rows]
        if params is None:
            reader = Reader(device_of(arrays[0]), owner="param 0")
        else:
            reader = params.reader
        super().__init__(arrays, reader, names.op, lambda at: names.label(column, rows[at]), writes=column != "grad")
        if None in self.codes:
            at = self.codes.index(None)
            raise names.error(f"{self.label(at)} is {self.buffer(at).dtype}: it must be of a floating-point dtype")
        if params is None:
            self.strides = {
                at: array.stride()
                for at, array in enumerate(self.arrays)
                if isinstance(array, torch.Tensor) and not array.is_contiguous()
            }
        else:
            self._check_against(params)

    def _check_against(self, params: Column) -> None:
        if params.strides:
            self.strides = {at: params.strides[row] for at, row in enumerate(self.rows) if row in params.strides}
            for at in self.strides:
                self._check_order(at, self.arrays[at])
            # The strides of dimensions with one entry may be others than the parameter's.
            self.strides = {at: self.arrays[at].stride() for at in self.strides}
        wanted = params.counts if len(self.rows) == self.total else [params.counts[row] for row in self.rows]
        if self.counts != wanted:
            at = next(at for at, count in enumerate(self.counts) if count != wanted[at])
            param = self._names.label("param", self.rows[at])
            raise self._names.error(f"{self.label(at)} has {self.counts[at]} elements and {param} has {wanted[at]}")

    def _check_order(self, at: int, array) -> None:
        """Refuse an array that hasn't the strides of its parameter, which isn't contiguous."""
        param = self._params.arrays[self.rows[at]]
        if not isinstance(array, torch.Tensor) or _strides(array) != _strides(param):
            strides = array.stride() if isinstance(array, torch.Tensor) else array.strides
            raise self._names.error(
                f"{self.label(at)} has strides {strides} and {self._names.label('param', self.rows[at])} "
                f"{param.stride()}: they must be the same; copy it by torch.empty_like(param).copy_(it)"
                + (_OF_GRADIENTS if self.column == "grad" else "")
            )

    def _read_one(self, index: int, array, what: str, writes: bool) -> Buffer:
        strided = isinstance(array, torch.Tensor) and array.layout is torch.strided
        if strided and not array.is_contiguous() and array.device == self.reader.device:
            param = array if self._params is None else self._params.arrays[self.rows[index]]
            if self._params is not None and self.rows[index] in self._params.strides:
                self._check_order(index, array)
            code = TORCH_CODES.get(array.dtype)
            same_order = isinstance(param, torch.Tensor) and _strides(array) == _strides(param)
            if same_order and code is not None and is_dense(array) and not array.is_neg():
                count = array.numel()
                return Buffer(array.data_ptr(), count, count * ITEMSIZE[code], DTYPE_NAMES[code], count, code)
            if self.column == "grad":
                raise self._names.error(
                    f"{what} of shape {tuple(array.shape)} and strides {array.stride()} isn't contiguous: copy it by "
                    f"it.contiguous(){_OF_GRADIENTS}"
                )
        return super()._read_one(index, array, what, writes)

    def spread(self, values: list, missing) -> list:
        """Return a list with an entry for each parameter: ``values`` of the arrays, else ``missing``."""
        if len(self.rows) == self.total:
            return values
        found = [missing] * self.total
        for row, value in zip(self.rows, values, strict=True):
            found[row] = value
        return found


def _strides(tensor) -> list[int]:
    """Return the strides of the dimensions with more than one entry; the others mean nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def dense_strides(tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor in another order than a contiguous one's.

    None for all others. A dimension of one element has a stride of 0 in the result.
    """
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return None
            expected *= size
    return tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def is_dense(tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps and overlaps, in any order."""
    return tensor.is_contiguous() or dense_strides(tensor) is not None
