"""TensorList: arrays of one device with their addresses, counts and dtypes, read and checked together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import add, lt, mul

import numpy
import torch

from ..arrays import DTYPE_NAMES, ITEMSIZE, TORCH_CODES, Buffer, Reader
from ..errors import InvalidArgument
from ..torch_compat import TensorBase

__all__ = ["TensorList", "check_storage", "device_of", "read_array"]

_FEW = 3  # so many arrays are read faster one by one, by `_nccl.ArrayReader`
_HOST = torch.device("cpu")
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Attributes as functions, so that map goes through hundreds of tensors without a Python frame.
_data_ptr, _numel, _get_device = TensorBase.data_ptr, TensorBase.numel, TensorBase.get_device
_storage, _storage_offset, _element_size = (
    TensorBase.untyped_storage, TensorBase.storage_offset, TensorBase.element_size,
)  # fmt: skip
_is_contiguous, _is_neg, _is_conj = TensorBase.is_contiguous, TensorBase.is_neg, TensorBase.is_conj
_is_cpu, _is_cuda, _layout, _is_nested, _dtype, _is_quantized = (
    getattr(TensorBase, name).__get__ for name in ("is_cpu", "is_cuda", "layout", "is_nested", "dtype", "is_quantized")
)


class TensorList:
    """Arrays that can be used where they lie, with a check that they still lie there.

    ``arrays``: torch tensors, NumPy or CuPy arrays, contiguous and on ``reader``'s device; the list
    holds them. ``op`` and ``label``, a function of an array's index: what the messages name.
    ``writes``: the arrays are to take results. Raises ``InvalidArgument`` for an array that can't
    be used, and for a tensor whose storage ends before the tensor does.

    Attributes, lists with an entry for each array: ``addresses``; ``counts``, of elements;
    ``codes``, NCCL's of the dtype, None where it has none; and ``arrays``, a tuple. ``all_torch``:
    all of them are torch tensors.
    """

    __slots__ = ("_needs", "_op", "addresses", "all_torch", "arrays", "codes", "counts", "label", "reader", "strides")

    def __init__(self, arrays: Sequence, reader: Reader, op: str, label: Callable[[int], str], *, writes: bool = False):
        self._begin(arrays, reader, op, label)
        plain = self._read_plain() if len(self.arrays) > _FEW else None
        self.addresses, self.counts, self.codes, self._needs = plain or self._read_each(writes)

    @classmethod
    def of_plain(cls, arrays: Sequence, reader: Reader, op: str, label: Callable[[int], str]) -> TensorList | None:
        """Return a list of plain torch tensors; None where one is of another kind or can't be used."""
        self = cls.__new__(cls)
        self._begin(arrays, reader, op, label)
        plain = self._read_plain()
        if plain is None:
            return None
        self.addresses, self.counts, self.codes, self._needs = plain
        return self

    @classmethod
    def joined(cls, lists: Sequence[TensorList]) -> TensorList:
        """Return one list of the arrays of several, which names them as these do."""
        labels = [(each.label, at) for each in lists for at in range(len(each))]
        self = TensorList.__new__(TensorList)
        arrays = [array for each in lists for array in each.arrays]
        self._begin(arrays, lists[0].reader, lists[0]._op, lambda index: labels[index][0](labels[index][1]))
        self.all_torch = all(each.all_torch for each in lists)
        starts = accumulate([len(each) for each in lists[:-1]], initial=0)
        for start, each in zip(starts, lists, strict=True):
            self.strides.update({start + at: strides for at, strides in each.strides.items()})
        self.addresses = list(chain.from_iterable(each.addresses for each in lists))
        self.counts = list(chain.from_iterable(each.counts for each in lists))
        self.codes = list(chain.from_iterable(each.codes for each in lists))
        self._needs = list(chain.from_iterable(each._needs for each in lists))
        return self

    def _begin(self, arrays, reader, op, label) -> None:
        self.arrays = tuple(arrays)
        self.reader = reader
        self.label = label
        self._op = op
        self.all_torch = True
        self.strides: dict[int, tuple] = {}  # of the tensors that are dense in another order than the contiguous one

    def __len__(self) -> int:
        return len(self.arrays)

    # ---- Reading.

    def _read_plain(self):
        """Return addresses, counts, codes and bytes of storage of plain contiguous tensors.

        None: `_read_each` must read them.
        """
        tensors, device = self.arrays, self.reader.device
        if not PLAIN.issuperset(map(type, tensors)):
            return None
        if device.type == "cpu":
            there = all(map(_is_cpu, tensors))
        else:
            there = all(map(_is_cuda, tensors)) and {device.index}.issuperset(map(_get_device, tensors))
        try:
            if not (
                there
                and {torch.strided}.issuperset(map(_layout, tensors))
                and all(map(_is_contiguous, tensors))
                and not any(map(_is_neg, tensors))
                and not any(map(_is_nested, tensors))
            ):
                return None
            addresses, counts = list(map(_data_ptr, tensors)), list(map(_numel, tensors))
            ends = map(add, map(_storage_offset, tensors), counts)
            needs = list(map(mul, ends, map(_element_size, tensors)))
            if any(map(lt, map(len, map(_storage, tensors)), needs)):
                return None
        except RuntimeError:  # under vmap or grad
            return None
        codes = list(map(TORCH_CODES.get, map(_dtype, tensors)))
        if None in codes and (any(map(_is_conj, tensors)) or any(map(_is_quantized, tensors))):
            return None
        return addresses, counts, codes, needs

    def _read_each(self, writes: bool):
        """Return the same of any arrays, or raise the reason for one that can't be used."""
        addresses, counts, codes, needs = [], [], [], []
        for index, array in enumerate(self.arrays):
            if not isinstance(array, torch.Tensor):
                self.all_torch = False
            what = self.label(index)
            place = self._read_one(index, array, what, writes)
            needs.append(check_storage(array, what, self._op))
            addresses.append(place.ptr)
            counts.append(place.count)
            codes.append(None if place.label else place.code)
        return addresses, counts, codes, needs

    def _read_one(self, index: int, array, what: str, writes: bool) -> Buffer:
        return self.reader.read(array, self._op, writes=writes, what=what)

    def buffer(self, index: int) -> Buffer:
        """Return one array as `Reader.read` does."""
        code, count = self.codes[index], self.counts[index]
        if code is None:
            return self.reader.read(self.arrays[index], self._op, writes=False, what=self.label(index))
        return Buffer(self.addresses[index], count, count * ITEMSIZE[code], DTYPE_NAMES[code], count, code)

    def table_of_addresses(self) -> numpy.ndarray:
        """Return the addresses as the kernels read them."""
        return numpy.array(self.addresses, dtype=numpy.uint64)

    # ---- Checks of later uses.

    def find_moved(self, *, addresses_suffice: bool = False) -> int | None:
        """Return the index of an array that was freed, moved, resized or restrided; None: none was.

        ``addresses_suffice``: the same addresses are enough, which costs less: for arrays whose
        sizes are those of others that are checked.
        """
        arrays = self.arrays
        if self.all_torch:
            try:
                if list(map(_data_ptr, arrays)) == self.addresses and (
                    addresses_suffice
                    or (
                        list(map(_numel, arrays)) == self.counts
                        and (self._has_kept_strides() if self.strides else all(map(_is_contiguous, arrays)))
                        and not any(map(lt, map(len, map(_storage, arrays)), self._needs))
                    )
                ):
                    return None
            except RuntimeError:  # under vmap or grad
                pass
        return next((index for index in range(len(arrays)) if not self._is_kept(index)), None)

    def _has_kept_strides(self) -> bool:
        contiguous = sum(map(_is_contiguous, self.arrays))
        same = all(self.arrays[index].stride() == strides for index, strides in self.strides.items())
        return same and contiguous == len(self.arrays) - len(self.strides)

    def _is_kept(self, index: int) -> bool:
        array = self.arrays[index]
        try:
            if isinstance(array, torch.Tensor):
                strides = self.strides.get(index)
                order = array.is_contiguous() if strides is None else array.stride() == strides
                check_storage(array, "", "")
                place = array.data_ptr(), array.numel(), order
            else:
                at = array.__array_interface__["data"][0] if isinstance(array, numpy.ndarray) else array.data.ptr
                place = at, array.size, array.flags.c_contiguous
        except (RuntimeError, InvalidArgument):
            return False
        return place == (self.addresses[index], self.counts[index], True)


def device_of(array) -> torch.device:
    """Return the device that an array seems to be on; the host for what is no array."""
    if isinstance(array, torch.Tensor):
        return array.device
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return torch.device("cuda", array.device.id)
    return _HOST


def read_array(reader: Reader, array, op: str, what: str, *, writes: bool) -> Buffer:
    """Read one array, as `TensorList` reads many."""
    place = reader.read(array, op, writes=writes, what=what)
    check_storage(array, what, op)
    return place


def check_storage(array, what: str, op: str) -> int:
    """Refuse a tensor whose storage ends before it does.

    Returns the bytes that the storage must have, 0 for other arrays.

    A storage that is resized changes no tensor: its tensors seem to be as long as they were.
    """
    if not isinstance(array, torch.Tensor):
        return 0
    count = array.numel()
    need = (array.storage_offset() + count) * array.element_size()
    there = len(array.untyped_storage())
    if there >= need or not count:
        return need
    if there:
        raise InvalidArgument(f"{what}'s storage has {there} bytes, it needs {need}: it was resized", op=op)
    raise InvalidArgument(
        f"{what} has no memory: its storage holds 0 bytes of the {need} that it needs, as it was freed or resized",
        op=op,
    )
