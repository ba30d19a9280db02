"""Reader of arrays for the engines: each becomes an address, a count and a dtype, after all checks.

torch tensors, NumPy arrays and CuPy arrays are read by pointer and never copied. An array that
can't be used where it lies is an ``InvalidArgument`` that says how to correct it.

Plain arrays (exact torch.Tensor, torch.nn.Parameter and numpy.ndarray, dense, contiguous, of
NCCL's dtypes) are read in C, by `_nccl.ArrayReader`: tensors through the DLPack exchange table that
torch has since 2.10, in a tenth of a microsecond and with nothing allocated. Where torch has no
such table, tensors are read by their Python attributes. So is everything that isn't plain, and
everything that is refused. That takes about a microsecond, and the result is the same.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from typing import NamedTuple
from zlib import crc32

import numpy
import torch

from ._nccl import DTYPES, OPS, ArrayReader
from .errors import InvalidArgument

__all__ = [
    "DTYPE_NAMES",
    "ITEMSIZE",
    "TORCH_CODES",
    "Buffer",
    "Reader",
    "dtype_name",
    "kind_of",
    "parse_op",
    "parse_rank",
    "check_premul_scalar",
    "shown",
]

# Names by which torch, NumPy and ml_dtypes call the 12 types that NCCL can reduce.
_CODES = {name: code for name, code in DTYPES.items() if not name.startswith("float8")}
_CODES["float8_e4m3fn"] = DTYPES["float8e4m3"]
_CODES["float8_e5m2"] = DTYPES["float8e5m2"]
DTYPE_NAMES = {code: name for name, code in _CODES.items()}

TORCH_CODES = {getattr(torch, name): code for name, code in _CODES.items() if hasattr(torch, name)}
_TORCH_NAMES = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if type(dtype) is torch.dtype
}
ITEMSIZE = {code: dtype.itemsize for dtype, code in TORCH_CODES.items()}
_UINT8 = DTYPES["uint8"]
_FIRST_TAG = 1 << 16
_LIMITS = {
    code: (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype) for dtype, code in TORCH_CODES.items()
}
_STRIDED = torch.strided
_TENSOR = torch.Tensor
_PARAMETER = torch.nn.Parameter
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # a capsule, since torch 2.10
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}

_DTYPE_ADVICE = {
    "bool": 'reduce array.to(torch.uint8) with op "max" (any) or "min" (all)',
    "complex64": "reduce torch.view_as_real(array)",
    "complex128": "reduce torch.view_as_real(array)",
}


class Buffer(NamedTuple):
    """An array's address and size, and the units in which it is sent.

    The units are elements where NCCL has the array's dtype, else bytes.
    """

    ptr: int
    count: int  # elements
    nbytes: int
    dtype: str  # "float32"
    units: int  # elements of `code`
    code: int

    @property
    def label(self) -> str | None:
        """The dtype's name where the array is sent as bytes, else None.

        By it the ranks can still compare the dtypes.
        """
        return None if self.dtype in _CODES else self.dtype

    @property
    def tag(self) -> int:
        """A number for the dtype that is the same on all ranks.

        NCCL's code, or a number above NCCL's codes.
        """
        return self.code if self.dtype in _CODES else _FIRST_TAG + crc32(self.dtype.encode())

    def overlaps(self, ptr: int, nbytes: int) -> bool:
        """Whether a range of memory overlaps the array."""
        return ptr < self.ptr + self.nbytes and self.ptr < ptr + nbytes

    def part(self, index: int, parts: int) -> int:
        """Return the address of one of `parts` equal parts."""
        return self.ptr + self.nbytes // parts * index


class Reader:
    """Reader of the arrays of one communicator or kernel.

    ``device``: where the arrays must be. ``rank`` and ``owner``: whose they are, for the messages.
    """

    __slots__ = ("_index", "_on_host", "array_reader", "device", "owner", "rank")

    def __init__(self, device: torch.device, rank: int | None = None, owner: str = "the communicator"):
        self.device = device
        self.rank = rank
        self.owner = owner
        self._on_host = device.type == "cpu"
        self._index = device.index
        self.array_reader = ArrayReader(
            _DLPACK_DEVICES.get(device.type, -1),  # any other one: no tensor is read in C
            device.index or 0,
            exchange=_EXCHANGE,
            tensors=(_TENSOR, _PARAMETER),
            is_lazy=_TENSOR.is_neg,
            buffer=numpy.ndarray,
        )

    def read_for_reduction(self, array, op: str) -> tuple[int, int, int]:
        """Return (address, count, dtype code) of an array that is to be reduced in place.

        Raises `InvalidArgument` where it can't be.
        """
        found = self.array_reader.read(array)
        if found is not None:
            return found
        kind = type(array)
        if kind is _TENSOR or kind is _PARAMETER:
            code = TORCH_CODES.get(array.dtype)
            if code is not None:
                ptr = self.plain_address(array)
                if ptr is not None:
                    return ptr, array.numel(), code
        buffer = self.read(array, op, writes=True)
        self.check_reducible(buffer, op)
        return buffer.ptr, buffer.count, buffer.code

    def plain_address(self, array) -> int | None:
        """Return the address of a tensor that can be used where it lies, else None.

        None: `read` must read it, or raises the reason.
        """
        if (
            (array.is_cpu if self._on_host else array.is_cuda and array.get_device() == self._index)
            and array.layout is _STRIDED
            and array.is_contiguous()
            and not array.is_neg()
            and not array.is_nested
        ):
            try:
                return array.data_ptr() or (None if array.numel() else 0)
            except RuntimeError:  # under vmap or grad
                return None
        return None

    def check_reducible(self, buffer: Buffer, op: str) -> None:
        """Refuse a dtype that the engines can't reduce."""
        if buffer.dtype not in _CODES:
            advice = _DTYPE_ADVICE.get(buffer.dtype, "convert it first")
            raise self._invalid(
                op,
                f"can't reduce {buffer.dtype}: {advice}. Reductions take {', '.join(sorted(_CODES, key=_CODES.get))}",
            )

    def read(self, array, op: str, *, writes: bool, what: str = "the array") -> Buffer:
        """Return the `Buffer` of a torch, NumPy or CuPy array, or raise `InvalidArgument`."""
        found = self.array_reader.read(array, writes)
        if found is not None:
            ptr, count, code = found
            return Buffer(ptr, count, count * ITEMSIZE[code], DTYPE_NAMES[code], count, code)
        if isinstance(array, _TENSOR):
            code = TORCH_CODES.get(array.dtype)  # none of these is complex, so there is no lazy conjugate
            ptr = None if code is None else self.plain_address(array)
            if ptr is None:
                return self._read_torch(array, op, what)
            count = array.numel()
            return Buffer(ptr, count, count * ITEMSIZE[code], DTYPE_NAMES[code], count, code)
        if isinstance(array, numpy.ndarray):
            return self._read_numpy(array, op, what, writes)
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(array, cupy.ndarray):
            return self._read_cupy(array, op, what)
        raise self._invalid(op, f"{what} must be a torch tensor, a NumPy array or a CuPy array, not {kind_of(array)}")

    def _read_torch(self, array, op, what):
        if array.is_meta:
            raise self._invalid(op, f"{what} is a meta tensor, which has no data: materialise it on {self.device}")
        if array.is_quantized:
            raise self._invalid(op, f"{what} is quantized ({array.dtype}): send its .int_repr()")
        if array.layout is not _STRIDED or array.is_nested:
            layout = "nested" if array.is_nested else str(array.layout).removeprefix("torch.")
            raise self._invalid(
                op, f"{what} is a {layout} tensor: only dense ones can be sent; use .to_dense() or its parts"
            )
        device = array.device
        if device != self.device and (device.type != "cpu" or not self._on_host):
            raise self._invalid(
                op, f"{what} is on {device}, {self.owner} on {self.device}: use .to({str(self.device)!r})"
            )
        if not array.is_contiguous():
            raise self._invalid(
                op,
                f"{what} of shape {tuple(array.shape)} and strides {array.stride()} isn't contiguous: use "
                ".contiguous(), and copy the result back if it is an output",
            )
        if array.is_conj() or array.is_neg():
            how = "resolve_conj" if array.is_conj() else "resolve_neg"
            raise self._invalid(op, f"{what} is a lazy view whose memory holds other values: use .{how}()")
        count = array.numel()
        try:
            ptr = array.data_ptr()
        except RuntimeError as error:
            raise self._invalid(op, f"{what} ({kind_of(array)}) has no memory of its own: {error}") from error
        if count and not ptr:
            raise self._invalid(op, f"{what} ({kind_of(array)}) has no memory of its own: pass the plain local tensor")
        code = TORCH_CODES.get(array.dtype)
        nbytes = count * array.element_size()
        name = _TORCH_NAMES.get(array.dtype) or str(array.dtype)
        return _make_buffer(ptr, count, nbytes, name, code)

    def _read_numpy(self, array, op, what, writes):
        if not self._on_host:
            raise self._invalid(
                op,
                f"{what} is a NumPy array in host memory, {self.owner} is on {self.device}: use "
                f"torch.from_numpy(array).to({str(self.device)!r})",
            )
        if isinstance(array, numpy.ma.MaskedArray):
            raise self._invalid(op, f"{what} is a masked array, whose mask would be lost: use .filled() or .data")
        dtype = array.dtype
        if dtype.hasobject:
            raise self._invalid(op, f"{what} of dtype {dtype} holds Python objects, which can't be sent by pointer")
        if not array.flags.c_contiguous:
            raise self._invalid(
                op,
                f"{what} of shape {array.shape} and strides {array.strides} isn't contiguous: use "
                "numpy.ascontiguousarray(array), and copy the result back if it is an output",
            )
        interface = array.__array_interface__
        ptr, read_only = interface["data"]
        if writes and read_only:
            raise self._invalid(op, f"{what} is a read-only NumPy array and can't take a result: use .copy()")
        name = dtype.name if dtype.isnative else dtype.str
        return _make_buffer(ptr, array.size, array.nbytes, name, _CODES.get(name))

    def _read_cupy(self, array, op, what):
        index = array.device.id
        if self._on_host or index != self._index:
            raise self._invalid(
                op,
                f"{what} is a CuPy array on cuda:{index}, {self.owner} is on {self.device}: "
                + ("use .get()" if self._on_host else f"copy it there, inside cupy.cuda.Device({self._index})"),
            )
        if not array.flags.c_contiguous:
            raise self._invalid(
                op,
                f"{what} of shape {array.shape} and strides {array.strides} isn't contiguous: use "
                "cupy.ascontiguousarray(array), and copy the result back if it is an output",
            )
        name = array.dtype.name
        return _make_buffer(array.data.ptr, array.size, array.nbytes, name, _CODES.get(name))

    def stats_address(self, share, reduced: Buffer, op: str) -> int:
        """Return the address of the two float64 to which a reduction adds its statistics.

        ``share``: the array with them; ``reduced``: the array that is reduced.
        """
        if not DTYPE_NAMES.get(reduced.code, "").startswith(("float", "bfloat")):
            raise self._invalid(op, f"the array is {reduced.dtype}, of which there is no share: leave share out")
        buffer = self.read(share, op, writes=True, what="share")
        if buffer.dtype != "float64" or buffer.count != 2:
            raise self._invalid(
                op,
                f"share is {buffer.count} x {buffer.dtype}: use torch.zeros(2, dtype=torch.float64), to which the sum "
                "of squares and the count of non-finite elements are added",
            )
        if buffer.overlaps(reduced.ptr, reduced.nbytes):
            raise self._invalid(op, "share overlaps the array: use memory of its own")
        return buffer.ptr

    def check_same_dtype(self, out: Buffer, inp: Buffer, op: str) -> None:
        """Refuse an output of another dtype than the input."""
        if out.dtype != inp.dtype:
            raise self._invalid(op, f"out is {out.dtype} and inp is {inp.dtype}: both must have one dtype")

    def check_size(self, large: Buffer, small: Buffer, size: int, op: str, large_is: str, small_is: str) -> None:
        """Refuse two arrays of which the first isn't ``size`` times as long as the second."""
        if large.count != small.count * size:
            raise self._invalid(
                op,
                f"{large_is} has {large.count} elements and {small_is} has {small.count}: {large_is} must have "
                f"{size} (ranks) x {small.count} = {small.count * size}",
            )

    def check_overlap(self, large: Buffer, small: Buffer, op: str, index: int | None, form: str) -> None:
        """Refuse arrays that share memory, unless ``small`` is part ``index`` of ``large``.

        ``index`` None: the operation has no form in place.
        """
        if not large.nbytes or not small.nbytes:
            return
        if large.ptr + large.nbytes <= small.ptr or small.ptr + small.nbytes <= large.ptr:
            return
        if index is None or small.ptr != large.ptr + index * small.nbytes:
            raise self._invalid(op, f"out and inp overlap; {form}")

    def _invalid(self, op: str, message: str) -> InvalidArgument:
        return InvalidArgument(message, op=op, rank=self.rank)


