"""Array lists of an optimizer's launch, one array for each parameter: checked, with their addresses,
counts and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy
import torch

from ..arrays import ITEMSIZE, TORCH_CODES, Reader
from ..errors import InvalidArgument
from ..torch_compat import TensorBase
from .places import check_storage, device_of, place_of

__all__ = ["ArrayNames", "ArrayPlaces", "ColumnReader", "is_dense"]

_LOW = 2**40  # an address below it may be that of freed storage
_data_ptr, _numel, _is_contiguous = TensorBase.data_ptr, TensorBase.numel, TensorBase.is_contiguous

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

    def check_alignment(self, wrong, label: Callable[[int], str]) -> None:
        """Refuse the first array of which ``wrong``, a mask over all, is true; ``label`` names it
        by its index.
        """
        if wrong.any():
            what = label(int(numpy.argmax(wrong)))
            raise self.error(f"{what} begins at an address that is no multiple of its elements' size")


class ColumnReader:
    """Reads the columns of an optimizer's table: lists with an array for each parameter.

    All arrays of a parameter must be on the device of ``params[0]``, have as many elements as the
    parameter, and be contiguous or dense with the parameter's strides.
    """

    def __init__(self, names: ArrayNames, params):
        self.names = names
        self.params = self.read_list("param", params)
        if not self.params:
            raise names.error("there is no param")
        self.device = device_of(self.params[0])
        self._reader = Reader(self.device, owner="param 0")
        self.counts: list[int] = []  # elements of the parameters
        self.contiguous: list[bool] = []  # whether each parameter is

    def read_list(self, column, arrays) -> list:
        """Return the entries of an argument that must be a list."""
        if isinstance(arrays, torch.Tensor | numpy.ndarray | str | bytes | dict) or not isinstance(arrays, Iterable):
            kind = type(arrays).__name__
            raise self.names.error(f"{self.names.word(column)} must be a list, one for each param, not {kind}")
        return list(arrays)

    def read(self, column: str, arrays: list) -> tuple[list[int], list[int], list[int | None]]:
        """Return addresses, counts and dtype codes of the arrays of one column; an entry None is
        (0, -1, None).
        """
        if len(arrays) != len(self.params):
            raise self.names.error(
                f"there are {len(arrays)} of {self.names.word(column)} and {len(self.params)} of param"
            )
        plain, codes = self._reader.plain_address, TORCH_CODES
        addresses, counts, types = [], [], []
        for index, array in enumerate(arrays):
            if array is None:
                address, count, code = 0, -1, None
            else:
                kind = type(array)
                code = codes.get(array.dtype) if kind is torch.Tensor or kind is torch.nn.Parameter else None
                address = None if code is None else plain(array)
                if address is None:
                    address, count, code = self._unusual(column, index, array)
                else:
                    count = array.numel()
                    if address < _LOW or array.untyped_storage().nbytes() < (
                        (array.storage_offset() + count) * ITEMSIZE[code]
                    ):
                        check_storage(array, address, self.names.label(column, index), self.names.op)
                    if column != "param" and not self.contiguous[index]:
                        self._unusual(column, index, array)
            if array is None and column in ("param", "grad"):
                raise self.names.error(f"{self.names.label(column, index)} is None")
            addresses.append(address)
            counts.append(count)
            types.append(code)
        if column == "param":
            self.counts = counts
            self.contiguous = [not isinstance(a, torch.Tensor) or a.is_contiguous() for a in arrays]
        elif any(count not in (-1, own) for count, own in zip(counts, self.counts, strict=True)):
            index, own = next((i, n) for i, n in enumerate(self.counts) if counts[i] not in (-1, n))
            what, param = self.names.label(column, index), self.names.label("param", index)
            raise self.names.error(f"{what} has {counts[index]} elements and {param} has {own}")
        return addresses, counts, types

    def _unusual(self, column, index, array) -> tuple[int, int, int]:
        """Read a NumPy or CuPy array, a tensor of a subclass, or one that is dense in another
        order.
        """
        what = self.names.label(column, index)
        if isinstance(array, torch.Tensor) and array.layout is torch.strided and array.device == self.device:
            param = self.params[index]
            same_order = isinstance(param, torch.Tensor) and _strides(array) == _strides(param)
            if column != "param" and not same_order and not self.contiguous[index]:
                other = self.names.label("param", index)
                raise self.names.error(
                    f"{what} has strides {array.stride()} and {other} {param.stride()}: they must be the same; copy it "
                    "by torch.empty_like(param).copy_(it)" + (_OF_GRADIENTS if column == "grad" else "")
                )
            code = TORCH_CODES.get(array.dtype)
            if same_order and not array.is_contiguous() and is_dense(array) and not array.is_neg() and code is not None:
                check_storage(array, array.data_ptr(), what, self.names.op)
                return array.data_ptr(), array.numel(), code
            if column == "grad" and not array.is_contiguous():
                raise self.names.error(
                    f"{what} of shape {tuple(array.shape)} and strides {array.stride()} isn't contiguous: copy it by "
                    f"it.contiguous(){_OF_GRADIENTS}"
                )
        place = self._reader.read(array, self.names.op, writes=column != "grad", what=what)
        check_storage(array, place.ptr, what, self.names.op)
        if place.label:
            raise self.names.error(f"{what} is {place.dtype}: it must be of a floating-point dtype")
        return place.ptr, place.count, place.code


class ArrayPlaces:
    """Addresses and shapes of a table's arrays when it was made, to check later that they are the
    same.
    """

    def __init__(self, columns, steps):
        self.names = [(column, at) for column, some in columns for at, each in enumerate(some) if each is not None]
        self.params = columns[0][1]
        self.arrays = [*(each for _, some in columns for each in some if each is not None), *steps]
        self.all_torch = all(isinstance(each, torch.Tensor) for each in self.arrays)
        self.known = self._read()
        self.strided = [each for each in self.params if isinstance(each, torch.Tensor) and not each.is_contiguous()]
        self.strides = [each.stride() for each in self.strided]

    def _read(self) -> tuple[list, ...]:
        # Shapes matter in the parameters alone: with the same address all else is still in bounds.
        if self.all_torch:
            params = self.params
            return list(map(_data_ptr, self.arrays)), list(map(_numel, params)), list(map(_is_contiguous, params))
        params = [place_of(each)[1:] for each in self.params]
        return [place_of(each)[0] for each in self.arrays], params

    def find_moved(self, label: Callable[[str, int], str]) -> str | None:
        """Name an array whose place has changed, a parameter's or state's by ``label``; None: there
        is none.
        """
        try:
            now = self._read()
        except RuntimeError as error:  # under vmap or grad
            return f"an array ({error})"
        if now == self.known and [each.stride() for each in self.strided] == self.strides:
            return None
        for some, others in zip(now, self.known, strict=True):
            for at, (one, other) in enumerate(zip(some, others, strict=True)):
                if one != other:
                    return label(*self.names[at]) if at < len(self.names) else f"step {at - len(self.names)}"
        return "a param"


def _strides(tensor) -> list[int]:
    """Return the strides of the dimensions with more than one entry; the others mean nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def is_dense(tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps and overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
