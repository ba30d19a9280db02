"""States: copies of a training's models, optimizers and values, as of the last commit."""

from __future__ import annotations

import copy
import pickle
import queue
from collections.abc import Callable
from typing import Any

import torch

from ..rendezvous import world
from .channel import Channel, CommChannel
from .interrupt import HostsUpdatedInterrupt
from .sampler import ElasticSampler

__all__ = [
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_REMOVED = 1  # bits of update_res of on_hosts_updated: 1 removed, 2 added


class State:
    """Interface of the states of `run`.

    A class of your own defines `save`, `restore`, `sync` and, if needed, `reset`. The class
    attribute ``channel`` is what its ranks exchange something over.

    Args:
        bcast_object: Accepted for Horovod's sake, and not used.
        get_rank: Accepted for Horovod's sake, and not used.
    """

    channel: Channel = CommChannel()

    def __init__(self, bcast_object: Callable | None = None, get_rank: Callable | None = None):
        self._host_messages: queue.SimpleQueue = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks) -> None:
        """Add functions that `run` calls, on each rank, after the ranks have changed: to rescale
        the learning rate.

        They run before `sync`, so that all ranks get what they change on rank 0. An exception in
        one ends the job.

        Args:
            callbacks: The functions, which take no argument.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the reset callbacks; `run` calls it after the ranks have changed."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = _REMOVED | 2) -> None:
        """Make the next commit of all ranks raise `HostsUpdatedInterrupt`.

        Call it from any thread, on one rank or more.

        Args:
            timestamp: A time in seconds. One that isn't above the last one has no effect.
            update_res: 1 where hosts were only removed, so that no sync is needed.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Call `save`, so that `restore` returns to this point after a failure, and
        `check_host_updates`, after which ranks that wait to join come in. Blocks.

        All ranks call it. It copies the whole state: with large models don't call it after each
        batch.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks where `on_hosts_updated` was called on one, or
        a rank waits to join. Blocks.
        """
        interrupt = self._find_host_updates()
        if interrupt is not None:
            raise interrupt

    def _find_host_updates(self) -> HostsUpdatedInterrupt | None:
        """Return what `check_host_updates` raises, or None. A collective of all ranks."""
        # Newest; any update; any update but removals; ranks wait to join.
        update = [self._last_updated_timestamp, 0.0, 0.0, 0.0]
        while True:
            try:
                timestamp, what = self._host_messages.get_nowait()
            except queue.Empty:
                break
            if timestamp > self._last_updated_timestamp:
                update = [max(update[0], timestamp), 1.0, max(update[2], float(what != _REMOVED)), 0.0]
        if self.channel.rank == 0 and world.has_joiners():
            update = [update[0], 1.0, 1.0, 1.0]
        newest, updated, otherwise, joins = self.channel.maximum(update)
        self._last_updated_timestamp = newest
        return HostsUpdatedInterrupt(skip_sync=not otherwise, joins=bool(joins)) if updated else None

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved state. Not a collective call."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast rank 0's state to all ranks, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to changed ranks; called before the callbacks."""


