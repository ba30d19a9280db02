"""Compressors of gradient buckets: fp32, 16 and 8 bits with error feedback, PowerSGD, hierarchical."""

from .base import Compressor, NoCompression, has_fused_stats, parse_wire, reduce_op, remaining_scale, ring_bytes
from .bucket import Bucket, Scaling
from .by_name import make_compressor
from .grad_stats import add_grad_stats

__all__ = [
    "Bucket",
    "Compressor",
    "NoCompression",
    "Scaling",
    "add_grad_stats",
    "has_fused_stats",
    "make_compressor",
    "parse_wire",
    "reduce_op",
    "remaining_scale",
    "ring_bytes",
]
