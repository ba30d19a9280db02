"""Places of arrays in memory: device, address and storage, read once and checked again later."""

from __future__ import annotations

import sys
from operator import lt

import numpy
import torch

from ..errors import InvalidArgument
from ..torch_compat import TensorBase

__all__ = ["HeldArrays", "check_storage", "device_of", "place_of"]

_HOST = torch.device("cpu")
# Attributes as functions, so that map goes through hundreds of tensors without a Python frame.
_data_ptr, _numel, _storage = TensorBase.data_ptr, TensorBase.numel, TensorBase.untyped_storage
_is_contiguous = TensorBase.is_contiguous


class HeldArrays:
    """Arrays whose addresses a table keeps, with a check that they still lie there.

    ``needs``: for each array the bytes that its storage must have, as `check_storage` returns them.
    """

    __slots__ = ("_counts", "_needs", "_pointers", "all_torch", "arrays")

    def __init__(self, arrays: tuple, pointers: list[int], counts: list[int], needs: list[int]):
        self.arrays = arrays
        self._pointers = pointers
        self._counts = counts
        self._needs = needs
        self.all_torch = all(isinstance(array, torch.Tensor) for array in arrays)

    def find_moved(self) -> int | None:
        """Return the index of an array that has been freed, moved, resized or restrided; None:
        there is none.
        """
        arrays = self.arrays
        if self.all_torch:
            try:
                if (
                    list(map(_data_ptr, arrays)) == self._pointers
                    and list(map(_numel, arrays)) == self._counts
                    and all(map(_is_contiguous, arrays))
                    and not any(map(lt, map(len, map(_storage, arrays)), self._needs))
                ):
                    return None
            except RuntimeError:  # under vmap or grad
                pass
        for index, array in enumerate(arrays):
            try:
                if place_of(array) != (self._pointers[index], self._counts[index], True):
                    return index
                check_storage(array, self._pointers[index], "", "")
            except (RuntimeError, InvalidArgument):
                return index
        return None


def device_of(array) -> torch.device:
    """Return the device that an array seems to be on; the host for what is no array."""
    if isinstance(array, torch.Tensor):
        return array.device
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return torch.device("cuda", array.device.id)
    return _HOST


def check_storage(array, ptr: int, what: str, op: str) -> int:
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


def place_of(array) -> tuple[int, int, bool]:
    """Return an array's address, its number of elements, and whether it is contiguous."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr(), array.numel(), array.is_contiguous()
    ptr = array.__array_interface__["data"][0] if isinstance(array, numpy.ndarray) else array.data.ptr
    return ptr, array.size, array.flags.c_contiguous
