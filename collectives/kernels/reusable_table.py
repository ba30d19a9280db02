"""ReusableTable: a table of tensors that take others' places, such as the gradients of each step."""

from __future__ import annotations

import functools
import operator

import numpy

from .table import Table
from .tensor_list import TensorList

__all__ = ["ReusableTable"]


class ReusableTable(Table):
    """Table whose tensors can be replaced by others of the same sizes and dtypes, which costs less
    than a new table.
    """

    def _fill(self, pointers, counts, types, op) -> None:
        super()._fill(pointers, counts, types, op)
        self._op = op
        self._kinds = self._list.counts, self._list.codes
        self._pointers = pointers
        self._lengths = self._ends - self._starts
        self._sizes = self._lengths.tolist()
        self._data = self.rows.array["data"]

    def replace(self, tensors: list) -> bool:
        """Replace the tensors. False: that failed, and the table must not be used any more."""
        found = TensorList.of_plain(tensors, self._list.reader, self._op, self._list.label)
        if found is None or (found.counts, found.codes) != self._kinds:
            return False
        self._list, self.tensors, pointers = found, found.arrays, found.addresses
        if pointers != self._pointers:
            if 0 in self._sizes:
                return False  # an empty tensor has no address
            # Lists, since a call of NumPy's takes longer than a pass over the gradients of a small
            # model.
            ends = list(map(operator.add, pointers, self._sizes))
            if functools.reduce(operator.or_, pointers) % self.itemsize:
                return False
            self._low, self._high = min(pointers), max(ends)
            self._pointers, self._starts = pointers, numpy.array(pointers, dtype=numpy.int64)
            self._ends = self._starts + self._lengths
            self._data[:] = self._starts
            self.rows.changed()
            self._checked_flat = None
            self._are_destinations = False
        return True

    def spans(self) -> tuple[list[int], list[int]]:
        """Return the addresses where the tensors begin and end.

        The caller checks that they don't overlap.
        """
        self._are_destinations = True
        return self._pointers, list(map(operator.add, self._pointers, self._sizes))

    def release(self) -> None:
        """Release the tensors until `replace`: they must be freed where nobody else holds them."""
        self.tensors = self._list.arrays = ()

    def verify(self, op: str = "") -> None:
        """Do nothing: each use directly follows `replace`."""
