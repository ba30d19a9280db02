"""Fused kernels for gradients and parameters, each in one pass, on the host and on GPUs.

`pack` and `unpack` of flat buffers, reductions, wire formats, and optimizer steps.
"""

from .bucketing import Table, measure, pack, unpack
from .compilation import KERNEL_FAMILIES, compile_kernels
from .execution import Statistics, get_num_threads, set_num_threads, use_isa
from .optimizers import adam_step, sgd_step
from .parameters import ParameterTable
from .quantization import WireTable, dequantize, quantize, reduce_wires, requantize
from .reduction import Sources, reduce_n
from .wire_parts import WireParts

__all__ = [
    "KERNEL_FAMILIES",
    "ParameterTable",
    "Sources",
    "Statistics",
    "Table",
    "WireParts",
    "WireTable",
    "adam_step",
    "compile_kernels",
    "dequantize",
    "get_num_threads",
    "measure",
    "pack",
    "quantize",
    "reduce_n",
    "reduce_wires",
    "requantize",
    "set_num_threads",
    "sgd_step",
    "unpack",
    "use_isa",
]
