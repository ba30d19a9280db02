"""States: what a training is made of, as it was at the last commit."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from typing import Any

import torch

from ..basics import rank
from ..exceptions import HostsUpdatedInterrupt
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters, pickled
from ..operations import Max, allgather_async, allreduce_async, synchronize
from .sampler import ElasticSampler

__all__ = [
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_REMOVED = 1  # of what on_hosts_updated is told: 1 removed, 2 added, 3 both


class State:
    """What `run` needs of a state. For classes of your own: give it `save`, `restore`, `sync` and maybe `reset`.

    ``bcast_object`` and ``get_rank``: taken as Horovod's are, and not needed.
    """

    def __init__(self, bcast_object: Callable | None = None, get_rank: Callable | None = None):
        self._host_messages: queue.SimpleQueue = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks) -> None:
        """Add functions that `run` calls, on each rank, when the ranks have changed: to scale the learning rate anew.

        They come before `sync`, so that what they change on rank 0 counts; an exception in one ends the job.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the reset callbacks; `run` does so when the ranks have changed."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = _REMOVED | 2) -> None:
        """Have the next commit of all ranks raise `HostsUpdatedInterrupt`; from any thread, on one rank or more.

        ``timestamp``: in seconds; one that isn't above the last one's changes nothing. ``update_res``: 1 where hosts
        are only taken away, so that no sync is needed.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, so that this is what a failure goes back to, and `check_host_updates`. All ranks call it. Blocks.

        It copies the whole state: in large models not after each batch.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks where `on_hosts_updated` was called on one. Blocks."""
        told = [self._last_updated_timestamp, 0.0, 0.0]  # the newest; whether anything else than removals was told
        while True:
            try:
                timestamp, what = self._host_messages.get_nowait()
            except queue.Empty:
                break
            if timestamp > self._last_updated_timestamp:
                told = [max(told[0], timestamp), 1.0, max(told[2], float(what != _REMOVED))]
        most = torch.tensor(told, dtype=torch.float64)
        newest, updated, otherwise = synchronize(allreduce_async(most, op=Max, _waits=True)).tolist()
        self._last_updated_timestamp = newest
        if updated:
            raise HostsUpdatedInterrupt(skip_sync=not otherwise)

    def save(self) -> None:
        """Take down the state, in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last. Not a collective."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks rank 0's state, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Take notice that the ranks have changed, before the callbacks."""


class ObjectState(State):
    """A state of attributes, given as keywords: ``ObjectState(epoch=0, batch=0)``.

    They are copied (deepcopy) at each save, and pickled for `sync`: `ValueError` names one with which that can't be.
    """

    def __init__(self, bcast_object=None, get_rank=None, **kwargs):
        super().__init__(bcast_object, get_rank)
        for name in kwargs:
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"an attribute of a state can't be named {name!r}")
        self._saved_state = _copies(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Take down the attributes."""
        self._saved_state = _copies({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        """Give the attributes the values that were saved last."""
        for name, value in _copies(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give all ranks rank 0's attributes, as they are now, and save them. Blocks."""
        mine = {name: getattr(self, name) for name in self._saved_state}
        try:
            theirs = broadcast_object(mine)
        except ValueError as error:
            wrong = [name for name, value in mine.items() if not pickled(value)[0]]
            raise ValueError(f"a state's attributes are pickled, and {', '.join(wrong)} can't be: {error}") from None
        unlike = sorted(theirs.keys() ^ mine.keys())
        if unlike:
            raise ValueError(f"rank 0's and rank {rank()}'s state don't both have {', '.join(unlike)}")
        for name, value in theirs.items():
            setattr(self, name, value)
        ObjectState.save(self)


def _copies(values: dict[str, Any]) -> dict[str, Any]:
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
    """The state of a training: ``TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)``.

    Models, optimizers, schedulers, `ElasticSampler` and whatever else has state_dict and load_state_dict (a GradScaler)
    are saved by that and keep their identity; other keywords are plain attributes, as in `ObjectState`. ``model`` and
    ``optimizer`` may be left out, and there may be several, under any names.
    """

    def __init__(self, model=None, optimizer=None, **kwargs):
        self._handlers: dict[str, StateHandler] = {}
        handlers, rest = {}, {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = _handler(value)
            if handler is None:
                rest[name] = value
            else:
                handlers[name] = handler
        super().__init__(**rest)
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers

    def save(self) -> None:
        """Take down all of it, or, where that fails, nothing. Where there is a sampler, all ranks call it."""
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
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks rank 0's state, and save it. Blocks."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        """Have samplers and optimizers look which ranks there are now."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name, value):
        if not name.startswith("_") and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


# ---- How objects are saved, by their class.


class StateHandler:
    """Saves, restores and syncs one object of a `TorchState`, by its state dict; for handlers of your own, too.

    A subclass overrides what differs; `save` must leave the handler as it is where it raises.
    """

    def __init__(self, value):
        self.value = value
        self.keep()

    def keep(self) -> None:
        """Take the state down on this rank."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def save(self) -> None:
        """Take the state down; all ranks do so."""
        self.keep()

    def restore(self) -> None:
        """Go back to it."""
        # A copy, as optimizers go on with the very tensors that they load.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give all ranks rank 0's state."""
        state = broadcast_object(self.value.state_dict())
        if rank() != 0:
            self.value.load_state_dict(state)

    def reset(self) -> None:
        """Take notice that the ranks have changed."""

    def set_value(self, value) -> None:
        """Put another object in its place, and take its state down."""
        before, self.value = self.value, value
        try:
            self.keep()
        except BaseException:
            self.value = before
            raise


class _Module(StateHandler):
    def restore(self) -> None:
        self.value.load_state_dict(self._saved)  # which copies

    def sync(self) -> None:
        state = self.value.state_dict()
        broadcast_parameters(state, root_rank=0)
        if any(not isinstance(each, torch.Tensor) for each in state.values()):
            self.value.load_state_dict(state)  # what a module's set_extra_state wants


class _Optimizer(StateHandler):
    def reset(self) -> None:
        # Where it is a DistributedOptimizer, it looks at the ranks anew when it loads a state.
        self.value.load_state_dict(self.value.state_dict())

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        if rank() == 0:
            self.reset()  # the others have loaded a state, and so forgotten a backward that has no step yet


class _Sampler(StateHandler):
    def keep(self) -> None:
        self._saved = self.value.state_dict()

    def save(self) -> None:
        """Take down what all ranks have processed, on each of them."""
        sampler, saved = self.value, self._saved
        known = saved["processed_indices"] if saved["epoch"] == sampler.epoch else set()
        new = torch.tensor(sorted(sampler.processed_indices - known), dtype=torch.int64)
        sampler.record_indices(synchronize(allgather_async(new, _waits=True)).tolist())
        self.keep()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def reset(self) -> None:
        self.value.reset()

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.keep()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, _Module),
    (torch.optim.Optimizer, _Optimizer),
    (ElasticSampler, _Sampler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Give the list of classes and their handlers, by which states made from now on choose; the first that fits."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Put another list in its place."""
    global _registry
    _registry = registry


def _handler(value) -> StateHandler | None:
    if isinstance(value, type):
        return None
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateHandler(value)
    return None
