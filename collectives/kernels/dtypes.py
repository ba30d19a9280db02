"""Dtypes of flat buffers and of the tensors that are cast into them: NCCL's codes, names, widths."""

from __future__ import annotations

import numpy
import torch

from ..arrays import DTYPE_NAMES, NAMED_DTYPES, TORCH_CODES, shown
from ..errors import InvalidArgument
from ..layout import ALIGNMENT
from . import abi

__all__ = ["CODES", "FLOATING", "FP32_OVERFLOW", "WIDTHS", "parse_dtype"]

CODES = {name: code for code, name in DTYPE_NAMES.items()}
FLOATING = frozenset(code for name, code in CODES.items() if "float" in name)  # what the kernels cast
FP32_OVERFLOW = float((1 << 128) - (1 << 103))  # the numbers from here on are rounded to infinity in fp32
WIDTHS = numpy.zeros(abi.OPAQUE + ALIGNMENT + 1, dtype=numpy.int64)  # bytes of an element, by its type
WIDTHS[list(TORCH_CODES.values())] = [dtype.itemsize for dtype in TORCH_CODES]
WIDTHS[abi.OPAQUE :] = range(ALIGNMENT + 1)


def parse_dtype(dtype, op) -> tuple[torch.dtype | numpy.dtype, str, int]:
    """Return a dtype, its name as `Reader.read` spells it, and the bytes of an element.

    The dtype is torch's, or NumPy's where torch has none of that name.
    """
    if isinstance(dtype, torch.dtype):
        name, width = str(dtype).removeprefix("torch."), dtype.itemsize
    elif isinstance(dtype, str) and dtype in CODES:
        name, width = dtype, int(WIDTHS[CODES[dtype]])
    else:
        try:
            if dtype is None:  # NumPy's float64
                raise TypeError
            dtype = numpy.dtype(dtype)
        except Exception as error:
            raise InvalidArgument(
                f"the flat buffer's dtype must be a torch.dtype, not {shown(dtype)}", op=op
            ) from error
        name, width = dtype.name if dtype.isnative else dtype.str, dtype.itemsize
    if name.startswith(("qint", "quint", "bits")) or width < 1 or ALIGNMENT % width:
        raise InvalidArgument(f"there are no flat buffers of {name}, {width} bytes an element", op=op)
    return NAMED_DTYPES.get(name, dtype), name, width
