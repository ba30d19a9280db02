"""Wire formats: values to buffers of 1 or 2 bytes a value and back, with error feedback and
stochastic rounding.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import NamedTuple

import numpy
import torch

from ..arrays import DTYPE_NAMES, ITEMSIZE, TORCH_CODES, Buffer, Reader, shown
from ..errors import InvalidArgument
from ..layout import WIRE_BLOCKS, WIRE_FORMATS, WireLayout, count_tiles, wire_layout
from . import abi
from .dtypes import FLOATING, FP32_OVERFLOW
from .execution import Launch, Statistics, bump_versions, check_statistics
from .rows import Rows
from .tensor_list import TensorList, device_of, read_array
from .wire_parts import WireParts

__all__ = [
    "WireTable",
    "dequantize",
    "plan_dequantize",
    "plan_quantize",
    "plan_requantize",
    "quantize",
    "reduce_wires",
    "requantize",
]

_CODES = {
    "int8": TORCH_CODES[torch.int8],
    "fp16": TORCH_CODES[torch.float16],
    "bf16": TORCH_CODES[torch.bfloat16],
    "fp8_e4m3": TORCH_CODES[torch.float8_e4m3fn],
    "fp8_e5m2": TORCH_CODES[torch.float8_e5m2],
}
_SEEDS = 1 << 64
_POSITIONS = 1 << 63


class WireTable:
    """Wire buffers that are summed together, checked once for many calls.

    The table holds them, and has their addresses where the kernel reads them. One whose memory has
    moved since (``resize_``, ``.data = ...``), or whose size or strides were changed, is an
    ``InvalidArgument`` when the table is used.

    Args:
        wires: uint8 arrays on one device, in the order in which they are summed.
    """

    def __init__(self, wires: Iterable):
        self._read(wires, "WireTable")

    def __len__(self) -> int:
        return len(self._arrays)

    def __reduce__(self):
        return type(self), (self._arrays,)  # a copy's arrays lie elsewhere

    @classmethod
    def _of(cls, wires, op: str) -> WireTable:
        if isinstance(wires, WireTable):
            wires._check_addresses(op)
            return wires
        table = cls.__new__(cls)
        table._read(wires, op)
        return table

    def _read(self, wires, op):
        if not isinstance(wires, Iterable) or isinstance(wires, torch.Tensor | numpy.ndarray | str | bytes | dict):
            raise InvalidArgument("wires must be a sequence of uint8 arrays, or a WireTable of them", op=op)
        self._arrays = list(wires)
        if not self._arrays:
            raise InvalidArgument("wires is empty: at least one wire buffer is needed", op=op)
        self.device = _device_of(self._arrays[0], op)
        reader = Reader(self.device, owner="wire 0")
        self._list = TensorList(self._arrays, reader, op, "wire {}".format)
        self._places = [
            _check_wire(self._list.buffer(index), op, f"wire {index}") for index in range(len(self._arrays))
        ]
        sizes = self._list.counts
        for index, size in enumerate(sizes):
            if size != sizes[0]:
                raise InvalidArgument(
                    f"wire {index} has {size} bytes, wire 0 has {sizes[0]}: all must be of one count, format and block",
                    op=op,
                )
        self.nbytes = sizes[0]
        self.rows = None  # a single wire needs none
        if len(sizes) > 1:
            self.rows = Rows(self._list.table_of_addresses(), self.device)

    def _check_addresses(self, op):
        index = self._list.find_moved()
        if index is not None:
            raise InvalidArgument(
                f"wire {index} has been freed or has moved since the table was made, or its size or strides were "
                "changed: make a new WireTable",
                op=op,
            )


class _Scale(NamedTuple):
    """A factor, and where one more is read when the kernel runs."""

    value: float
    place: Buffer | None

    @property
    def ptr(self) -> int:
        return self.place.ptr if self.place else 0

    @property
    def read(self) -> dict[str, Buffer]:
        return {"scale": self.place} if self.place else {}


def quantize(
    source,
    wire,
    *,
    format: str,
    block: int = 256,
    scale=1.0,
    residual=None,
    seed: int | None = None,
    position: int = 0,
    parts: WireParts | None = None,
) -> None:
    """Round values to a wire format, with error feedback.

    What is sent is x = source * scale + residual, in fp32. Of fp8 and int8 each ``block`` values
    share the scale s = max |x| / 448 (e4m3), 57,344 (e5m2) or 127 (int8), and an element is x / s,
    rounded. fp16 and bf16 are a plain cast. The residual becomes x less what the receiver decodes
    (Seide 2014, Karimireddy 2019): the rounding error of this step is added in the next one, so
    that all that has ever been sent differs from the sum of the inputs by the residual alone, up to
    2^-24 of each x and of each residual (2^-9 where it is kept in bf16).

    Rounding is to nearest, ties to even; with a ``seed`` at random, up with a probability that is
    the distance from the lower neighbour, so that the mean is x. Element i draws bits of
    Philox4x32-10 (Salmon 2011) by ``position`` + i: the parts of one tensor that are quantized
    apart draw what the whole would. The same bits on all devices.

    Bounds: |x - carried| <= s / 2 (int8), |x| / 16 + s / 1,024 (e4m3), |x| / 8 + s / 131,072
    (e5m2), |x| / 2,048 + 2^-25 (fp16), |x| / 256 + 2^-134 (bf16), each times 1 + 2^-14, plus
    2^-149; at random twice that. Zero stays zero. A block whose s would be below 2^-126 is sent as
    zeros and stays in the residual. A block with a value that isn't finite has the scale NaN, and
    all of it arrives as NaN; the residual of the block stays as it was. fp16 and bf16: what
    overflows arrives as infinity, and the residual of that element stays as it was.

    On the host it is done on return; on a GPU it is queued on torch's current stream.

    Args:
        source: The values, n elements of any floating dtype.
        wire: A uint8 array of ``layout.wire_layout(n, format, block).nbytes`` bytes, at an address
            that is a multiple of 4; all of it is written, the padding with 0.
        format: The wire format: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2" or "int8".
        block: The number of values of an 8-bit format that share a scale.
        scale: A number, or a float32 array of one element on the same device, read when the kernel
            runs.
        residual: The rounding errors of the step before, float32 or bfloat16, n elements. None: no
            error feedback.
        seed: 0 to 2^64 - 1: round at random; take another seed in each step. None: round to
            nearest.
        position: The place of the first element in the whole, for the random bits.
        parts: The parts of ``source`` (and of ``residual``) that each get a wire buffer of their
            own in ``wire``, by one kernel, with the bits that a call for each of them would give.
            ``wire`` then has at least the bytes up to the end of the last part's; what lies between
            two wires isn't written.

    Raises:
        InvalidArgument: For arrays, formats and numbers that can't be used.
    """
    launch = plan_quantize(
        source, wire, format=format, block=block, scale=scale, residual=residual, seed=seed, position=position,
        parts=parts,
    )  # fmt: skip
    if launch.args.work.tiles:
        launch()


def plan_quantize(
    source, wire, *, format, block=256, scale=1.0, residual=None, seed=None, position=0, parts=None
) -> Launch:
    """Check everything and return the quantization as a `Launch`; another seed may be set in
    ``launch.args.to``.
    """
    op = "quantize"
    device = _device_of(source, op)
    reader = Reader(device, owner="source")
    values = _floating_place(reader, source, op, "source", writes=False)
    where = _parts(parts, values.count, format, block, op)
    factor = _scale(scale, reader, op)
    to, places = _encoder(wire, residual, values.count, where, format, block, seed, position, reader, op)
    _check_overlaps(places, {"source": values} | factor.read, op)
    args = abi.QuantizeArgs(
        abi.Work(where.tiles, 0, 0), to, where.args, values.ptr, factor.ptr, factor.value, values.code, 0
    )
    kernel = abi.QUANTIZE if _is_plain(to) else abi.QUANTIZE_FEEDBACK
    return Launch(kernel, args, device, (source, wire, scale, residual))


def dequantize(
    wire,
    out,
    *,
    format: str,
    block: int = 256,
    scale=1.0,
    add: bool = False,
    statistics: Statistics | None = None,
    parts: WireParts | None = None,
) -> None:
    """Decode a wire buffer into an array. It is `reduce_wires` of one wire.

    out = element * s * scale, in fp32, rounded once to ``out``'s dtype. On the host it is done on
    return; on a GPU it is queued on torch's current stream.

    Args:
        wire: The buffer, as `quantize` wrote it for as many values as ``out`` has.
        out: An array of any floating dtype.
        format: As in `quantize`.
        block: As in `quantize`.
        scale: As in `quantize`.
        add: Add to what is in ``out``.
        statistics: See `Statistics`; a block that was sent with a value that isn't finite counts as
            a whole.
        parts: The parts of ``out`` that each have a wire buffer of their own in ``wire``, see
            `quantize`; one kernel decodes them all.

    Raises:
        InvalidArgument: As in `quantize`.
    """
    _decode([wire], out, format, block, scale, None, add, statistics, "dequantize", parts)


def reduce_wires(
    wires,
    out,
    *,
    format: str,
    block: int = 256,
    scale=1.0,
    average_over: int | None = None,
    add: bool = False,
    statistics: Statistics | None = None,
) -> None:
    """Sum the values of wire buffers into an array, in one pass.

    out = (wires[0] + wires[1] + ...) / average_over * scale, summed in fp32 in this order and
    rounded once to ``out``'s dtype. Otherwise as `dequantize`.

    Args:
        wires: A sequence of uint8 arrays, or a `WireTable`.
        out: An array of any floating dtype.
        format: As in `quantize`.
        block: As in `quantize`.
        scale: As in `quantize`.
        average_over: What the sum is divided by. None: 1.
        add: Add to what is in ``out``.
        statistics: As in `dequantize`.
    """
    _decode(wires, out, format, block, scale, average_over, add, statistics, "reduce_wires")


def requantize(
    wires,
    out,
    *,
    count: int,
    format: str,
    block: int = 256,
    scale=1.0,
    average_over: int | None = None,
    residual=None,
    seed: int | None = None,
    position: int = 0,
) -> None:
    """Sum the values of wire buffers and round the sum to one wire buffer, in one pass.

    The middle of a compressed all-reduce: the bits are those of `reduce_wires` into fp32 and
    `quantize` of that, with nothing in between written to memory. What is rounded is x = sum /
    average_over * scale + residual; for the bounds see `quantize`.

    Args:
        wires: A sequence of uint8 arrays, or a `WireTable`, all of one format and block.
        out: One more such buffer, or one of them.
        count: The number of values of each buffer, as they were quantized: a size of wire fits
            several counts, and elements past the wires' own are padding.
        format: As in `quantize`.
        block: As in `quantize`.
        scale: As in `quantize`.
        average_over: What the sum is divided by. None: 1.
        residual: As in `quantize`.
        seed: As in `quantize`.
        position: As in `quantize`.
    """
    launch = plan_requantize(
        wires, out, count=count, format=format, block=block, scale=scale, average_over=average_over, residual=residual,
        seed=seed, position=position,
    )  # fmt: skip
    if launch.args.work.tiles:
        launch()


def plan_requantize(
    wires, out, *, count, format, block=256, scale=1.0, average_over=None, residual=None, seed=None, position=0
) -> Launch:
    """Check everything and return the requantization as a `Launch`, as `plan_quantize` does."""
    op = "requantize"
    count = _whole(count, "count", 0, _POSITIONS - 1, op)
    where = _parts(None, count, format, block, op)
    table, reader, read, from_ = _decoder(wires, count, where, format, block, scale, average_over, op)
    to, places = _encoder(out, residual, count, where, format, block, seed, position, reader, op, wire_is="out")
    _check_overlaps(places, read, op, in_place="out")
    args = abi.RequantizeArgs(abi.Work(where.tiles, 0, 0), from_, to)
    kernel = abi.REQUANTIZE if _is_plain(to) else abi.REQUANTIZE_FEEDBACK
    return Launch(kernel, args, table.device, (table, out, scale, residual), table.rows)


def plan_dequantize(wire, out, *, format, block=256, scale=1.0, parts=None) -> Launch:
    """Check everything and return the dequantization as a `Launch`, which doesn't move ``out``'s
    version counter.
    """
    return _plan_decode([wire], out, format, block, scale, None, False, None, "dequantize", parts)[0]


def _decode(wires, out, format, block, scale, average_over, add, statistics, op, parts=None):
    launch, device, values = _plan_decode(wires, out, format, block, scale, average_over, add, statistics, op, parts)
    args = launch.args
    tiles = args.work.tiles
    if statistics is not None:
        statistics.begin(args.work, device, op, values.overlaps)
    if tiles:
        launch()
        bump_versions([out])
    if statistics is not None:
        statistics.finish(tiles)


def _plan_decode(wires, out, format, block, scale, average_over, add, statistics, op, parts):
    device = _device_of(out, op)
    values = _floating_place(Reader(device, owner="out"), out, op, "out", writes=True)
    where = _parts(parts, values.count, format, block, op)
    table, _, read, from_ = _decoder(wires, values.count, where, format, block, scale, average_over, op)
    if table.device != device:
        raise InvalidArgument(f"out is on {device}, the wires on {table.device}: they must be on one device", op=op)
    _check_overlaps({"out": values}, read, op)
    if statistics is not None:
        check_statistics(statistics, op)
    work = abi.Work(where.tiles, 0, 0)
    args = abi.DequantizeArgs(work, from_, where.args, values.ptr, values.code, abi.ADD if add else 0)
    kernel = abi.REDUCE_WIRES if from_.wire_count > 1 else abi.DEQUANTIZE
    return Launch(kernel, args, device, (table, out, scale), table.rows), device, values


class _Parts(NamedTuple):
    """What a kernel is told of the parts; of an array in one piece, too."""

    args: abi.Parts
    numel: int  # of part 0
    nbytes: int  # of all wires
    tiles: int
    several: bool

    def check_size(self, nbytes: int, what: str, count: int, format, block, op) -> None:
        """Refuse a wire buffer of another size, or which is too small for all parts' wires."""
        if nbytes < self.nbytes or (nbytes > self.nbytes and not self.several):
            raise InvalidArgument(_wrong_size(what, nbytes, count, self.nbytes, format, block), op=op)


