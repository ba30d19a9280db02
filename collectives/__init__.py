"""Collective communication for PyTorch: NCCL on GPUs, a shared-memory engine on host memory."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import requirements as requirements  # isort: skip  (first: it says what is missing)
from . import backend as backend
from . import errors, torch_patches
from .comm.communicator import Communicator
from .comm.config import CommConfig, order_launches_of_torch
from .comm.engine import EngineInfo, engines
from .comm.work import Work
from .rendezvous.process_groups import init_process_group
from .rendezvous.world import init
from .tracing import timeline

if TYPE_CHECKING:
    from . import auto as auto
    from . import elastic as elastic
    from . import flight as flight
    from . import horovod as horovod
    from . import kernels as kernels
    from . import optim as optim
    from . import run as run
    from . import sharded as sharded
    from .ddp import DistributedDataParallel, HookState, fused_allreduce
    from .gradients.buckets import GradientBuckets

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

# Names that are imported at their first use: what they change in torch is changed only in programs that use them.
_LAZY = {
    "DistributedDataParallel": "ddp",
    "GradientBuckets": "gradients.buckets",
    "HookState": "ddp",
    "fused_allreduce": "ddp",
}
_SUBMODULES = ("auto", "elastic", "flight", "horovod", "kernels", "optim", "run", "sharded")


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    # Without "auto", whose import changes DDP: tools that look at all names must not do that.
    return sorted([*__all__, *_SUBMODULES[1:], "__version__"])


torch_patches.install()
order_launches_of_torch()
