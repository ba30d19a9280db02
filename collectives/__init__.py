"""Collective communication for PyTorch: NCCL on GPUs and a shared-memory engine on host memory, behind one binding."""

from . import errors
from .buckets import GradientBuckets
from .communicator import Communicator
from .ddp import DistributedDataParallel, HookState, fused_allreduce
from .engine import EngineInfo, engines
from .timeline import timeline
from .torch_groups import init_process_group
from .tune import tune
from .work import Work
from .world import init

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "DistributedDataParallel",
    "EngineInfo",
    "GradientBuckets",
    "HookState",
    "Work",
    "engines",
    "errors",
    "fused_allreduce",
    "init",
    "init_process_group",
    "timeline",
    "tune",
]
