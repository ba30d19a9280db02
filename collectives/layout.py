"""Layout of flat buffers and wire buffers: offsets, padding and tiles, computed from counts.

Counts and offsets are elements of the flat buffer; sizes are bytes. Every tensor begins at a
multiple of ``ALIGNMENT`` bytes from the start of the buffer, and the buffer's length is such a
multiple, too: NCCL is slow on other sizes, and 16-byte loads need it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from .errors import InvalidArgument

__all__ = [
    "ALIGNMENT",
    "TILE",
    "WIRE_BLOCKS",
    "WIRE_FORMATS",
    "Layout",
    "WireFormat",
    "WireLayout",
    "bucket_layout",
    "check_offsets",
    "pad_count",
    "count_tiles",
    "wire_layout",
]

ALIGNMENT = 16  # bytes
TILE = 4096  # elements; COLL_TILE of kernels/include/coll/kernel_abi.h


class Layout(NamedTuple):
    """Offsets of tensors in a flat buffer, and the buffer's length, in elements."""

    offsets: tuple[int, ...]
    total: int


def pad_count(count: int, itemsize: int, alignment: int = ALIGNMENT) -> int:
    """Round ``count`` elements up to a multiple of ``alignment`` bytes; return elements.

    ``itemsize``: bytes of an element.
    """
    unit = _unit(itemsize, alignment)
    return -(-count // unit) * unit


def _unit(itemsize: int, alignment: int) -> int:
    if itemsize < 1 or alignment % itemsize:
        raise InvalidArgument(f"elements of {itemsize} bytes can't be padded to multiples of {alignment} bytes")
    return alignment // itemsize


def bucket_layout(counts: Iterable[int], itemsize: int, alignment: int = ALIGNMENT) -> Layout:
    """Return the layout of tensors of ``counts`` elements, one after the other, each padded."""
    unit = _unit(itemsize, alignment)
    *offsets, total = accumulate([-(-count // unit) * unit for count in counts], initial=0)
    return Layout(tuple(offsets), total)


def check_offsets(offsets: Sequence[int], counts: Sequence[int], *, op: str = "layout") -> Layout:
    """Check offsets that the caller has chosen for tensors of ``counts`` elements.

    Return a layout of these offsets and the end of the last tensor. Any order and any gaps are
    allowed. Raises ``InvalidArgument``, which names the tensor by its index, for offsets that are
    no whole numbers from 0, too few or too many, and for tensors that overlap. One of 0 elements
    overlaps nothing.
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


def count_tiles(count: int) -> int:
    """Return the number of tiles of a tensor of ``count`` elements."""
    return -(-count // TILE)


# ---- Wire buffers: the bytes of one message to a peer.


class WireFormat(NamedTuple):
    """Format of values on the wire, with a bound of its error.

    The error is the difference between a value x and what the wire carries.

    |x - carried| <= factor * (relative * |x| + absolute * s) + 2^-149, where s is the scale of the
    value's block (1 for formats without scales) and factor is 1 + 2^-14 for rounding to nearest, 2
    * (1 + 2^-14) for rounding at random. That holds for finite values that don't overflow (fp16:
    below 65,520), and in blocks whose scale isn't 0.
    """

    itemsize: int  # bytes of an element of the payload
    limit: float  # a block's scale is its largest magnitude / limit; 0: no scales
    relative: float
    absolute: float

    @property
    def scaled(self) -> bool:
        """Whether each block of values has a scale."""
        return self.limit > 0


WIRE_FORMATS = {
    "fp16": WireFormat(2, 0.0, 2.0**-11, 2.0**-25),
    "bf16": WireFormat(2, 0.0, 2.0**-8, 2.0**-134),
    "fp8_e4m3": WireFormat(1, 448.0, 2.0**-4, 2.0**-10),
    "fp8_e5m2": WireFormat(1, 57344.0, 2.0**-3, 2.0**-17),
    "int8": WireFormat(1, 127.0, 0.0, 0.5),
}
WIRE_BLOCKS = (128, 256, 512)  # elements that share a scale; each divides TILE


class WireLayout(NamedTuple):
    """Layout of a wire buffer in bytes.

    ``payload`` bytes of elements come first, padded; from byte ``scales`` on there are ``blocks``
    fp32, padded.
    """

    payload: int
    scales: int
    blocks: int
    nbytes: int


def wire_layout(count: int, format: str, block: int = 256) -> WireLayout:
    """Return the layout of a wire buffer for ``count`` values; sizes and offsets are bytes.

    The payload comes first, an element a value, and behind it one fp32 scale for each ``block``
    values (the last block may be shorter); both are padded to multiples of 16 bytes. Formats
    without scales have none, whatever ``block`` is.
    """
    if format not in WIRE_FORMATS:
        raise InvalidArgument(f"format must be one of {', '.join(map(repr, WIRE_FORMATS))}, not {format!r}")
    if block not in WIRE_BLOCKS:
        raise InvalidArgument(f"block must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {block!r}")
    if count < 0:
        raise InvalidArgument(f"count must be 0 or more, not {count}")
    itemsize = WIRE_FORMATS[format].itemsize
    payload = count * itemsize
    scales = pad_count(count, itemsize) * itemsize
    blocks = -(-count // block) if WIRE_FORMATS[format].scaled else 0
    return WireLayout(payload, scales, blocks, scales + pad_count(blocks, 4) * 4)
