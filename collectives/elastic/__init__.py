"""Elastic training: a job goes on without ranks that die, and with ranks that join.

`run`, the states that it saves, syncs and restores, and a sampler.
`ShardedState` is imported at its first use, since that imports `collectives.sharded`, and so much of
torch.distributed.
"""

from importlib import import_module

from ..rendezvous.world import current_world as communicator
from .channel import Channel, CommChannel
from .interrupt import HostsUpdatedInterrupt
from .running import ElasticTraining, run
from .sampler import ElasticSampler
from .state import ObjectState, State, StateHandler, TorchState, get_handler_registry, set_handler_registry

__all__ = [
    "Channel",
    "CommChannel",
    "ElasticSampler",
    "ElasticTraining",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "communicator",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]


def __getattr__(name: str):
    if name == "ShardedState":
        return import_module(".sharded_state", __name__).ShardedState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
