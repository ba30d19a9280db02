"""The fused kernels: what is done to gradients and parameters around the wire, in one pass, on the host and on GPUs."""

from .bucketing import Table, pack, unpack
from .execution import Statistics, get_num_threads, set_num_threads, use_isa
from .optimizers import adam_step, sgd_step
from .parameters import ParameterTable

__all__ = [
    "ParameterTable",
    "Statistics",
    "Table",
    "adam_step",
    "get_num_threads",
    "pack",
    "set_num_threads",
    "sgd_step",
    "unpack",
    "use_isa",
]