def _parts(parts: WireParts | None, count: int, format, block, op) -> _Parts:
    layout = _layout(count, format, block, op)
    if parts is None:
        return _Parts(abi.Parts(count, count, 0), count, layout.nbytes, count_tiles(count), False)
    if not isinstance(parts, WireParts):
        raise InvalidArgument(f"parts must be a WireParts, not {type(parts).__name__}", op=op)
    return _Parts(*parts.read(count, format, block, op), True)


def _decoder(wires, count, where: _Parts, format, block, scale, average_over, op):
    """Return the table of the wires, a reader for their device, what is read, and the kernel's
    arguments about that.
    """
    table = WireTable._of(wires, op)
    where.check_size(table.nbytes, "wire" if op == "dequantize" else "wire 0", count, format, block, op)
    reader = Reader(table.device, owner="wire 0")
    factor = _scale(scale, reader, op)
    over = 0 if average_over is None else _whole(average_over, "average_over", 1, (1 << 31) - 1, op)
    name = "wire" if op == "dequantize" else "wire {}"
    read = {name.format(index): place for index, place in enumerate(table._places)} | factor.read
    first = table._places[0].ptr
    code = _CODES[format]
    at = table.rows.address if table.rows is not None else 0
    args = abi.Decoder(at, first, len(table), where.numel, factor.ptr, factor.value, code, block, over, 0)
    return table, reader, read, args


