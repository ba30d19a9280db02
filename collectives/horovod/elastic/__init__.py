"""Elastic training, which continues without ranks that have died: `run`, states, a sampler."""

from ...elastic import StateHandler, get_handler_registry, set_handler_registry
from .running import run
from .state import ElasticSampler, ObjectState, State, TorchState

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
