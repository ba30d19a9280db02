"""compile_kernels: compiles and loads CUDA kernels ahead of their first use, which may be in a backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..arrays import TORCH_CODES, shown
from ..errors import InvalidArgument
from . import abi, cuda
from .dtypes import FLOATING
from .reduction import kernel_of
from .table import casts_between

__all__ = ["KERNEL_FAMILIES", "compile_kernels"]

KERNEL_FAMILIES = ("cast", "reduce", "statistics", "wire", "optimizer")


def compile_kernels(device: torch.device | str, families: Iterable[str], dtypes: Iterable[torch.dtype] = ()) -> None:
    """Compile what a program will launch on a GPU, and load it, so that no later launch has to.

    Compiling takes seconds for each family; the binaries are kept on disk, and later processes load
    them in milliseconds. What is loaded already stays as it is. Blocks until all is loaded; on the
    CPU there is nothing to do. Not while a CUDA graph is captured.

    Args:
        device: The device.
        families: Names of `KERNEL_FAMILIES`. "cast" is `pack` and `unpack` between any two of
            ``dtypes``; "reduce" is `reduce_n` of arrays of one of them; "statistics" is `measure`,
            and what adds up a kernel's `Statistics`; "wire" quantizes, dequantizes and requantizes
            every wire format, and "optimizer" is the fused SGD, Adam and AdamW, both for all
            dtypes.
        dtypes: The dtypes of "cast" and "reduce".

    Raises:
        InvalidArgument: For a family or a dtype that there isn't.
        EngineUnavailable: Without CuPy or NVRTC.
        CudaError: Where the GPU refuses a binary.
    """
    device = torch.device(device)
    kernels = {kernel for family in families for kernel in _kernels_of(family, tuple(dtypes))}
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    for kernel in sorted(kernels, key=lambda each: each.name):
        cuda.load(kernel, index)


def _kernels_of(family: str, dtypes: tuple[torch.dtype, ...]) -> set[abi.Kernel]:
    codes = [TORCH_CODES[dtype] for dtype in dtypes if dtype in TORCH_CODES]
    if family == "cast":
        floating = [code for code in codes if code in FLOATING]
        return {abi.CAST_COPY} | {
            kernel for one in floating for other in floating for kernel in casts_between(one, other)
        }
    if family == "reduce":
        return {kernel_of(code, code) for code in codes}
    if family == "statistics":
        return {abi.FINISH, abi.CAST, *({abi.CAST_WIDE} if torch.float64 in dtypes else ())}
    if family == "wire":
        return {
            abi.QUANTIZE, abi.QUANTIZE_FEEDBACK, abi.DEQUANTIZE, abi.REDUCE_WIRES, abi.REQUANTIZE,
            abi.REQUANTIZE_FEEDBACK,
        }  # fmt: skip
    if family == "optimizer":
        return {abi.SGD, abi.ADAM}
    raise InvalidArgument(f"a family of kernels is one of {', '.join(KERNEL_FAMILIES)}, not {shown(family)}")
