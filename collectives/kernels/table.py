"""Tables of tensors and their places in one flat buffer, checked once, as the kernels read them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy
import torch

from ..arrays import DTYPE_NAMES, Reader, shown
from ..errors import InvalidArgument
from ..layout import ALIGNMENT, TILE, bucket_layout, check_offsets
from . import abi
from .dtypes import CODES, FLOATING, WIDTHS, parse_dtype
from .rows import Rows
from .tensor_list import TensorList, device_of, read_array

__all__ = ["Table", "casts_between"]

_BYTE, _DOUBLE = CODES["uint8"], CODES["float64"]

# Kernels of the common pairs (from, to) of types.
_PAIRS = {
    tuple(CODES[name] for name in names): kernel
    for names, kernel in {
        ("float32", "float32"): abi.CAST_F32_F32,
        ("float32", "bfloat16"): abi.CAST_F32_BF16,
        ("float32", "float16"): abi.CAST_F32_F16,
        ("float32", "float8_e4m3fn"): abi.CAST_F32_E4M3,
        ("float32", "float8_e5m2"): abi.CAST_F32_E5M2,
        ("bfloat16", "float32"): abi.CAST_BF16_F32,
        ("bfloat16", "bfloat16"): abi.CAST_BF16_BF16,
        ("float16", "float32"): abi.CAST_F16_F32,
    }.items()
}


class Table:
    """Tensors and their places in a flat buffer, made once for any number of ``pack`` and
    ``unpack`` calls.

    ``len()`` is the number of tensors. A table holds its tensors, and each call checks that they
    still lie where they did. A short one is passed to a GPU with each launch; a longer one is
    copied there at its first use on each stream. The host waits for neither.

    Args:
        tensors: torch tensors, NumPy or CuPy arrays, contiguous, all on one device, of any sizes
            from 0 elements.
        dtype: The dtype of the flat buffer, torch's or NumPy's, or its name. With a floating one
            (float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2) the tensors may have
            any of these types and are cast; with another one they must have the same and are
            copied. ``torch.uint8`` takes tensors of all types, as bytes: the state of a module in
            one buffer, say.
        offsets: The place of each tensor's first element, in elements of the flat buffer, in any
            order and with any gaps. None: each tensor begins at the next multiple of 16 bytes.

    Attributes:
        tensors: The tensors.
        dtype: The dtype of the flat buffer, torch's, or NumPy's where torch has none.
        device: The device of the tensors.
        offsets: The places of the tensors' first elements.
        total: The elements that the flat buffer must have at least, with the last tensor's padding.
        nbytes: The same in bytes.

    Raises:
        InvalidArgument: Names the index of the tensor that can't be used.
    """

    def __init__(
        self, tensors: Iterable, dtype: torch.dtype | numpy.dtype | str, *, offsets: Sequence[int] | None = None
    ):
        self._make(tensors, dtype, offsets, "Table", None)

    @classmethod
    def of_call(cls, tensors, dtype, offsets, op: str, device: torch.device) -> Table:
        """Make a table for one call of ``op`` with a flat buffer on a device."""
        table = cls.__new__(cls)
        table._make(tensors, dtype, offsets, op, device)
        return table

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<Table of {len(self)} tensors, {self.total} elements of {self._name} on {self.device}>"

    def __reduce__(self):
        # A copy's tensors lie elsewhere, so its addresses are other ones.
        offsets = None if self._pads else self.offsets
        return functools.partial(type(self), offsets=offsets), (self.tensors, self.dtype)

    # ---- Construction.
    def _make(self, tensors, dtype, offsets, op, device) -> None:
        if isinstance(tensors, (torch.Tensor, numpy.ndarray, str, bytes, dict)) or not isinstance(tensors, Iterable):
            raise InvalidArgument(f"the tensors must come as a list of tensors, not as {type(tensors).__name__}", op=op)
        self.tensors = tuple(tensors)
        self.dtype, self._name, self.itemsize = parse_dtype(dtype, op)
        self.type = CODES.get(self._name, abi.OPAQUE + self.itemsize)
        self.floating = self.type in FLOATING
        owner = "the flat buffer"
        if device is None:
            device, owner = device_of(self.tensors[0]) if self.tensors else torch.device("cpu"), "tensor 0"
        self.device = device
        self._reader = Reader(device, owner="the tensors")
        self._list = TensorList(self.tensors, Reader(device, owner=owner), op, "tensor {}".format)
        counts, types = self._check_types(op)
        if offsets is None:
            self.offsets, self.total = bucket_layout(counts, self.itemsize)
        else:
            self.offsets, self.total = _read_offsets(offsets, counts, op)
        self.nbytes = self.total * self.itemsize
        self._pads = offsets is None
        self._fill(self._list.addresses, counts, types, op)
        self._are_destinations = False
        self._checked_flat = None

    def _check_types(self, op) -> tuple[list[int], list[int]]:
        """Return the counts, of bytes where the flat buffer is of bytes, and the types of the tensors.

        Raise the reason for one that can't be cast or copied.
        """
        found = self._list
        if self.floating and FLOATING.issuperset(found.codes):
            return found.counts, found.codes
        if self.type == _BYTE:
            return [each.nbytes for each in self.tensors], [self.type] * len(found)
        if self.floating or not {self.type}.issuperset(found.codes):
            for index, code in enumerate(found.codes):
                name = found.buffer(index).dtype
                if name != self._name and not (self.floating and code in FLOATING):
                    hint = self._dtype_hint(name)
                    raise InvalidArgument(f"tensor {index} is {name}, the flat buffer {hint}", op=op)
        return found.counts, [self.type] * len(found)

    def _dtype_hint(self, name: str) -> str:
        if self.floating or CODES.get(name) in FLOATING:
            floating = ", ".join(DTYPE_NAMES[code] for code in sorted(FLOATING))
            return f"{self._name}: only {floating} are cast to one another; put {name} into a flat buffer of its own"
        return f"{self._name}: such types are only copied; use a flat buffer of {name}, or of uint8, which takes all"

    def _fill(self, pointers, counts, types, op) -> None:
        """Make the rows that the kernels read."""
        rows = numpy.empty(len(counts), dtype=abi.TENSOR)
        rows["data"] = pointers
        rows["count"] = count = numpy.array(counts, dtype=numpy.int64)
        rows["offset"] = self.offsets
        tiles = -(-count // TILE)
        ends = numpy.cumsum(tiles)
        rows["first_tile"] = ends - tiles
        rows["type"] = kinds = numpy.array(types, dtype=numpy.int32)
        rows["padding"] = -count % (ALIGNMENT // self.itemsize) if self._pads else 0
        self.tiles = int(ends[-1]) if len(counts) else 0
        self.wide = self.type == _DOUBLE or _DOUBLE in types
        self.common_type = types[0] if types and (kinds == types[0]).all() else None
        widths = WIDTHS[kinds]
        self._starts = rows["data"].astype(numpy.int64)
        self._ends = self._starts + count * widths
        misaligned = (self._starts % widths).nonzero()[0] if self.floating else ()
        if len(misaligned):
            index = int(misaligned[0])
            raise InvalidArgument(
                f"tensor {index} begins at address {pointers[index]:#x}, which is no multiple of its elements' "
                f"{widths[index]} bytes: copy it to memory of its own",
                op=op,
            )
        self._low = int(self._starts.min(initial=1 << 62, where=count > 0))
        self._high = int(self._ends.max(initial=0, where=count > 0))
        self.rows = Rows(rows, self.device)

    # ---- Checks of each use.
    def verify(self, op: str = "Table") -> None:
        """Raise ``InvalidArgument`` where a tensor no longer lies where it did when the table was
        made.
        """
        index = self._list.find_moved()
        if index is not None:
            raise InvalidArgument(
                f"tensor {index} doesn't lie where it did when the table was made: its memory was freed, resized "
                "or exchanged, or its strides were changed; make the table again",
                op=op,
            )

    def place_flat(self, flat, op: str, *, writes: bool) -> int:
        """Return the address of a flat buffer that fits."""
        place = read_array(self._reader, flat, op, "the flat buffer", writes=writes)
        if place.dtype != self._name:
            raise InvalidArgument(f"the flat buffer is {place.dtype}, the table was made for {self._name}", op=op)
        ptr, count = place.ptr, place.count
        if count < self.total:
            raise InvalidArgument(
                f"the flat buffer has {count} elements, the tensors need {self.total} of {self._name} (their padding "
                "included)",
                op=op,
            )
        if self.floating and ptr % self.itemsize:
            raise InvalidArgument(
                f"the flat buffer begins at address {ptr:#x}, which is no multiple of its elements' "
                f"{self.itemsize} bytes",
                op=op,
            )
        if self._low < ptr + self.nbytes and ptr < self._high and ptr != self._checked_flat:
            self._check_flat_overlap(ptr, op)
        return ptr

    def _check_flat_overlap(self, ptr: int, op) -> None:
        """Refuse tensors that overlap the flat buffer other than at their own offsets in it."""
        width = self.itemsize
        overlaps = (self._starts < ptr + self.nbytes) & (self._ends > ptr) & (self._starts < self._ends)
        for index in map(int, overlaps.nonzero()[0]):
            if self._list.addresses[index] != ptr + self.offsets[index] * width or self.common_type != self.type:
                raise InvalidArgument(
                    f"tensor {index} overlaps the flat buffer: they must lie apart, or the tensor just at its own "
                    "place in it, with its type",
                    op=op,
                )
        self._checked_flat = ptr

    def check_destinations(self, op: str) -> None:
        """Refuse tensors that are read-only or overlap each other."""
        if not self._list.all_torch:
            for index, tensor in enumerate(self.tensors):
                if isinstance(tensor, numpy.ndarray) and not tensor.flags.writeable:
                    raise InvalidArgument(f"tensor {index} is a read-only NumPy array and can't take a result", op=op)
        if self._are_destinations:
            return
        index = (self._starts < self._ends).nonzero()[0]
        index = index[numpy.argsort(self._starts[index], kind="stable")]
        starts, ends = self._starts[index], self._ends[index]
        over = (numpy.maximum.accumulate(ends)[:-1] > starts[1:]).nonzero()[0]
        if len(over):
            at = int(over[0])
            first, second = sorted((int(index[int(ends[: at + 1].argmax())]), int(index[at + 1])))
            raise InvalidArgument(f"tensor {second} overlaps tensor {first}: both would be written", op=op)
        self._are_destinations = True

    def overlaps(self, ptr: int, nbytes: int) -> bool:
        """Return whether a range of memory overlaps a tensor."""
        return bool(((self._starts < ptr + nbytes) & (self._ends > ptr) & (self._starts < self._ends)).any())

    # ---- Launch.
    def kernel(self, unpacks: bool, copies: bool) -> abi.Kernel:
        """Return the kernel for these types. On the host all types have one kernel."""
        if copies and self.common_type == self.type:
            return abi.CAST_COPY
        if self.wide:
            return abi.CAST_WIDE
        return _cast(self.type, self.common_type) if unpacks else _cast(self.common_type, self.type)


def _cast(source: int | None, to: int | None) -> abi.Kernel:
    """Return the kernel for tensors of one type, NCCL's code; None: they are of several types."""
    return _PAIRS.get((source, to), abi.CAST)


def casts_between(one: int, other: int) -> set[abi.Kernel]:
    """Return the kernels that tables may need whose tensors and flat buffer are of two floating types."""
    return {abi.CAST_WIDE} if _DOUBLE in (one, other) else {_cast(one, other), _cast(other, one)}


def _read_offsets(offsets, counts, op):
    try:
        return check_offsets(offsets, counts, op=op)
    except InvalidArgument:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # no sequence; an integer of thousands of digits
        raise InvalidArgument(f"the offsets must be whole numbers, not {shown(offsets)}", op=op) from error
