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

__all__ = [
    "ALIGNMENT",
    "TILE",
    "WIRE_BLOCKS",
    "WIRE_FORMATS",
    "Layout",
    "WireFormat",
    "WireLayout",
    "bucket_layout",
    "padded",
    "tiles_of",
    "wire_layout",
]

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


# ---- Wire buffers: what goes to a peer in one message of bytes.


class WireFormat(NamedTuple):
    """A format of values on the wire, and how far a value x may lie from what the wire carries.

    |x - carried| <= factor * (relative * |x| + absolute * s) + 2^-149, where s is the scale of the value's block (1 for
    formats without scales) and factor is 1 + 2^-14 for rounding to nearest, 2 * (1 + 2^-14) for rounding at random.
    That holds for finite values that don't overflow (fp16: below 65,520), and in blocks whose scale isn't 0.
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
    """A wire buffer: ``payload`` bytes of elements, padded; then from byte ``scales`` on ``blocks`` fp32, padded."""

    payload: int
    scales: int
    blocks: int
    nbytes: int


def wire_layout(count: int, format: str, block: int = 256) -> WireLayout:
    """Give the layout of a wire buffer for ``count`` values; sizes and offsets are bytes.

    The payload comes first, an element a value, and behind it one fp32 scale for each ``block`` values (the last block
    may be shorter); both are padded to multiples of 16 bytes. Formats without scales have none, whatever ``block`` is.
    """
    if format not in WIRE_FORMATS:
        raise InvalidArgument(f"format must be one of {', '.join(map(repr, WIRE_FORMATS))}, not {format!r}")
    if block not in WIRE_BLOCKS:
        raise InvalidArgument(f"block must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {block!r}")
    if count < 0:
        raise InvalidArgument(f"count must be 0 or more, not {count}")
    itemsize = WIRE_FORMATS[format].itemsize
    payload = count * itemsize
    scales = padded(count, itemsize) * itemsize
    blocks = -(-count // block) if WIRE_FORMATS[format].scaled else 0
    return WireLayout(payload, scales, blocks, scales + padded(blocks, 4) * 4)
