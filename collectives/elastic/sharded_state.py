"""ShardedState: state of a training whose model is in shards, which survives the death of ranks."""

from __future__ import annotations

import copy
import queue
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.agree import all_gather_object
from ..comm.waiting import format_ranks
from ..errors import CollectivesError, InvalidArgument, InvalidUsage, MissingShards
from ..rendezvous.control import open_control
from ..sharded.state.checkpoint import load_state
from ..sharded.state.checkpointer import Checkpointer
from ..sharded.state.dist_wrapper import DistWrapper, get_module_scheduler
from ..sharded.state.optimizer import optimizers_of
from ..sharded.state.piece_reader import PieceReader
from .replicas import Copy, Held, Key, Refresh, Version, find_keepers, find_whole
from .state import TorchState

__all__ = ["ShardedState"]

_OP = "elastic.ShardedState"


class _Selected(NamedTuple):
    """The version that all ranks go on from: which rank provides each piece, and the objects' states."""

    key: Key
    providers: dict[int, int]
    objects: dict[str, Any]


class ShardedState(TorchState):
    """State of a training with models in shards: ``ShardedState(sampler=sampler, epoch=0)``.

    Inside of the function that `run` has made, call `attach` once the model is sharded over
    ``elastic.communicator()`` and the optimizer made. Each rank's shards of parameters and
    optimizer state are then kept a second time in the memory of another rank, on another node where
    there is one. After a death the others agree on the newest version of which every shard is
    there, and `attach` loads it, resharded to the ranks that are left, or that have joined: no file
    is read, and the bits are those of a checkpoint of that version that as many ranks load.

    Memory: each rank keeps two versions of its shards and of those that it keeps for others, so ``2
    * (1 + replicas)`` times its shards of parameters and optimizer state, on the host, page-locked
    for shards on a GPU.

    Args:
        every: The number of commits from one version to the next; so many are done again at most.
        replicas: The number of other ranks on which each shard is kept, at most on all of them.
        checkpointer: A `collectives.sharded.Checkpointer`, whose newest whole checkpoint an error
            names.
        **kwargs: Samplers, plain attributes and objects with a state dict, as in `TorchState`; no
            models and no optimizers.
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
        self._whole: Key | None = None  # the newest version that is known to be whole; never overwritten
        self._whole_size = 0  # ranks that it is of
        self._newest: Key | None = None
        self._first: tuple | None = None  # record of the beginning
        self._number = 0  # of the last commit
        self._generation = 0
        self._selected: _Selected | None = None
        self._agreed = self._callbacks_due = False
        self._attached: tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]] | None = None
        self._comm = None
        self._keepers: list[list[int]] = []
        self._refresh: Refresh | None = None
        self._bytes_sent = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in which this rank keeps its own shards and others'."""
        return sum(version.count_bytes() for version in self._versions)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to the ranks that keep its shards, in refreshes that are done."""
        return self._bytes_sent

    # ---- Model and optimizers.

    def attach(self, model: nn.Module, optimizers=None, **objects) -> None:
        """Take a model in shards and its optimizers into the state. A collective, which blocks.

        Call it in each call of the training's function, for the model that this call has made,
        before the first commit. The first time it changes nothing; after ranks have died or joined
        it loads the version that all go on from, as `collectives.sharded.load` does.

        Args:
            model: The model.
            optimizers: An optimizer, or several.
            **objects: Others that are made in the function, with state_dict and load_state_dict,
                the same on all ranks: a learning rate scheduler, a GradScaler.

        Raises:
            InvalidUsage: Where nothing in the model is sharded, or not over the job's present
                ranks.
            InvalidArgument: For another model than the version's.
        """
        optimizers = [] if optimizers is None else optimizers_of(optimizers)
        comm, scheduler = self.channel.comm, get_module_scheduler(model)
        if scheduler is None:
            raise InvalidUsage("nothing in this model is sharded: take a TorchState", op=_OP, rank=comm.rank)
        if (scheduler.comm.rank, scheduler.comm.size) != (comm.rank, comm.size):
            raise InvalidUsage(
                f"the model is sharded over {scheduler.comm.size} ranks, and the job has {comm.size}: make it in the "
                "function that run calls, over elastic.communicator()",
                op=_OP, rank=comm.rank,
            )  # fmt: skip
        if not self._agreed:
            self._agree()
        self._stop()
        selected, self._selected = self._selected, None
        if selected is not None:
            self._load(selected, model, optimizers)
            for name in objects.keys() & selected.objects.keys():
                objects[name].load_state_dict(selected.objects[name])
        self._attached = model, optimizers, objects
        self._comm = open_control(comm)
        nodes = comm.machines or (range(comm.size),)
        self._keepers = find_keepers(comm.size, nodes, self._replicas)
        if selected is not None:
            self._take(self._number)
            self._begin_refresh()

    def _load(self, selected: _Selected, model, optimizers) -> None:
        ranks = DistWrapper(get_module_scheduler(model), "attach", f"commit {selected.key.number}")
        version = next((each for each in self._versions if each.key == selected.key), None)
        mine = [owner for owner, rank in selected.providers.items() if rank == ranks.rank]
        pieces = {owner: version.piece_of(owner) for owner in mine}
        source = f"the ranks' memory of commit {selected.key.number}"
        load_state(ranks, lambda: PieceReader(ranks, source, pieces), model, optimizers or None)

    # ---- Commits.

    def commit(self) -> None:
        """Commit; each ``every``-th time refresh the copies of all shards. All ranks call it.

        Blocks until the refresh before is done, and while the shards are copied to host memory; they
        are sent beside what follows. Then it does what `check_host_updates` does. Where ranks join it
        keeps this commit's state, whatever ``every`` is, and blocks until its copies are sent.
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
            self._whole, self._whole_size = self._newest, self.channel.size
            self.save()
            self._take(number)
            self._commits += 1
            self._begin_refresh()
        self._number = number
        if interrupt is not None:
            self.wait()  # with more ranks the first refresh replaces the version before
            raise interrupt

    def _take(self, number: int) -> None:
        """Copy this rank's shards as a version, in place of the one that isn't needed any more."""
        model, optimizers, objects = self._attached
        key = Key(number, self._generation)
        version = next(each for each in self._versions if each.key is None or each.key != self._whole)
        version.clear()
        version.rank, version.size = self.channel.rank, self.channel.size
        while len(version.copies) < len(self._keepers):
            version.copies.append(Copy())
        del version.copies[len(self._keepers) :]
        version.own.take(model, optimizers, version.rank == 0)
        version.record = self._make_record(objects)
        version.key = self._newest = key

    def _begin_refresh(self) -> None:
        if self._comm is not None:
            version = next(each for each in self._versions if each.key == self._newest)
            self._refresh = Refresh(self._comm, version, self._newest, self._keepers)
            self._refresh.start()

    def wait(self) -> None:
        """Wait until this rank's shards of the last version are sent, and those that it keeps are here.

        A commit waits by itself. Raises `RemoteError` where a rank has died.
        """
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            refresh.wait()
            self._bytes_sent += refresh.sent

    def _stop(self) -> None:
        """End a refresh that is under way, and its communicator."""
        if self._comm is not None and not self._comm.closed:
            self._comm.abort()
        if self._refresh is not None:
            self._refresh.join()  # what has failed in it is of no more concern
        for version in self._versions:
            version.own.forget_sources()
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
        """Agree with all ranks on the version to go on from, and take its attributes, on which the
        reset callbacks are called first. Blocks.

        Raises `MissingShards` on all ranks where no version has all of its shards any more.
        """
        self._agree()

    def _agree(self) -> None:
        held = [piece for version in self._versions for piece in version.list_held()]
        rows = all_gather_object(self.channel.comm, [self._generation, self._whole, self._whole_size, held])
        pieces = [[Held(*piece) for piece in row[3]] for row in rows]
        key, providers, missing = find_whole(pieces)
        known = {Key(*whole): size for _, whole, size, _ in rows if whole is not None}
        if key is None and known:  # a rank that has joined may know of a version of which it has nothing yet
            self._raise_missing({each: list(range(size)) for each, size in known.items()} | missing)
        self._generation = 1 + max(row[0] for row in rows)
        if key is None:  # no refresh is done yet: the training begins again
            self._number, self._selected = 0, None
            if self._first is not None:
                self._set_record(self._first)
            self._call_callbacks()
            super().sync()
            self._first = self._make_record({})
        else:
            root = next(rank for rank, mine in enumerate(pieces) if any(Key(*piece[:2]) == key for piece in mine))
            objects = self._take_attributes(key, root)
            self._number, self._selected = key.number, _Selected(key, providers, objects)
        self._whole, self._whole_size, self._newest = key, len(providers), key
        self._agreed = True

    def _take_attributes(self, key: Key, root: int) -> dict[str, Any]:
        """Take rank `root`'s attributes of a version; return the state dicts of the other objects."""
        version = next((each for each in self._versions if each.key == key), None)
        objects: dict[str, Any] = {}
        if version is not None:
            objects = self._set_record(version.record)
        self._call_callbacks()
        handlers = {name: handler.value.state_dict() for name, handler in self._handlers.items()}
        mine = {name: getattr(self, name) for name in self._saved_state}
        attributes, states, objects = self.channel.broadcast_object((mine, handlers, objects), root)
        differing = sorted((attributes.keys() | states.keys()) ^ (mine.keys() | handlers.keys()))
        if differing:
            both = f"rank {root}'s and rank {self.channel.rank}'s state"
            raise ValueError(f"{both} don't both have {', '.join(differing)}")
        for name, value in attributes.items():
            setattr(self, name, value)
        for name, handler in self._handlers.items():
            handler.value.load_state_dict(states[name])
            handler.keep()
        self._keep_attributes()
        return objects

    def _make_record(self, objects: dict[str, Any]) -> tuple:
        """Return what was saved last, which nobody changes, and the state dicts of other objects."""
        saved = {name: handler._saved for name, handler in self._handlers.items()}
        return self._saved_state, saved, {name: copy.deepcopy(each.state_dict()) for name, each in objects.items()}

    def _set_record(self, record: tuple) -> dict[str, Any]:
        """Set everything to a record's values; return the state dicts of other objects."""
        self._saved_state, saved, objects = record
        for name, handler in self._handlers.items():
            handler._saved = saved[name]
        super().restore()
        return objects

    def _call_callbacks(self) -> None:
        due, self._callbacks_due = self._callbacks_due, False
        for callback in self._reset_callbacks if due else ():
            callback()

    def _raise_missing(self, missing: dict[Key, list[int]]) -> None:
        newest = max(missing)
        text = None
        if self.channel.rank == 0:
            path = None if self._checkpointer is None else self._checkpointer.latest()
            text = "there is no Checkpointer" if self._checkpointer is None else "no checkpoint is whole"
            text = text if path is None else f"the newest whole checkpoint is {path}"
        try:
            text = self.channel.broadcast_object(text)
        except CollectivesError:  # a rank that had this error first has ended the communicator
            text = text or "rank 0's error names the newest whole checkpoint"
        raise MissingShards(
            f"of commit {newest.number} the shards of {format_ranks(missing[newest])} are on no rank that is left, and "
            f"no version before it is whole: with more replicas more ranks can die at once; {text}",
            op=_OP, rank=self.channel.rank, peers=missing[newest],
        )  # fmt: skip