def dtype_name(tag: int) -> str:
    """Return the name of the dtype with a `Buffer.tag`, as far as this process knows it."""
    if tag in DTYPE_NAMES:
        return DTYPE_NAMES[tag]
    names = {_FIRST_TAG + crc32(name.encode()): name for name in _TORCH_NAMES.values()}
    return names.get(tag, "a dtype that torch doesn't have")


def _make_buffer(ptr, count, nbytes, name, code):
    if code is None:
        return Buffer(ptr, count, nbytes, name, nbytes, _UINT8)
    return Buffer(ptr, count, nbytes, name, count, code)


def kind_of(thing) -> str:
    """Return the name of an object's type for a message."""
    module = type(thing).__module__
    name = type(thing).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def shown(value) -> str:
    """Return the text of a wrong argument for a message, of at most 40 characters.

    There is some text for every object.
    """
    try:
        return f"{value!r:.40}"
    except Exception:  # an integer of thousands of digits, say, isn't printed
        return f"this {kind_of(value)}"


def parse_op(op, *, rank: int, name: str) -> tuple[int, float | None]:
    """Return (op code, scalar) of a name, a number or a torch ReduceOp.

    A number is a premultiplied sum: each rank's input is multiplied by its number, then summed. Its
    code is that of sum, and the caller creates the library's op for the scalar.
    """
    if type(op) is str:
        code = OPS.get(op)
        if code is not None:
            return code, None
    elif isinstance(op, numbers.Real) and not isinstance(op, bool) and type(op).__name__ not in ("bool_", "bool"):
        return OPS["sum"], op if isinstance(op, numbers.Integral) else float(op)
    else:
        found = _torch_op(op)
        if found is not None:
            return found
    raise InvalidArgument(
        f"op must be one of {', '.join(repr(known) for known in OPS)}, a number (premultiplied sum) or the "
        f"torch.distributed.ReduceOp of one of these, not {op!r}",
        op=name,
        rank=rank,
    )


