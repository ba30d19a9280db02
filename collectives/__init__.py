"""Collective communication for PyTorch: NCCL on GPUs, a shared-memory engine on host memory."""

from . import requirements as requirements  # isort: skip  (first: it says what is missing)
from . import backend as backend
from . import errors
from .comm.communicator import Communicator
from .comm.config import CommConfig
from .comm.engine import EngineInfo, engines
from .comm.work import Work
from .ddp import DistributedDataParallel, HookState, fused_allreduce
from .gradients.buckets import GradientBuckets
from .rendezvous.process_groups import init_process_group
from .rendezvous.world import init
from .tracing import timeline

__version__ = "0.1.0"

__all__ = [
    "CommConfig",
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
]