def _encoder(wire, residual, count, where: _Parts, format, block, seed, position, reader, op, wire_is="wire"):
    """Return the kernel's arguments about the wire that is written, and the places that they
    cover.
    """
    place = _check_wire(read_array(reader, wire, op, wire_is, writes=True), op, wire_is)
    where.check_size(place.nbytes, wire_is, count, format, block, op)
    places = {wire_is: place}
    left = None
    if residual is not None:
        left = places["residual"] = read_array(reader, residual, op, "residual", writes=True)
        if left.dtype not in ("float32", "bfloat16"):
            raise InvalidArgument(f"residual is {left.dtype}: it must be float32 or bfloat16", op=op)
        if left.count != count:
            whose = "source" if op == "quantize" else "each wire"
            raise InvalidArgument(f"residual has {left.count} elements, {whose} {count}", op=op)
        _aligned(left, 4 if left.dtype == "float32" else 2, "residual", op)
    if seed is not None:
        seed = _whole(seed, "seed", 0, _SEEDS - 1, op)
    position = _whole(position, "position", 0, _POSITIONS - 1 - count, op)
    return (
        abi.Encoder(
            place.ptr,
            left.ptr if left else 0,
            where.numel,
            seed or 0,
            position,
            _CODES[format],
            block,
            left.code if left else 0,
            0 if seed is None else 1,
        ),
        places,
    )