def _torch_op(op):
    if not torch.distributed.is_available():
        return None
    known = torch.distributed.ReduceOp
    if isinstance(op, known.RedOpType):
        code = {"PRODUCT": OPS["prod"]}.get(op.name, OPS.get(op.name.lower()))
        return None if code is None else (code, None)
    if not isinstance(op, known):
        return None
    for name, code in OPS.items():
        if op == getattr(known, "PRODUCT" if name == "prod" else name.upper()):
            return code, None
    if op == known.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, numbers.Real):
            return OPS["sum"], float(factor)
    return None


def check_premul_scalar(scalar, code: int, *, rank: int, name: str) -> int | float:
    """Return the scalar as a value of the dtype; refuse one that the dtype can't hold.

    An integer type would cut 0.5 to 0 without a message.
    """
    limits = _LIMITS[code]
    finite = isinstance(scalar, int) or math.isfinite(scalar)
    if isinstance(limits, torch.finfo):
        if not finite or limits.min <= scalar <= limits.max:
            return float(scalar)
        what = "a number"
    else:
        if finite and scalar == int(scalar) and limits.min <= scalar <= limits.max:
            return int(scalar)
        what = "a whole number"
    raise InvalidArgument(
        f"op {str(scalar)[:40]} isn't a value of {DTYPE_NAMES[code]}, the array's dtype: use {what} from "
        f"{limits.min} to {limits.max}, or an array of another dtype",
        op=name,
        rank=rank,
    )


def parse_rank(value, size: int, what: str, *, rank: int, name: str) -> int:
    """Return a root or peer as an int in [0, ``size``), or raise `InvalidArgument`."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise InvalidArgument(f"{what} must be an int, not {kind_of(value)} {value!r}", op=name, rank=rank)
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{what} must be an int, not {value!r}", op=name, rank=rank) from error
    if not 0 <= number < size:
        raise InvalidArgument(f"{what} {number} isn't a rank: they are 0 to {size - 1}", op=name, rank=rank)
    return number