class ObjectState(State):
    """State of attributes, which are keyword arguments: ``ObjectState(epoch=0, batch=0)``.

    They are copied (deepcopy) at each save, and pickled for `sync`; `ValueError` names one that
    can't be.

    Args:
        bcast_object: As in `State`.
        get_rank: As in `State`.
        **kwargs: The attributes and their values.
    """

    def __init__(self, bcast_object=None, get_rank=None, **kwargs):
        super().__init__(bcast_object, get_rank)
        for name in kwargs:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"an attribute of a state can't be named {name!r}")
        self._saved_state = _deep_copies(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Save the attributes."""
        self._keep_attributes()

    def _keep_attributes(self) -> None:
        self._saved_state = _deep_copies({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Set the attributes to the values that were saved last."""
        for name, value in _deep_copies(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Broadcast rank 0's current attributes to all ranks, and save them. Blocks."""
        mine = {name: getattr(self, name) for name in self._saved_state}
        try:
            theirs = self.channel.broadcast_object(mine)
        except ValueError as error:
            wrong = [name for name, value in mine.items() if not _can_pickle(value)]
            raise ValueError(f"a state's attributes are pickled, and {', '.join(wrong)} can't be: {error}") from None
        differing = sorted(theirs.keys() ^ mine.keys())
        if differing:
            raise ValueError(f"rank 0's and rank {self.channel.rank}'s state don't both have {', '.join(differing)}")
        for name, value in theirs.items():
            setattr(self, name, value)
        ObjectState.save(self)


def _can_pickle(value) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # an object's own __reduce__ may raise anything
        return False
    return True


def _deep_copies(values: dict[str, Any]) -> dict[str, Any]:
    copies = {}
    for name, value in values.items():
        try:
            copies[name] = copy.deepcopy(value)
        except Exception as error:
            raise ValueError(
                f"attribute {name!r} of a state, a {type(value).__name__}, can't be copied ({error}): keep it elsewhere"
            ) from error
    return copies


class TorchState(ObjectState):
    """State of a training: ``TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0,
    batch=0)``.

    Models, optimizers, schedulers, `ElasticSampler` and other objects with state_dict and
    load_state_dict (a GradScaler) are saved by their state dicts and keep their identity.

    Args:
        model: A model, if one has this name.
        optimizer: An optimizer, if one has this name.
        **kwargs: Further models, optimizers and other objects with a state dict, under any names,
            and plain attributes, as in `ObjectState`.
    """

    def __init__(self, model=None, optimizer=None, **kwargs):
        self._handlers: dict[str, StateHandler] = {}
        handlers, rest = {}, {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = _make_handler(value)
            if handler is None:
                rest[name] = value
            else:
                handlers[name] = handler
        super().__init__(**rest)
        for name, handler in handlers.items():
            handler.channel = self.channel
            setattr(self, name, handler.value)
        self._handlers = handlers

    def save(self) -> None:
        """Save everything or, where that fails, nothing. With a sampler all ranks call it."""
        before = [(handler, dict(vars(handler))) for handler in self._handlers.values()]
        try:
            for handler in self._handlers.values():
                handler.save()
            super().save()
        except BaseException:
            for handler, variables in before:
                vars(handler).update(variables)
            raise

    def restore(self) -> None:
        """Restore what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcast rank 0's state to all ranks, and save it. Blocks."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        """Reset samplers and optimizers to the current ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name, value):
        if not name.startswith("_") and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


# ---- Handlers, which save objects by their class.


class StateHandler:
    """Saves, restores and syncs one object of a `TorchState` by its state dict.

    Base class of your own handlers. A subclass overrides what differs. Where `save` raises, it must
    leave the handler unchanged.
    """

    channel: Channel = CommChannel()  # a `TorchState` sets its own

    def __init__(self, value):
        self.value = value
        self.keep()

    def keep(self) -> None:
        """Save the state on this rank."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def save(self) -> None:
        """Save the state; all ranks call it."""
        self.keep()

    def restore(self) -> None:
        """Restore the saved state."""
        # A copy, because optimizers keep the tensors that they load.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Broadcast rank 0's state to all ranks."""
        state = self.channel.broadcast_object(self.value.state_dict())
        if self.channel.rank != 0:
            self.value.load_state_dict(state)

    def reset(self) -> None:
        """Adapt to changed ranks."""

    def set_value(self, value) -> None:
        """Replace the object, and save the new one's state."""
        before, self.value = self.value, value
        try:
            self.keep()
        except BaseException:
            self.value = before
            raise


class _ModuleHandler(StateHandler):
    def restore(self) -> None:
        self.value.load_state_dict(self._saved)  # it copies

    def sync(self) -> None:
        state = self.value.state_dict()
        self.channel.broadcast_module_state(state)
        if any(not isinstance(each, torch.Tensor) for each in state.values()):
            self.value.load_state_dict(state)  # for a module's set_extra_state


class _OptimizerHandler(StateHandler):
    def reset(self) -> None:
        # A DistributedOptimizer takes the current ranks when it loads a state.
        self.value.load_state_dict(self.value.state_dict())

    def sync(self) -> None:
        self.channel.broadcast_optimizer(self.value)
        if self.channel.rank == 0:
            self.reset()  # the others have loaded a state, which drops a backward that has no step yet


class _SamplerHandler(StateHandler):
    def keep(self) -> None:
        self._saved = self.value.state_dict()

    def save(self) -> None:
        """Save on each rank what all ranks have processed."""
        sampler, saved = self.value, self._saved
        known = saved["processed_indices"] if saved["epoch"] == sampler.epoch else set()
        sampler.record_indices(self.channel.gather_numbers(sorted(sampler.processed_indices - known)))
        self.keep()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def reset(self) -> None:
        self.value.reset()

    def sync(self) -> None:
        self.value.load_state_dict(self.channel.broadcast_object(self.value.state_dict()))
        self.keep()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, _ModuleHandler),
    (torch.optim.Optimizer, _OptimizerHandler),
    (ElasticSampler, _SamplerHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the list of (class, handler) from which new states take the first that matches an
    object.
    """
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the list of `get_handler_registry`."""
    global _registry
    _registry = registry


def _make_handler(value) -> StateHandler | None:
    if isinstance(value, type):
        return None
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateHandler(value)
    return None
