"""Scalars that kernels take: numbers, or arrays of one element that they read on their device."""

from __future__ import annotations

import math
import numbers

import numpy
import torch

from ..arrays import TORCH_CODES, Buffer, Reader, shown
from ..errors import InvalidArgument
from . import abi
from .dtypes import FP32_OVERFLOW
from .parameter_arrays import ArrayNames
from .tensor_list import check_storage, read_array
from .written_memory import WrittenMemory

__all__ = ["ScalarReader", "read_scale"]

_SCALARS = {dtype: TORCH_CODES[dtype] for dtype in (torch.float32, torch.float64, torch.int64)}


def read_scale(scale, reader: Reader, wide: bool, op: str) -> tuple[float, Buffer | None]:
    """Return a scale as a number, and the place of one more factor, an fp32 array of one element.

    ``wide``: elements are multiplied in fp64, so that the number need not be one of fp32's.
    """
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        try:
            number = float(scale)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InvalidArgument(f"the scale must be finite, not {shown(scale)}", op=op)
        if not wide and abs(number) >= FP32_OVERFLOW:
            raise InvalidArgument(f"the scale {number} is infinite in fp32, in which elements are multiplied", op=op)
        return number, None
    if not isinstance(scale, (torch.Tensor, numpy.ndarray)) and not hasattr(scale, "__cuda_array_interface__"):
        raise InvalidArgument(
            f"the scale must be a number or an fp32 tensor of one element, not {type(scale).__name__}", op=op
        )
    place = read_array(reader, scale, op, "the scale", writes=False)
    if place.dtype != "float32" or place.count != 1:
        raise InvalidArgument(
            f"the scale has {place.count} elements of {place.dtype}: as a tensor it must be one element of float32",
            op=op,
        )
    if place.ptr % 4:
        raise InvalidArgument(f"the scale lies at address {place.ptr:#x}, which is no multiple of 4", op=op)
    return 1.0, place


class ScalarReader:
    """Reads the scalars of an optimizer's steps on one device. Raises ``InvalidArgument``, which
    names the scalar.

    ``written``: what the steps write, which a scalar on the device must not be part of; None: not
    known yet.
    """

    def __init__(self, device: torch.device, names: ArrayNames):
        self.device = device
        self.names = names
        self.written: WrittenMemory | None = None

    def number(self, value, what, *, least=None, whole=False, finite=True) -> abi.Number:
        """Return a number, or the address of a tensor of one element on the device, as the kernels
        read it.
        """
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise self.names.error(f"{what} must have one element, not the shape {tuple(value.shape)}")
            if value.layout is not torch.strided:
                raise self.names.error(
                    f"{what} is a {str(value.layout).removeprefix('torch.')} tensor: give a dense one"
                )
            if value.is_neg():
                raise self.names.error(f"{what} is a lazily negated view: give {what}.resolve_neg()")
            if value.device == self.device and value.dtype in _SCALARS:
                try:
                    at = value.data_ptr()
                except RuntimeError as error:  # under vmap or grad
                    raise self.names.error(f"{what} has no memory of its own: {error}") from error
                check_storage(value, what, self.names.op)
                if least is not None and value.is_cpu:
                    self.real(value.item(), what, least=least, whole=whole, finite=finite)
                number = abi.Number(at, 0.0, _SCALARS[value.dtype])
                if self.written is not None:
                    self.written.check_scalars([number], lambda _: what)
                return number
            if not value.is_cpu:
                dtype = str(value.dtype).removeprefix("torch.")
                raise self.names.error(
                    f"{what} is {dtype} on {value.device}: it must be fp32, fp64 or int64 on {self.device}, where the "
                    "arrays are, or a number"
                )
            value = value.item()
        return abi.Number(0, self.real(value, what, least=least, whole=whole, finite=finite), 0)

    def real(self, value, what, *, least=0.0, below=math.inf, whole=False, finite=True) -> float:
        """Return a number on the host as a float, in ``least <= number < below``; ``whole``: it
        must be an integer.
        """
        if type(value) is not float and not isinstance(value, numbers.Real):
            kind = type(value).__name__
            raise self.names.error(f"{what} must be a number, not {kind}: {str(value)[:60]}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        fits = (math.isfinite(number) or not finite) and (least is None or least <= number < below)
        if not fits or (whole and number != int(number)):
            kind = "a whole number" if whole else "a finite number"
            limits = "" if least is None else f" from {least:g}" + (f" and below {below:g}" if below < math.inf else "")
            raise self.names.error(f"{what} must be {kind}{limits}, not {value!r:.60}")
        return number
