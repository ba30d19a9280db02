"""pack and unpack: many tensors to and from one flat buffer in one launch, and measure: their
statistics alone.

pack and unpack can scale, cast, and take the norm and the count of non-finite values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy
import torch

from ..arrays import Reader
from ..errors import InvalidArgument
from . import abi
from .dtypes import FP32_OVERFLOW
from .execution import Statistics, bump_versions, check_statistics, run
from .scalars import read_scale
from .table import Table
from .tensor_list import device_of

__all__ = ["Table", "measure", "pack", "unpack"]


def pack(
    tensors: Table | Iterable,
    flat,
    *,
    offsets: Sequence[int] | None = None,
    scale: float | torch.Tensor = 1.0,
    statistics: Statistics | None = None,
) -> None:
    """Copy tensors into a flat buffer, each at its offset, times ``scale`` and cast to the buffer's
    dtype.

    The padding behind each tensor, up to the next 16 bytes, becomes 0; with offsets of the caller's
    own nothing outside of the tensors' places is written. With the same dtype on both sides, scale
    1 and no statistics, bytes move as they are, NaN payloads too. Otherwise elements pass through
    fp32 (fp64 where either side is), in which they are multiplied by the scale, and are rounded
    once, to nearest even; fp8 saturates. Source and destination may be the same memory only where a
    tensor lies at its own place in the flat buffer.

    On the host it is done when this returns; on a GPU it is queued on torch's current stream.
    Autograd doesn't see what is written.

    Args:
        tensors: A list as `Table` takes it, or a `Table`, which saves reading the list each time.
        flat: A contiguous array on the same device of at least the table's ``total`` elements; what
            follows those is not written.
        offsets: As in `Table`.
        scale: A finite number, or an fp32 tensor of one element on the device, read when the kernel
            runs.
        statistics: Gets the sum of squares and the count of non-finite elements, padding not
            counted; for floating types.

    Raises:
        InvalidArgument: Before anything is written.
    """
    _cast("pack", 0, tensors, flat, offsets, scale, statistics)


def unpack(
    flat,
    tensors: Table | Iterable,
    *,
    offsets: Sequence[int] | None = None,
    scale: float | torch.Tensor = 1.0,
    add: bool = False,
    statistics: Statistics | None = None,
) -> None:
    """Copy parts of a flat buffer into tensors, times ``scale`` and cast to each tensor's dtype;
    the reverse of `pack`.

    The tensors must not overlap. Their version counters move, so that autograd and the optimizers'
    master weights notice.

    Args:
        flat: The flat buffer, as in `pack`.
        tensors: The tensors, as in `pack`.
        offsets: As in `Table`.
        scale: As in `pack`.
        add: Add to what is in the tensors; product and sum are each rounded in fp32 (fp64), and the
            sum once more to the tensor's dtype.
        statistics: Gets the statistics of what is read, after scaling, and with ``add`` before
            adding; non-finite elements count as such by the destination's dtype.
    """
    _cast("unpack", abi.FROM_FLAT | (abi.ADD if add else 0), tensors, flat, offsets, scale, statistics)


def measure(tensors: Iterable, statistics: Statistics) -> None:
    """Take the sum of squares and the count of non-finite elements of many tensors in one launch,
    which reads each of them once and writes nothing else.

    On the host it is done when this returns; on a GPU it is queued on torch's current stream.

    Args:
        tensors: As in `pack`, of floating types, which may differ. With fp64 among them all are
            squared and added in fp64.
        statistics: Gets the result.

    Raises:
        InvalidArgument: For what has no statistics.
    """
    tensors, op = list(tensors), "measure"
    check_statistics(statistics, op)
    wide = any(each.dtype in (torch.float64, numpy.float64) for each in tensors if hasattr(each, "dtype"))
    table = Table.of_call(tensors, torch.float64 if wide else torch.float32, None, op, statistics.device)
    args = abi.CastArgs(
        abi.Work(table.tiles, 0, 0), 0, len(table.tensors), 0, 0, 1.0, table.type, abi.MEASURE
    )  # fmt: skip
    statistics.begin(args.work, table.device, op)
    if table.tiles:
        args.tensors = table.rows.address
        run(abi.CAST_WIDE if wide else abi.CAST, args, table.device, table.rows)
    statistics.finish(table.tiles)


def _cast(op, flags, tensors, flat, offsets, scale, statistics) -> None:
    if isinstance(tensors, Table):
        table = tensors
        if offsets is not None:
            raise InvalidArgument("the table has offsets of its own: make another table", op=op)
        table.verify(op)
    else:
        table = _table_of_call(tensors, flat, offsets, op)
    unpacks = flags & abi.FROM_FLAT
    if not table.tensors and table.device != device_of(flat):
        table = Table.of_call((), table.dtype, (), op, device_of(flat))
    place = table.place_flat(flat, op, writes=not unpacks)
    if unpacks:
        table.check_destinations(op)
    scale_at = 0
    if type(scale) is not float or not -FP32_OVERFLOW < scale < FP32_OVERFLOW:
        scale, scale_at = _parse_scale(scale, table, place, unpacks, op)
    if not table.floating:
        _check_copy(table, flags, scale, scale_at, statistics is not None, op)
    args = abi.CastArgs(abi.Work(table.tiles, 0, 0), 0, len(table.tensors), place, scale_at, scale, table.type, flags)
    if statistics is not None:
        check_statistics(statistics, op)
        statistics.begin(
            args.work,
            table.device,
            op,
            table.overlaps if unpacks else lambda ptr, nbytes: ptr < place + table.nbytes and place < ptr + nbytes,
        )
    if table.tiles:
        args.tensors = table.rows.address
        copies = scale == 1.0 and not scale_at and statistics is None and not flags & abi.ADD
        run(table.kernel(unpacks, copies), args, table.device, table.rows)
        if unpacks:
            bump_versions(table.tensors)
    if statistics is not None:
        statistics.finish(table.tiles)


def _table_of_call(tensors, flat, offsets, op) -> Table:
    device = device_of(flat)
    # The message for something that is no array names the flat buffer, not tensor 0.
    Reader(device).read(flat, op, writes=False, what="the flat buffer")
    return Table.of_call(tensors, flat.dtype, offsets, op, device)


def _parse_scale(scale, table, flat, unpacks, op) -> tuple[float, int]:
    """Return a scale as a number, and the address of one more factor or 0."""
    number, place = read_scale(scale, Reader(table.device, owner="the flat buffer"), table.wide, op)
    if place is None:
        return number, 0
    if table.overlaps(place.ptr, 4) if unpacks else place.ptr < flat + table.nbytes and flat < place.ptr + 4:
        raise InvalidArgument("the scale lies inside of what is written: use a copy of it", op=op)
    return number, place.ptr


def _check_copy(table, flags, scale, scale_at, statistics, op) -> None:
    wrong = "a scale" if scale != 1.0 or scale_at else "adding" if flags & abi.ADD else statistics and "statistics"
    if wrong:
        raise InvalidArgument(f"a flat buffer of {table.dtype} is only copied, without {wrong}", op=op)