def _is_plain(to: abi.Encoder) -> bool:
    """Return whether a wire is written without a residual and rounded to nearest."""
    return not to.residual and not to.stochastic


def _layout(count, format, block, op) -> WireLayout:
    if not hasattr(type(block), "__index__"):  # 256.0 is in (128, 256, 512)
        raise InvalidArgument(f"block must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {shown(block)}", op=op)
    try:
        return wire_layout(count, format, block)
    except (TypeError, ValueError) as error:  # what no dictionary can have as a key; an integer that isn't printed
        message = f"format {shown(format)} and block {shown(block)}: {error}"
        raise InvalidArgument(getattr(error, "message", message), op=op) from None


def _wrong_size(what, nbytes, count, needed: int, format, block):
    blocks = f" in blocks of {block}" if WIRE_FORMATS[format].scaled else ""
    return f"{what} has {nbytes} bytes, {count} values as {format}{blocks} need {needed} (layout.wire_layout)"


def _check_wire(place: Buffer, op, what) -> Buffer:
    if place.dtype != "uint8":
        raise InvalidArgument(f"{what} is {place.dtype}: a wire buffer is uint8 (use .view(torch.uint8))", op=op)
    return _aligned(place, 4, what, op)


def _floating_place(reader: Reader, array, op, what, *, writes) -> Buffer:
    place = read_array(reader, array, op, what, writes=writes)
    if place.code not in FLOATING or place.dtype not in DTYPE_NAMES.values():
        raise InvalidArgument(f"{what} is {place.dtype}: only floating dtypes have wire formats", op=op)
    return _aligned(place, ITEMSIZE[place.code], what, op)


