"""Where things lie in flat buffers: offsets, padding and tiles, as pure functions of counts and sizes.

Units: counts and offsets are elements of the flat buffer, sizes are bytes. Every tensor begins at a multiple of
``ALIGNMENT`` bytes from the start of the buffer, and the buffer's length is one, too: NCCL is slow on other sizes, and
16-byte loads need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from .errors import InvalidArgument

__all__ = ["ALIGNMENT", "TILE", "Layout", "bucket_layout", "padded", "tiles_of"]

ALIGNMENT = 16  # bytes
TILE = 4096  # elements; COLL_TILE of kernels/include/coll/kernel_abi.h


class Layout(NamedTuple):
    """Offsets of tensors in a flat buffer, and the buffer's length, in elements."""

    offsets: tuple[int, ...]
    total: int


def padded(count: int, itemsize: int, alignment: int = ALIGNMENT) -> int:
    """Round ``count`` elements of ``itemsize`` bytes up to a multiple of ``alignment`` bytes; give elements."""
    if itemsize < 1 or alignment % itemsize:
        raise InvalidArgument(f"elements of {itemsize} bytes can't be padded to multiples of {alignment} bytes")
    unit = alignment // itemsize
    return -(-count // unit) * unit


def bucket_layout(counts: Iterable[int], itemsize: int, alignment: int = ALIGNMENT) -> Layout:
    """Place tensors of ``counts`` elements one after the other, each padded; give offsets and total length."""
    ends = list(accumulate((padded(count, itemsize, alignment) for count in counts), initial=0))
    return Layout(tuple(ends[:-1]), ends[-1])


def tiles_of(count: int) -> int:
    """Give the number of tiles of a tensor of ``count`` elements."""
    return -(-count // TILE)
