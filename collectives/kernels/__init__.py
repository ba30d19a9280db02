"""Fused kernels for gradients and parameters, each in one pass, on the host and on GPUs.

`pack` and `unpack` of flat buffers, reductions, wire formats, and optimizer steps.
"""

from .bucketing import Table, measure, pack, unpack
from .execution import Statistics, get_num_threads, set_num_threads, use_isa
from .optimizers import adam_step, sgd_step
from .parameters import ParameterTable
from .quantization import WireTable, dequantize, quantize, reduce_wires, requantize
from .reduction import Sources, reduce_n

__all__ = [
    "ParameterTable",
    "Sources",
    "Statistics",
    "Table",
    "WireTable",
    "adam_step",
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
