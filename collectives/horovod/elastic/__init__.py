"""Elastic training, which continues without ranks that have died: `run`, states, a sampler."""

from .running import run
from .sampler import ElasticSampler
from .state import ObjectState, State, StateHandler, TorchState, get_handler_registry, set_handler_registry

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
