"""Elastic training: a job goes on without ranks that die, and with ranks that join.

`run`, the states that it saves, syncs and restores, and a sampler. See docs/elastic.md.
"""

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
