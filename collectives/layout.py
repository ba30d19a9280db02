"""Where things lie in flat buffers: offsets, padding and tiles, as pure functions of counts and sizes.

Units: counts and offsets are elements of the flat buffer, sizes are bytes. Every tensor begins at a multiple of
``ALIGNMENT`` bytes from the start of the buffer, and the buffer's length is one, too: NCCL is slow on other sizes, and
16-byte loads need it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from .errors import InvalidArgument

__all__ = ["ALIGNMENT", "TILE", "Layout", "bucket_layout", "check_offsets", "padded", "tiles_of"]

ALIGNMENT = 16  # bytes
TILE = 4096  # elements; COLL_TILE of kernels/include/coll/kernel_abi.h


class Layout(NamedTuple):
    """Offsets of tensors in a flat buffer, and the buffer's length, in elements."""

    offsets: tuple[int, ...]
    total: int


def padded(count: int, itemsize: int, alignment: int = ALIGNMENT) -> int:
    """Round ``count`` elements of ``itemsize`` bytes up to a multiple of ``alignment`` bytes; give elements."""
    unit = _unit(itemsize, alignment)
    return -(-count // unit) * unit


def _unit(itemsize: int, alignment: int) -> int:
    if itemsize < 1 or alignment % itemsize:
        raise InvalidArgument(f"elements of {itemsize} bytes can't be padded to multiples of {alignment} bytes")
    return alignment // itemsize


def bucket_layout(counts: Iterable[int], itemsize: int, alignment: int = ALIGNMENT) -> Layout:
    """Place tensors of ``counts`` elements one after the other, each padded; give offsets and total length."""
    unit = _unit(itemsize, alignment)
    *offsets, total = accumulate([-(-count // unit) * unit for count in counts], initial=0)
    return Layout(tuple(offsets), total)


def check_offsets(offsets: Sequence[int], counts: Sequence[int], *, op: str = "layout") -> Layout:
    """Check places of tensors of ``counts`` elements that somebody chose; give them and where the last one ends.

    Any order and any gaps will do. Raises ``InvalidArgument``, which names the tensor by its index, for offsets that are
    no whole numbers from 0, too few or too many, and for tensors that overlap. A tensor of 0 elements overlaps nothing.
    """
    found = []
    for index, offset in enumerate(offsets):
        if isinstance(offset, bool) or not hasattr(type(offset), "__index__"):
            raise InvalidArgument(f"the offset of tensor {index} must be an int, not {offset!r:.40}", op=op)
        try:
            found.append(operator.index(offset))
        except TypeError as error:  # an array of several elements
            raise InvalidArgument(f"the offset of tensor {index} must be an int, not {offset!r:.40}", op=op) from error
        if not 0 <= found[-1] < 1 << 62:
            raise InvalidArgument(f"the offset of tensor {index} is {found[-1]}: it must be 0 or more", op=op)
    if len(found) != len(counts):
        raise InvalidArgument(f"there are {len(found)} offsets for {len(counts)} tensors", op=op)
    total, last = 0, -1
    for offset, index in sorted((offset, index) for index, offset in enumerate(found) if counts[index]):
        if offset < total:
            first, second = sorted((last, index))
            raise InvalidArgument(
                f"tensor {second} overlaps tensor {first} in the flat buffer: tensor {last} takes elements "
                f"{found[last]} to {total - 1}, and tensor {index} begins at {offset}",
                op=op,
            )
        total, last = offset + counts[index], index
    return Layout(tuple(found), total)


def tiles_of(count: int) -> int:
    """Give the number of tiles of a tensor of ``count`` elements."""
    return -(-count // TILE)
