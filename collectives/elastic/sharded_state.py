"""ShardedState: state of a training whose model is in shards, which survives the death of ranks."""

from __future__ import annotations

import copy
import functools
import queue
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from ..comm.agree import all_gather_object
from ..comm.waiting import format_ranks
from ..errors import CollectivesError, InvalidArgument, InvalidUsage, MissingShards
from ..rendezvous.control import open_control
from ..sharded import state as shards
from ..sharded.checkpointer import Checkpointer
from ..sharded.managed_params import units_in
from ..sharded.optimizer_state import local_optimizer_state, optimizer_state, optimizers_of
from ..torch_compat import tree_map_only
from .replicas import Entry, Key, PieceReader, Version, find_keepers, find_whole, refresh
from .state import TorchState

__all__ = ["ShardedState"]

_OP = "elastic.ShardedState"


class ShardedState(TorchState):
    """State of a training with models in shards: ``ShardedState(sampler=sampler, epoch=0)``.

    Inside of the function that `run` has made, call `attach` once the model is sharded over
    ``elastic.communicator()`` and the optimizer made. Each rank's shards of parameters and optimizer state are then
    kept a second time in the memory of another rank, on another node where there is one. After a death the others agree
    on the newest version of which every shard is there, and `attach` loads it, resharded to the ranks that are left, or
    that have joined: no file is read, and the bits are those of a checkpoint of that version that as many ranks load.

    Host memory: ``2 * (1 + replicas)`` times a rank's shards of parameters and optimizer state.

    Args:
        every: The number of commits from one version to the next; so many are done again at most.
        replicas: The number of other ranks on which each shard is kept, at most on all of them.
        checkpointer: A `collectives.sharded.Checkpointer`, whose newest whole checkpoint an error names.
        **kwargs: As in `TorchState`, but models and optimizers.
    """

    def __init__(self, *, every: int = 1, replicas: int = 1, checkpointer: Checkpointer | None = None, **kwargs):
        for name, value in (("every", every), ("replicas", replicas)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} must be an int from 1 up, not {value!r}", op=_OP)
        for name, value in kwargs.items():
            if isinstance(value, nn.Module | torch.optim.Optimizer):
                raise InvalidArgument(f"{name} is made in the function, and goes to attach()", op=_OP)
        super().__init__(**kwargs)
        for name in ("model", "optimizer"):  # no attributes: see `attach`
            del self._saved_state[name]
            delattr(self, name)
        self._every, self._replicas, self._checkpointer = every, replicas, checkpointer
        self._versions = (Version(), Version())
        self._newest: Version | None = None
        self._whole: Key | None = None  # of the newest version that is known to be whole, which is never overwritten
        self._first: tuple | None = None  # record of the beginning
        self._number = self._generation = 0  # of the last commit
        self._agreed = self._callbacks_due = False
        self._selected: tuple | None = None  # what `attach` is to load: version, providers, state, objects
        self._attached: tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]] | None = None
        self._keepers: list[list[int]] = []
        self._thread = ThreadPoolExecutor(1, "collectives shards")
        self._comm = None  # of refreshes and recoveries
        self._refresh: Future | None = None

    # ---- Model and optimizers.

    def attach(self, model: nn.Module, optimizers=None, **objects) -> None:
        """Take a model in shards and its optimizers into the state. A collective, which blocks.

        Call it in each call of the training's function, for the model that this call has made, before the first commit.
        The first time it changes nothing; after ranks have died or joined it loads the version that all go on from, as
        `collectives.sharded.load` does.

        Args:
            model: The model.
            optimizers: An optimizer, or several.
            **objects: Others with a state dict that is the same on all ranks: a learning rate scheduler, a GradScaler.

        Raises:
            InvalidUsage: Nothing in the model is sharded, or not over the job's present ranks.
            InvalidArgument: The model isn't the version's. Nothing is loaded then.
        """
        optimizers = [] if optimizers is None else optimizers_of(optimizers)
        comm, over = self.channel.comm, [unit.comm for unit in units_in(model)]
        if not over:
            raise InvalidUsage("nothing in this model is sharded: take a TorchState", op=_OP, rank=comm.rank)
        if any((each.rank, each.size) != (comm.rank, comm.size) for each in over):
            raise InvalidUsage(
                f"the model is sharded over {min(each.size for each in over)} ranks, and the job has {comm.size}: make "
                "it in the function that run calls, over elastic.communicator()",
                op=_OP, rank=comm.rank,
            )  # fmt: skip
        if not self._agreed:
            self.sync()
        self._stop()
        self._comm = open_control(comm)
        self._keepers = find_keepers(comm.size, comm.machines or (range(comm.size),), self._replicas)
        selected, self._selected = self._selected, None
        if selected is not None:
            *what, states = selected
            self._load(*what, model, optimizers)
            for name in objects.keys() & states.keys():
                objects[name].load_state_dict(states[name])
        self._attached = model, optimizers, objects
        if selected is not None:
            self._take(self._number)

    def _load(self, version: Version | None, providers: list[int], state: dict, model: nn.Module, optimizers) -> None:
        """Load a state. `version`: what this rank has of it, if anything. A collective."""
        theirs, own = state["model"], shards.get_model_state_dict(model)
        shapes = [{name: list(getattr(value, "shape", ())) for name, value in each.items()} for each in (theirs, own)]
        for name in sorted(theirs.keys() | own.keys()):
            there, here = (each.get(name, "absent") for each in shapes)
            if there != here:
                text = f"commit {self._number} is of another model: {name} is {there} there, and {here} in the model"
                raise InvalidArgument(text, op=_OP, rank=self.channel.rank)
        pieces = {} if version is None else dict(zip(version.owners, version.buffers, strict=True))
        read = PieceReader(self._comm or self.channel.comm, providers, pieces).read

        def read_all(value, like: torch.Tensor | None = None):
            return tree_map_only(Entry, functools.partial(read, like=like), value)

        loaded = {name: read_all(value, own[name]) for name, value in theirs.items()}
        params = {shards.clean_name(name): param for name, param in shards.inner_module(model).named_parameters()}
        entries = {name: read_all(value, params.get(name)) for name, value in state["optimizer"]["state"].items()}
        given = {"state": entries, "param_groups": read_all(state["optimizer"]["param_groups"])}
        loads = [local_optimizer_state(model, optimizer, given) for optimizer in optimizers]
        shards.set_model_state_dict(model, loaded)
        for optimizer, local in zip(optimizers, loads, strict=True):
            optimizer.load_state_dict(local)

    # ---- Commits.

    def commit(self) -> None:
        """Commit; each ``every``-th time refresh the copies of all shards. All ranks call it.

        Blocks until the refresh before is done, and while the shards are copied to host memory; they are sent beside
        what follows. Then it does what `check_host_updates` does. Where ranks join it keeps this commit's state,
        whatever ``every`` is, and blocks until its copies are sent.
        """
        if self._attached is None:
            raise InvalidUsage("call attach() first, in the function that run calls", op=_OP)
        number = self._number + 1
        due = number % self._every == 0
        if due:
            self.wait()
        # All ranks have finished the refresh once this returns: the newest version is whole.
        interrupt = self._find_host_updates()
        if interrupt is not None and not due:
            self.wait()
            self.channel.maximum([0.0])
        if interrupt is not None or due:
            self._whole = self._newest and self._newest.key
            self.save()
            self._take(number)
            self._commits += 1
        self._number = number
        if interrupt is not None:
            self.wait()  # with more ranks the first refresh replaces the version before
            raise interrupt

    def _take(self, number: int) -> None:
        """Copy this rank's shards as a version, in place of the one that isn't needed any more; begin to send them."""
        (model, optimizers, objects), rank = self._attached, self.channel.rank
        self._newest = next(each for each in self._versions if each.key is None or each.key != self._whole)
        self._newest.take(
            (number, self._generation, self.channel.size),
            {"model": shards.get_model_state_dict(model), "optimizer": optimizer_state(model, optimizers)},
            self._make_record(objects), [rank, *(keeper.index(rank) for keeper in self._keepers)],
            on_gpu=units_in(model)[0].device.type == "cuda",
        )  # fmt: skip
        if self._comm is not None:
            self._refresh = self._thread.submit(refresh, self._comm, self._newest, self._keepers)

    def wait(self) -> None:
        """Wait until this rank's shards of the last version are sent, and those that it keeps are here.

        A commit waits by itself. Raises `RemoteError` where a rank has died.
        """
        refreshed, self._refresh = self._refresh, None
        if refreshed is not None:
            refreshed.result()

    def _stop(self) -> None:
        """End a refresh that is under way, and its communicator."""
        if self._comm is not None and not self._comm.closed:
            self._comm.abort()
        if self._refresh is not None:
            wait([self._refresh])  # what has failed in it is of no more concern
        self._comm = self._refresh = self._attached = None

    # ---- Recovery.

    def restore(self) -> None:
        """Restore the attributes of the last version here; `attach` loads the model's."""
        self._agreed = False
        self._stop()
        super().restore()

    def on_reset(self) -> None:
        """Have the reset callbacks called once the version is known, by `sync` or `attach`."""
        self._host_messages = queue.SimpleQueue()
        self._agreed, self._callbacks_due = False, True
        self._stop()

    def sync(self) -> None:
        """Agree with all ranks on the version to go on from, and take its attributes, on which the reset callbacks are
        called first. Blocks.

        Raises `MissingShards` on all ranks where no version has all of its shards any more.
        """
        held = [(each.key, owner) for each in self._versions for owner in each.owners[: each.complete]]
        if self._whole is not None:  # a rank that has joined may know of a version of which it has nothing yet
            held.append((self._whole, None))
        rows = all_gather_object(self.channel.comm, [self._generation, self._whole is not None, held])
        key, providers, missing = find_whole([row[2] for row in rows])
        if key is None and any(row[1] for row in rows):
            self._raise_missing(missing)
        self._generation = 1 + max(row[0] for row in rows)
        # Rank 0 has the most commits, and so each version that is whole. Without one the training begins again.
        version = next((each for each in self._versions if each.key is not None and each.key == key), None)
        own = (self._first, None) if version is None else (version.record, version.state)
        record, state = self.channel.broadcast_object(own)
        if record is not None:
            self._saved_state, saved, _ = record
            for name, handler in self._handlers.items():
                handler._saved = saved[name]
            super().restore()
        due, self._callbacks_due = self._callbacks_due, False
        for callback in self._reset_callbacks if due else ():
            callback()
        super().sync()
        if key is None:
            self._number, self._selected, self._first = 0, None, self._make_record({})
        else:
            self._number, self._selected = key[0], (version, providers, state, record[2])
        self._whole, self._newest, self._agreed = key, version, True

    def _make_record(self, objects: dict[str, Any]) -> tuple:
        """Return what was saved last, which nobody changes, and the state dicts of other objects."""
        saved = {name: handler._saved for name, handler in self._handlers.items()}
        return self._saved_state, saved, {name: copy.deepcopy(each.state_dict()) for name, each in objects.items()}

    def _raise_missing(self, missing: dict[Key, list[int]]) -> None:
        key, text = max(missing), None
        if self.channel.rank == 0:
            path = None if self._checkpointer is None else self._checkpointer.latest()
            text = "there is no whole checkpoint" if path is None else f"the newest whole checkpoint is {path}"
        try:
            text = self.channel.broadcast_object(text)
        except CollectivesError:  # a rank that had this error first has ended the communicator
            text = text or "rank 0's error names the newest whole checkpoint"
        raise MissingShards(
            f"of commit {key[0]} the shards of {format_ranks(missing[key])} are on no rank that is left, and no "
            f"version before it is whole: with more replicas more ranks can die at once; {text}",
            op=_OP, rank=self.channel.rank, peers=missing[key],
        )  # fmt: skip