def _aligned(place: Buffer, alignment, what, op) -> Buffer:
    if place.nbytes and place.ptr % alignment:
        raise InvalidArgument(f"{what} begins at an address that is no multiple of {alignment} bytes", op=op)
    return place


def _device_of(array, op) -> torch.device:
    device = device_of(array)
    return torch.device("cpu") if device.type == "meta" else device  # a later check refuses it


def _scale(scale, reader: Reader, op) -> _Scale:
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        try:
            value = float(scale)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise InvalidArgument(f"scale must be finite, not {shown(scale)}", op=op)
        if abs(value) >= FP32_OVERFLOW:
            raise InvalidArgument(f"scale {value} is infinite in fp32, in which values are multiplied", op=op)
        return _Scale(value, None)
    if scale is None or isinstance(scale, bool | str | bytes):
        raise InvalidArgument(f"scale must be a number or a float32 array of one element, not {shown(scale)}", op=op)
    place = read_array(reader, scale, op, "scale", writes=False)
    if place.dtype != "float32" or place.count != 1:
        raise InvalidArgument(
            f"scale is {place.dtype} of {place.count} elements: an array must be one float32, else use a float", op=op
        )
    return _Scale(1.0, _aligned(place, 4, "scale", op))


def _whole(value, what, least, most, op) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        raise InvalidArgument(f"{what} must be a whole number from {least} to {most}, not {shown(value)}", op=op)
    return number


def _check_overlaps(written: dict[str, Buffer], read: dict[str, Buffer], op, in_place: str | None = None) -> None:
    """Refuse overlaps of what is written with anything else, except that ``in_place`` may be one of
    the wires.
    """
    seen: dict[str, Buffer] = {}
    for name, place in written.items():
        apart = {
            other: its
            for other, its in read.items()
            if name != in_place or its.ptr != place.ptr or its.nbytes != place.nbytes or other == "scale"
        }
        others = apart | seen
        for other, its in others.items():
            if place.nbytes and its.nbytes and place.ptr < its.ptr + its.nbytes and its.ptr < place.ptr + place.nbytes:
                raise InvalidArgument(f"{name} overlaps {other}: what is written must have memory of its own", op=op)
        seen[name] = place
