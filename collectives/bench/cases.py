"""Cases of the bench: operations, their data and results, and nccl-tests' bandwidths.

The data are small whole numbers chosen so that every result is exact in the dtype, whatever order
the ranks are summed in: a wrong element is one whose bits differ. Input element i of rank r is
``pattern(...)[r][i % PERIOD]``; the period is a prime, so that a part at a wrong offset (by a
chunk, a slot, a rank's part) is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["MULSUM", "OPS", "PERIOD", "REDOPS", "TYPES", "Case", "DataType", "Layout", "Operation", "Segment"]

PERIOD = 1021
MULSUM = 2  # each rank's factor for the reduction "mulsum", ncclRedOpCreatePreMulSum's
_SPREAD = 100  # the largest number in the data, where the dtype allows it
REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum")


@dataclass(frozen=True)
class Operation:
    """A collective as nccl-tests measures it.

    ``parts``: each rank has one of n parts on the side "in", "out" or "both" (all-to-all); the size
    is that of the whole. ``busbw``: function from the number of ranks to the factor from algbw to
    busbw.
    """

    name: str
    busbw: Callable[[int], float]
    parts: str = ""
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True


def _all_reduce_factor(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _parts_factor(ranks: int) -> float:
    return (ranks - 1) / ranks


def _whole_factor(ranks: int) -> float:
    return 1.0


OPS = {
    op.name: op
    for op in (
        Operation("all_reduce", _all_reduce_factor, reduces=True),
        Operation("reduce_scatter", _parts_factor, parts="out", reduces=True),
        Operation("all_gather", _parts_factor, parts="in"),
        Operation("broadcast", _whole_factor, rooted=True),
        Operation("reduce", _whole_factor, reduces=True, rooted=True),
        Operation("all_to_all", _parts_factor, parts="both", in_place=False),
        Operation("gather", _parts_factor, parts="in", rooted=True),
        Operation("scatter", _parts_factor, parts="out", rooted=True),
        Operation("sendrecv", _whole_factor, in_place=False),
    )
}


@dataclass(frozen=True)
class DataType:
    """A dtype with torch's and nccl-tests' names.

    ``exact``: all whole numbers from 0 to it are exact in the dtype, and none has the bits of a
    poisoned element. ``doublings``: 2 to this power is exact, too.
    """

    name: str
    short: str
    dtype: torch.dtype
    exact: int
    doublings: int


TYPES = {
    kind.name: kind
    for kind in (
        DataType("int8", "int8", torch.int8, 127, 6),
        DataType("uint8", "uint8", torch.uint8, 250, 7),
        DataType("int32", "int32", torch.int32, 1 << 24, 30),
        DataType("uint32", "uint32", torch.uint32, 1 << 24, 31),
        DataType("int64", "int64", torch.int64, 1 << 24, 62),
        DataType("uint64", "uint64", torch.uint64, 1 << 24, 62),
        DataType("float16", "half", torch.float16, 2048, 15),
        DataType("float32", "float", torch.float32, 1 << 24, 100),
        DataType("float64", "double", torch.float64, 1 << 24, 60),
        DataType("bfloat16", "bfloat16", torch.bfloat16, 256, 100),
        DataType("float8_e4m3fn", "f8e4m3", torch.float8_e4m3fn, 16, 8),
        DataType("float8_e5m2", "f8e5m2", torch.float8_e5m2, 8, 15),
    )
}


@dataclass(frozen=True)
class Segment:
    """``length`` elements of a result from element ``start`` on: element j of it is ``values[j %
    PERIOD]``.
    """

    start: int
    length: int
    values: np.ndarray


@dataclass(frozen=True)
class Layout:
    """Lengths and offsets of a rank's arrays, in elements.

    In place both are in one buffer of ``total`` elements.
    """

    send: int
    recv: int
    total: int
    send_at: int
    recv_at: int


@dataclass(frozen=True)
class Case:
    """One row's operation.

    ``count``: what nccl-tests prints, the count argument of the call: a part's where there are
    parts.
    """

    op: Operation
    kind: DataType
    redop: str | None
    root: int
    count: int
    ranks: int

    @classmethod
    def of(cls, op: Operation, kind: DataType, redop: str | None, root: int, nbytes: int, ranks: int) -> Case:
        """Return the case with the count that fits a size in bytes: parts are equal and, where that
        leaves any, multiples of 16 bytes.
        """
        count = nbytes // kind.dtype.itemsize
        if op.parts:
            count //= ranks
            pack = 16 // kind.dtype.itemsize
            count = count // pack * pack if count >= pack else count
        return cls(op, kind, redop if op.reduces else None, root if op.rooted else -1, count, ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, of which the bandwidths are."""
        return self.count * self.kind.dtype.itemsize * (self.ranks if self.op.parts else 1)

    def layout(self, rank: int) -> Layout:
        """Return where NCCL has a rank's arrays."""
        whole, part = self.count * self.ranks, self.count
        at_root = rank == self.root
        name = self.op.name
        if name == "reduce_scatter":
            return Layout(whole, part, whole, 0, rank * part)
        if name == "all_gather":
            return Layout(part, whole, whole, rank * part, 0)
        if name == "all_to_all":
            return Layout(whole, whole, whole, 0, 0)
        if name == "gather":
            return Layout(part, whole, whole, rank * part, 0) if at_root else Layout(part, 0, part, 0, 0)
        if name == "scatter":
            return Layout(whole, part, whole, 0, rank * part) if at_root else Layout(0, part, part, 0, 0)
        return Layout(part, part, part, 0, 0)

    def inputs(self) -> np.ndarray:
        """Return the input pattern of every rank: int64, (ranks, PERIOD)."""
        n, i, r = self.ranks, np.arange(PERIOD)[None, :], np.arange(self.ranks)[:, None]
        mixed = ((i + 1) * 2654435761 + (r + 1) * (i + 7) * 40503 + r * 97) >> 7
        if self.redop in ("sum", "mulsum"):
            factor = MULSUM if self.redop == "mulsum" else 1
            top = self.kind.exact // (n * factor)
            if top:
                return mixed % (min(top, _SPREAD) + 1)
            return ((i + r) % n < 1 + i % (self.kind.exact // factor)).astype(np.int64)  # ones on a few of the ranks
        if self.redop == "prod":
            return np.where((i + r) % n < i % (self.kind.doublings + 1), 2, 1)
        if self.redop == "avg":  # each element is the average, or one more, or one less
            average = 1 + mixed[:1] % max(1, min(self.kind.exact // n - 1, _SPREAD))
            paired = (r ^ 1) < n
            return average + paired * np.where((r + i) % 2, 1, -1)
        return mixed % (min(self.kind.exact, _SPREAD) + 1)

    def reduced(self, inputs: np.ndarray) -> np.ndarray:
        """Reduce the input patterns over the ranks: (PERIOD,), exact. float64 for "prod", else
        int64.
        """
        if self.redop == "sum":
            return inputs.sum(0)
        if self.redop == "mulsum":
            return inputs.sum(0) * MULSUM
        if self.redop == "avg":
            return inputs.sum(0) // self.ranks
        if self.redop == "prod":
            return inputs.astype(np.float64).prod(0)
        return inputs.max(0) if self.redop == "max" else inputs.min(0)

    def expected(self, rank: int) -> list[Segment]:
        """Return the segments of a rank's exact result; [] where the rank has none."""
        inputs, count, name = self.inputs(), self.count, self.op.name
        if count == 0 or (name in ("reduce", "gather") and rank != self.root):
            return []
        if name in ("all_reduce", "reduce"):
            return [Segment(0, count, self.reduced(inputs))]
        if name == "reduce_scatter":
            return [Segment(0, count, _rotate(self.reduced(inputs), rank * count))]
        if name in ("all_gather", "gather"):
            return [Segment(r * count, count, inputs[r]) for r in range(self.ranks)]
        if name == "broadcast":
            return [Segment(0, count, inputs[self.root])]
        if name == "all_to_all":
            return [Segment(r * count, count, _rotate(inputs[r], rank * count)) for r in range(self.ranks)]
        if name == "scatter":
            return [Segment(0, count, _rotate(inputs[self.root], rank * count))]
        return [Segment(0, count, inputs[(rank - 1) % self.ranks])]  # sendrecv: from the rank before


def _rotate(values: np.ndarray, at: int) -> np.ndarray:
    """Rotate a pattern so that it starts with element `at` of its repetition."""
    return np.roll(values, -(at % PERIOD))
