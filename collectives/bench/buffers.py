"""Arrays of one rank for a case: written with its input, filled with what is no result, checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .cases import PERIOD, Case, Layout

__all__ = ["Buffers", "count_wrong", "fill", "pattern_tensor"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = 0xFE  # no dtype has a result of these bytes
_CHUNK_ROWS = 4096  # rows of PERIOD elements that are compared at once; a few MB


class Buffers:
    """Arguments of one rank for an operation.

    ``allocate(n, dtype)`` returns a tensor of n elements. ``send`` and ``recv`` are tensors, in
    place parts of one tensor; empty where the rank has none.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        in_place: bool,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
        layout: Layout,
    ):
        dtype = case.kind.dtype
        self.in_place = in_place
        if in_place:
            whole = allocate(layout.total, dtype)
            self.send = whole[layout.send_at : layout.send_at + layout.send]
            self.recv = whole[layout.recv_at : layout.recv_at + layout.recv]
            self._poisoned = whole
        else:
            self.send = allocate(layout.send, dtype)
            self.recv = self._poisoned = allocate(layout.recv, dtype)
        device = self.recv.device
        self._input = pattern_tensor(case.inputs()[rank], dtype, device)
        self._expected = [(s.start, s.length, pattern_tensor(s.values, dtype, device)) for s in case.expected(rank)]
        # NCCL multiplies by 1/n before it sums, which is exact only for powers of two.
        self._inexact = device.type == "cuda" and case.redop == "avg" and bool(case.ranks & (case.ranks - 1))
        self.reset()

    def reset(self) -> None:
        """Write the input, and fill all other elements with bytes that can't be a result."""
        self._poisoned.view(torch.uint8).fill_(_POISON)
        self.write_input()

    def write_input(self) -> None:
        fill(self.send, self._input)

    def count_wrong(self) -> int:
        """Return the number of wrong elements of the result."""
        parts = [(self.recv[start : start + length], values) for start, length, values in self._expected]
        return sum(count_wrong(part, values, self._inexact) for part, values in parts)


def fill(array: torch.Tensor, values: torch.Tensor) -> None:
    """Fill an array by repeating ``values``, PERIOD elements of its dtype."""
    array, values = array.view(_BITS[array.itemsize]), values.view(_BITS[values.itemsize])
    rows = array.numel() // PERIOD
    array[: rows * PERIOD].view(rows, PERIOD).copy_(values)
    array[rows * PERIOD :].copy_(values[: array.numel() - rows * PERIOD])


def count_wrong(array: torch.Tensor, values: torch.Tensor, inexact: bool = False) -> int:
    """Return the number of elements of an array whose bits differ from the repeated ``values``.

    ``inexact``: floating-point elements may be off by four units in the last place.
    """
    close = inexact and array.dtype.is_floating_point
    if not close:
        array, values = array.view(_BITS[array.itemsize]), values.view(_BITS[values.itemsize])
    rows = array.numel() // PERIOD
    chunks = [
        (array[: rows * PERIOD].view(rows, PERIOD)[at : at + _CHUNK_ROWS], values) for at in range(0, rows, _CHUNK_ROWS)
    ]
    tail = array.numel() - rows * PERIOD
    chunks.append((array[rows * PERIOD :], values[:tail]))
    wrong = 0
    for got, wanted in chunks:
        if close:
            tolerance = 4 * torch.finfo(array.dtype).eps * wanted.to(torch.float64).abs()
            bad = ~((got.to(torch.float64) - wanted.to(torch.float64)).abs() <= tolerance)
        else:
            bad = got != wanted
        wrong += int(torch.count_nonzero(bad))
    return wrong


def pattern_tensor(values: np.ndarray, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return PERIOD elements of the dtype from exact numbers."""
    exact = torch.from_numpy(np.ascontiguousarray(values))
    if dtype.is_floating_point:
        exact = exact.to(torch.float32 if dtype.itemsize < 8 else torch.float64)
    return exact.to(dtype).to(device)
