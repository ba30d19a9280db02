"""Kernel arguments as ctypes structs, the same as in kernels/include/coll/kernel_abi.h.

The same struct goes to the host kernels (by pointer) and to the CUDA kernels (by value, with a
table's rows behind it where there is room).
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_int64, c_uint64
from typing import NamedTuple

import numpy

__all__ = [
    "ADAM",
    "ADD",
    "ARGUMENTS",
    "CAST",
    "CAST_BF16_BF16",
    "CAST_BF16_F32",
    "CAST_COPY",
    "CAST_F16_F32",
    "CAST_F32_BF16",
    "CAST_F32_E4M3",
    "CAST_F32_E5M2",
    "CAST_F32_F16",
    "CAST_F32_F32",
    "CAST_WIDE",
    "DECOUPLED",
    "DEQUANTIZE",
    "DIVIDE",
    "FINISH",
    "FROM_FLAT",
    "MEASURE",
    "MAXIMIZE",
    "NESTEROV",
    "NUMBER",
    "OPAQUE",
    "PARAMETER",
    "QUANTIZE",
    "QUANTIZE_FEEDBACK",
    "REDUCE",
    "REDUCE_BF16",
    "REDUCE_E4M3",
    "REDUCE_E5M2",
    "REDUCE_F16",
    "REDUCE_F64",
    "REDUCE_INT32",
    "REDUCE_INT64",
    "REDUCE_INT8",
    "REDUCE_WIDE",
    "REDUCE_WIRES",
    "REQUANTIZE",
    "REQUANTIZE_FEEDBACK",
    "SGD",
    "STOCHASTIC",
    "TENSOR",
    "AdamArgs",
    "CastArgs",
    "Decoder",
    "DequantizeArgs",
    "Encoder",
    "FinishArgs",
    "Kernel",
    "Number",
    "Parts",
    "QuantizeArgs",
    "ReduceArgs",
    "RequantizeArgs",
    "SgdArgs",
    "Update",
    "Work",
]

OPAQUE = 32  # + bytes of an element that is only copied
FROM_FLAT, ADD, MEASURE = 1, 2, 4
ARGUMENTS = 4080  # bytes of a CUDA kernel's arguments where it reads a table

# coll_tensor: one row of a table.
TENSOR = numpy.dtype(
    [
        ("data", "u8"),
        ("count", "i8"),
        ("offset", "i8"),
        ("first_tile", "i8"),
        ("type", "i4"),
        ("padding", "i4"),
    ]
)

_pointer = c_uint64


class Work(Structure):
    """coll_work"""

    _fields_ = [("tiles", c_int64), ("sums", _pointer), ("bad", _pointer)]


class CastArgs(Structure):
    """coll_cast_args"""

    _fields_ = [
        ("work", Work),
        ("tensors", _pointer),
        ("count", c_int64),
        ("flat", _pointer),
        ("scale_at", _pointer),
        ("scale", c_double),
        ("flat_type", c_int32),
        ("flags", c_int32),
    ]


class FinishArgs(Structure):
    """coll_finish_args"""

    _fields_ = [("work", Work), ("shares", c_int64), ("sum_of_squares", _pointer), ("nonfinite", _pointer)]


class Kernel(NamedTuple):
    """A kernel: its number for collKernelRun, its name in ``source`` of kernels/cuda, its
    arguments.

    ``rows_at``: offset in the arguments of the address of its table's rows; None: it reads no
    table.
    """

    number: int
    name: str
    source: str
    args: type[Structure]
    rows_at: int | None = None


_tensors_at = CastArgs.tensors.offset
CAST = Kernel(0, "coll_cast", "cast.cu", CastArgs, _tensors_at)
# The same kernel on the host; on GPUs each is compiled for its types.
CAST_WIDE = Kernel(0, "coll_cast_wide", "cast.cu", CastArgs, _tensors_at)
CAST_COPY = Kernel(0, "coll_copy", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_F32_F32 = Kernel(0, "coll_cast_f32_f32", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_F32_BF16 = Kernel(0, "coll_cast_f32_bf16", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_F32_F16 = Kernel(0, "coll_cast_f32_f16", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_F32_E4M3 = Kernel(0, "coll_cast_f32_e4m3", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_F32_E5M2 = Kernel(0, "coll_cast_f32_e5m2", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_BF16_F32 = Kernel(0, "coll_cast_bf16_f32", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_BF16_BF16 = Kernel(0, "coll_cast_bf16_bf16", "cast_pairs.cu", CastArgs, _tensors_at)
CAST_F16_F32 = Kernel(0, "coll_cast_f16_f32", "cast_pairs.cu", CastArgs, _tensors_at)
FINISH = Kernel(1, "coll_finish", "cast.cu", FinishArgs)


# ---- Reduce.
class ReduceArgs(Structure):
    """coll_reduce_args"""

    _fields_ = [
        ("work", Work),
        ("sources", _pointer),
        ("n", c_int64),
        ("out", _pointer),
        ("count", c_int64),
        ("scale_at", _pointer),
        ("scale", c_double),
        ("op", c_int32),
        ("source_type", c_int32),
        ("out_type", c_int32),
        ("unused", c_int32),
    ]


_sources_at = ReduceArgs.sources.offset
REDUCE = Kernel(2, "coll_reduce", "reduce.cu", ReduceArgs, _sources_at)  # of fp32
# The same kernel on the host; on GPUs one for each type of the sources.
REDUCE_BF16 = Kernel(2, "coll_reduce_bf16", "reduce.cu", ReduceArgs, _sources_at)
REDUCE_F16 = Kernel(2, "coll_reduce_f16", "reduce.cu", ReduceArgs, _sources_at)
REDUCE_E4M3 = Kernel(2, "coll_reduce_e4m3", "reduce.cu", ReduceArgs, _sources_at)
REDUCE_E5M2 = Kernel(2, "coll_reduce_e5m2", "reduce.cu", ReduceArgs, _sources_at)
REDUCE_F64 = Kernel(2, "coll_reduce_f64", "reduce.cu", ReduceArgs, _sources_at)
REDUCE_WIDE = Kernel(2, "coll_reduce_wide", "reduce.cu", ReduceArgs, _sources_at)  # the floating types above into fp64
REDUCE_INT8 = Kernel(2, "coll_reduce_int8", "reduce.cu", ReduceArgs, _sources_at)  # and unsigned
REDUCE_INT32 = Kernel(2, "coll_reduce_int32", "reduce.cu", ReduceArgs, _sources_at)
REDUCE_INT64 = Kernel(2, "coll_reduce_int64", "reduce.cu", ReduceArgs, _sources_at)

# ---- Quantize, dequantize, requantize.


class Encoder(Structure):
    """coll_encoder: how a wire buffer is written"""

    _fields_ = [
        ("wire", _pointer),
        ("residual", _pointer),
        ("count", c_int64),
        ("seed", c_uint64),
        ("position", c_int64),
        ("format", c_int32),
        ("block", c_int32),
        ("residual_type", c_int32),
        ("stochastic", c_int32),
    ]


class Decoder(Structure):
    """coll_decoder: which wire buffers are summed"""

    _fields_ = [
        ("wires", _pointer),
        ("wire", _pointer),
        ("wire_count", c_int64),
        ("count", c_int64),
        ("scale_at", _pointer),
        ("scale", c_double),
        ("format", c_int32),
        ("block", c_int32),
        ("average_over", c_int32),
        ("unused", c_int32),
    ]


class Parts(Structure):
    """coll_parts: parts of one array, each with a wire buffer of its own"""

    _fields_ = [("total", c_int64), ("stride", c_int64), ("wire_stride", c_int64)]


class QuantizeArgs(Structure):
    """coll_quantize_args"""

    _fields_ = [
        ("work", Work),
        ("to", Encoder),
        ("parts", Parts),
        ("source", _pointer),
        ("scale_at", _pointer),
        ("scale", c_double),
        ("source_type", c_int32),
        ("unused", c_int32),
    ]


class DequantizeArgs(Structure):
    """coll_dequantize_args"""

    _fields_ = [
        ("work", Work),
        ("from", Decoder),
        ("parts", Parts),
        ("out", _pointer),
        ("out_type", c_int32),
        ("flags", c_int32),
    ]


class RequantizeArgs(Structure):
    """coll_requantize_args"""

    _fields_ = [("work", Work), ("from", Decoder), ("to", Encoder)]


_wires_at = getattr(DequantizeArgs, "from").offset + Decoder.wires.offset  # and in RequantizeArgs
QUANTIZE = Kernel(3, "coll_quantize", "quantize.cu", QuantizeArgs)  # without a residual, to nearest
QUANTIZE_FEEDBACK = Kernel(3, "coll_quantize_feedback", "quantize.cu", QuantizeArgs)  # or with a residual, or at random
DEQUANTIZE = Kernel(4, "coll_dequantize", "quantize.cu", DequantizeArgs, _wires_at)  # one wire, or one for each part
REDUCE_WIRES = Kernel(4, "coll_reduce_wires", "quantize.cu", DequantizeArgs, _wires_at)
REQUANTIZE = Kernel(5, "coll_requantize", "quantize.cu", RequantizeArgs, _wires_at)
REQUANTIZE_FEEDBACK = Kernel(5, "coll_requantize_feedback", "quantize.cu", RequantizeArgs, _wires_at)

# ---- Optimizers.
MAXIMIZE, DIVIDE, STOCHASTIC, NESTEROV, DECOUPLED = 1, 2, 4, 8, 16

# coll_number, coll_parameter: one row of an optimizer's table.
NUMBER = numpy.dtype([("at", "u8"), ("value", "f8"), ("type", "i8")])
PARAMETER = numpy.dtype(
    [
        ("param", "u8"),
        ("grad", "u8"),
        ("master", "u8"),
        ("first", "u8"),
        ("second", "u8"),
        ("largest", "u8"),
        ("step", NUMBER),
        ("count", "i8"),
        ("first_tile", "i8"),
        ("position", "i8"),
        ("param_type", "i4"),
        ("grad_type", "i4"),
    ]
)


class Number(Structure):
    """coll_number"""

    _fields_ = [("at", _pointer), ("value", c_double), ("type", c_int64)]


class Update(Structure):
    """coll_update"""

    _fields_ = [
        ("parameters", _pointer),
        ("count", c_int64),
        ("lr", Number),
        ("grad_scale", Number),
        ("clip", Number),
        ("nonfinite", Number),
        ("weight_decay", c_double),
        ("seed", c_uint64),
        ("flags", c_int64),
    ]


class SgdArgs(Structure):
    """coll_sgd_args"""

    _fields_ = [("work", Work), ("update", Update), ("momentum", c_double), ("dampening", c_double)]


class AdamArgs(Structure):
    """coll_adam_args"""

    _fields_ = [("work", Work), ("update", Update), ("beta1", c_double), ("beta2", c_double), ("eps", c_double)]


SGD = Kernel(6, "coll_sgd", "optim.cu", SgdArgs, SgdArgs.update.offset + Update.parameters.offset)
ADAM = Kernel(7, "coll_adam", "optim.cu", AdamArgs, AdamArgs.update.offset + Update.parameters.offset)
