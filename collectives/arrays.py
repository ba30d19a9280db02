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

import sys
from functools import partial
from typing import NamedTuple
from zlib import crc32

import numpy
import torch

from ._nccl import DTYPES, ArrayReader
from .errors import InvalidArgument

__all__ = [
    "DTYPE_NAMES",
    "ITEMSIZE",
    "NAMED_DTYPES",
    "TORCH_CODES",
    "TORCH_DTYPES",
    "TORCH_NAMES",
    "Buffer",
    "Reader",
    "dtype_name",
    "dtype_tag",
    "kind_of",
    "shown",
]

# Names by which torch, NumPy and ml_dtypes call the 12 types that NCCL can reduce.
_CODES = {name: code for name, code in DTYPES.items() if not name.startswith("float8")}
_CODES["float8_e4m3fn"] = DTYPES["float8e4m3"]
_CODES["float8_e5m2"] = DTYPES["float8e5m2"]
DTYPE_NAMES = {code: name for name, code in _CODES.items()}

TORCH_CODES = {getattr(torch, name): code for name, code in _CODES.items()}
TORCH_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if type(dtype) is torch.dtype}
NAMED_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}
TORCH_DTYPES = {code: dtype for dtype, code in TORCH_CODES.items()}
ITEMSIZE = {code: dtype.itemsize for dtype, code in TORCH_CODES.items()}
_UINT8 = DTYPES["uint8"]
_FIRST_TAG = 1 << 16
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
        return dtype_tag(self.dtype)

    def overlaps(self, ptr: int, nbytes: int) -> bool:
        """Whether a range of memory overlaps the array."""
        return ptr < self.ptr + self.nbytes and self.ptr < ptr + nbytes

    def part(self, index: int, parts: int) -> int:
        """Return the address of one of `parts` equal parts."""
        return self.ptr + self.nbytes // parts * index


_new_buffer = partial(tuple.__new__, Buffer)  # of a tuple of all fields, without a Python frame


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
            return _new_buffer((ptr, count, count * ITEMSIZE[code], DTYPE_NAMES[code], count, code))
        if isinstance(array, _TENSOR):
            code = TORCH_CODES.get(array.dtype)  # none of these is complex, so there is no lazy conjugate
            ptr = None if code is None else self.plain_address(array)
            if ptr is None:
                return self._read_torch(array, op, what)
            count = array.numel()
            return _new_buffer((ptr, count, count * ITEMSIZE[code], DTYPE_NAMES[code], count, code))
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
        name = TORCH_NAMES.get(array.dtype) or str(array.dtype)
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

    def _invalid(self, op: str, message: str) -> InvalidArgument:
        return InvalidArgument(message, op=op, rank=self.rank)


def dtype_tag(name: str) -> int:
    """Return the number of the dtype with a name, see `Buffer.tag`."""
    return _CODES[name] if name in _CODES else _FIRST_TAG + crc32(name.encode())


def dtype_name(tag: int) -> str:
    """Return the name of the dtype with a `Buffer.tag`, as far as this process knows it."""
    if tag in DTYPE_NAMES:
        return DTYPE_NAMES[tag]
    names = {_FIRST_TAG + crc32(name.encode()): name for name in TORCH_NAMES.values()}
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
