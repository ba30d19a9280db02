"""States of `collectives.elastic` over Horovod's operations."""

from __future__ import annotations

from ... import elastic
from ...elastic import StateHandler, get_handler_registry, set_handler_registry
from .channel import CHANNEL

__all__ = ["ObjectState", "State", "StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]


class State(elastic.State):
    """`collectives.elastic.State` over Horovod's operations."""

    channel = CHANNEL


class ObjectState(elastic.ObjectState):
    """`collectives.elastic.ObjectState` over Horovod's operations."""

    channel = CHANNEL


class TorchState(elastic.TorchState):
    """`collectives.elastic.TorchState` over Horovod's operations."""

    channel = CHANNEL
