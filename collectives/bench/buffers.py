"""Arrays of one rank for a case: fills, poisons and checks them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .cases import PERIOD, Case, Layout

__all__ = ["LINE", "Allocate", "Buffers", "allocate_buffers", "count_wrong", "fill", "pattern_tensor", "stride_of"]

Allocate = Callable[[int, torch.dtype], torch.Tensor]
LINE = 64  # bytes of a cache line

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = 0xFE  # no dtype has a result of these bytes
_CHUNK_ROWS = 4096  # rows of PERIOD elements that are compared at once; a few MB


class Patterns:
    """Input and exact result of one rank for a case, as tensors of PERIOD elements."""

    def __init__(self, case: Case, rank: int, device):
        dtype = case.kind.dtype
        self.input = pattern_tensor(case.inputs()[rank], dtype, device)
        self.expected = [(s.start, s.length, pattern_tensor(s.values, dtype, device)) for s in case.expected(rank)]


class Buffers:
    """Arguments of one rank for an operation.

    ``allocate(n, dtype)`` returns a tensor of n elements. ``send`` and ``recv`` are tensors, in
    place parts of one tensor; empty where the rank has none. ``layout``: default, the case's.
    ``patterns``: those of this case and rank, where they have been made already.
    """

    def __init__(
        self, case: Case, rank: int, in_place: bool, allocate: Allocate, layout: Layout | None = None,
        patterns: Patterns | None = None,
    ):  # fmt: skip
        self.case = case
        self.in_place = in_place
        layout, dtype = layout or case.layout(rank), case.kind.dtype
        if in_place:
            self.whole = allocate(layout.total, dtype)
            self.send = self.whole[layout.send_at : layout.send_at + layout.send]
            self.recv = self.whole[layout.recv_at : layout.recv_at + layout.recv]
            self._others = self.whole
        else:
            self.send = allocate(layout.send, dtype)
            self.recv = self._others = allocate(layout.recv, dtype)
        device = self.recv.device
        self.patterns = patterns or Patterns(case, rank, device)
        # NCCL multiplies by 1/n before it sums, which is exact only for powers of two.
        self.inexact = device.type == "cuda" and case.redop == "avg" and bool(case.ranks & (case.ranks - 1))
        self.reset()

    def reset(self) -> None:
        """Write the input again, and fill all other elements with bytes that can't be a result."""
        self._others.view(torch.uint8).fill_(_POISON)
        self.write()

    def write(self) -> None:
        """Write the input again, and nothing else."""
        fill(self.send, self.patterns.input)

    def wrong(self) -> int:
        """Return the number of wrong elements of the result."""
        return sum(
            count_wrong(self.recv[start : start + length], values, self.inexact)
            for start, length, values in self.patterns.expected
        )


def allocate_buffers(
    case: Case, rank: int, in_place: bool, allocate: Allocate, layout: Layout, arrays: int
) -> list[Buffers]:
    """Return ``arrays`` times the arguments of a rank, one after the other in memory."""
    if arrays == 1:
        return [Buffers(case, rank, in_place, allocate, layout)]
    lengths = [layout.total] if in_place else [layout.send, layout.recv]
    itemsize = case.kind.dtype.itemsize
    strides = [stride_of(n * itemsize) // itemsize for n in lengths]
    blocks = [allocate(stride * arrays, case.kind.dtype) for stride in strides]
    found: list[Buffers] = []
    for index in range(arrays):
        starts = [index * stride for stride in strides]
        parts = iter([block[at : at + n] for block, at, n in zip(blocks, starts, lengths, strict=True)])
        patterns = found[0].patterns if found else None
        found.append(Buffers(case, rank, in_place, lambda n, dtype, parts=parts: next(parts), layout, patterns))
    return found


def stride_of(nbytes: int) -> int:
    """Return the distance of one array from the next, in bytes: whole cache lines, and one between."""
    return -(-nbytes // LINE) * LINE + LINE


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


def pattern_tensor(values: np.ndarray, dtype: torch.dtype, device="cpu") -> torch.Tensor:
    """Return PERIOD elements of the dtype from exact numbers."""
    exact = torch.from_numpy(np.ascontiguousarray(values))
    if dtype.is_floating_point:
        exact = exact.to(torch.float32 if dtype.itemsize < 8 else torch.float64)
    return exact.to(dtype).to(device)
