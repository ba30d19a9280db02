"""Compressors of gradient buckets: fp32, 16 and 8 bits with error feedback."""

from .averaging import ReductionPlan, all_reduce_average, plan_average, plan_division, plan_reduction
from .base import Compressor, NoCompression, has_fused_stats, parse_wire, ring_bytes
from .bucket import Bucket, Scaling
from .by_name import make_compressor
from .grad_stats import add_grad_stats, measure_grads

__all__ = [
    "Bucket",
    "Compressor",
    "NoCompression",
    "ReductionPlan",
    "Scaling",
    "add_grad_stats",
    "all_reduce_average",
    "has_fused_stats",
    "make_compressor",
    "measure_grads",
    "parse_wire",
    "plan_average",
    "plan_division",
    "plan_reduction",
    "ring_bytes",
]
