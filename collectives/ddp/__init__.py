"""Front end for DDP: the communication hook of torch's DistributedDataParallel, and a subclass that
fits it.
"""

from ..gradients.state import HookState
from .hook import fused_allreduce
from .module import DistributedDataParallel

__all__ = ["DistributedDataParallel", "HookState", "fused_allreduce"]
