"""Gradient pipeline: reduces, measures, clips and steps gradient buckets.

DDP and sharded modules share it.
"""

from .buckets import BucketInfo, GradientBuckets
from .pipeline import BucketError, GradReducer
from .state import HookState
from .streams import close_comm_streams, get_comm_streams, has_spare_cores, should_overlap

__all__ = [
    "BucketError",
    "BucketInfo",
    "GradReducer",
    "GradientBuckets",
    "HookState",
    "close_comm_streams",
    "get_comm_streams",
    "has_spare_cores",
    "should_overlap",
]
