"""Types of arguments that several modules take, for type checkers alone: imported under ``TYPE_CHECKING``."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import TypedDict  # torch needs it

__all__ = ["Algorithm", "Array", "Compressed", "Device", "EngineName", "HookArguments", "Op", "Stream", "Wire"]


class CudaArray(Protocol):
    """CUDA memory of another library, such as a CuPy array."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class CudaStream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int: ...


Array: TypeAlias = torch.Tensor | np.ndarray | CudaArray
Device: TypeAlias = torch.device | str | int
Stream: TypeAlias = torch.cuda.Stream | CudaStream | int | None
EngineName: TypeAlias = Literal["host", "nccl"]
Op: TypeAlias = Literal["sum", "prod", "max", "min", "avg"] | float | dist.ReduceOp | dist.ReduceOp.RedOpType
Algorithm: TypeAlias = Literal["native", "ring", "direct"]
Wire: TypeAlias = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"]
Compressed: TypeAlias = Literal["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8"]


class HookArguments(TypedDict, total=False):
    """The options of `HookState`: the fields of `HookOptions`."""

    wire: Wire
    block: Literal[128, 256, 512]
    error_feedback: bool
    stochastic_rounding: bool
    average: bool
    algorithm: Algorithm
    deterministic: bool
    streams: int | None
    max_norm: float | None
    norm_type: float
    check_finite: bool
    parameters_as_bucket_view: bool
    zero_copy: bool
    gather: Compressed | None
