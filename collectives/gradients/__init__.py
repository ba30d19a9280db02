"""Gradient pipeline: reduces, measures, clips and steps gradient buckets.

DDP and sharded modules share it.
"""

from .. import torch_patches
from .buckets import BucketInfo, GradientBuckets
from .ddp_reducer import BucketError, DDPReducer
from .pipeline import GradientPipeline
from .state import HookState
from .streams import close_comm_streams, get_comm_streams, has_spare_cores, should_overlap

__all__ = [
    "BucketError",
    "BucketInfo",
    "DDPReducer",
    "GradientBuckets",
    "GradientPipeline",
    "HookState",
    "close_comm_streams",
    "get_comm_streams",
    "has_spare_cores",
    "should_overlap",
]

torch_patches.record_scalers()
