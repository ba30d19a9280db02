"""RankPiece: one rank's part of a model's and its optimizers' state, in host memory: a head, which is
pickled, and one buffer of all its tensors.

All ranks' pieces together are what a checkpoint is; `PieceReader` loads from them.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
from typing import Any

import torch
from torch import nn

from ...errors import TransportError
from .checkpoint import make_state
from .fqns import params_by_id
from .shard_tensor import ShardTensor
from .snapshot import HostSnapshot

__all__ = ["RankPiece", "read_piece"]


class RankPiece:
    """A rank's part of a state, whose memory the next `take` uses again.

    `head`: which tensors there are, where in `data`, and all that is no tensor, pickled; `data`: the
    tensors' bytes, uint8, page-locked where a tensor was on a GPU.

    Where the model and the optimizers hold the same tensors as at the last `take`, these are copied
    again, and no state dict is made: that takes longer than the copies of small models.
    """

    def __init__(self):
        self.head = b""
        self._snapshot = HostSnapshot()
        self._copied: dict[str, Any] = {}
        self._held: _HeldState | None = None  # None: what was taken can't be taken again

    @property
    def data(self) -> torch.Tensor:
        """The tensors' bytes."""
        return self._snapshot.data

    def take(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], first: bool) -> None:
        """Copy this rank's shards of the present state. A local call.

        `first`: take what all ranks have as well: buffers, parameters that aren't sharded and their
        state, the options of parameter groups. One rank must. Blocks as `HostSnapshot.take` does:
        call `wait` before `data` is read.
        """
        held = _HeldState(model, optimizers)
        if self._held is not None and held.same(self._held):
            self._snapshot.take_again()
            if first and held.options != self._held.options:
                for group, options in zip(self._copied["optimizer"]["param_groups"], held.options, strict=True):
                    group.update(copy.deepcopy(options))
                self._write_head()
            self._held = held
            return
        self._held = None
        state = make_state(model, optimizers)
        if not first:
            _drop_replicated(state, {named.name for named in params_by_id(model, optimizers).values() if named.owned})
        self._copied = self._snapshot.take(state)
        self._write_head()
        if held.explains(state, self._snapshot.list_sources()):
            self._held = held
        else:
            self._snapshot.forget_sources()

    def _write_head(self) -> None:
        file = io.BytesIO()
        _HeadPickler(file, self.data).dump(self._copied)
        self.head = file.getvalue()

    def wait(self) -> None:
        """Wait on the host until `data` is complete."""
        self._snapshot.wait()

    def forget_sources(self) -> None:
        """Hold the model's and the optimizers' tensors no longer."""
        self._held = None
        self._snapshot.forget_sources()


class _HeldState:
    """What a model and its optimizers hold: tensors, options of parameter groups, and other values."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]):
        self.tensors = [*model.parameters(), *model.buffers()]
        self.values: list = []
        self.options: list[dict[str, Any]] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self.tensors += group["params"]
                self.options.append({key: value for key, value in group.items() if key not in _NAMES})
            for entries in optimizer.state.values():
                for value in entries.values():
                    (self.tensors if isinstance(value, torch.Tensor) else self.values).append(value)
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def same(self, other: _HeldState) -> bool:
        """Whether the other's tensors are the same, at the same addresses, and its values equal. The
        options may differ.
        """
        return (
            self._addresses == other._addresses
            and len(self.tensors) == len(other.tensors)
            and all(map(operator.is_, self.tensors, other.tensors))
            and self.values == other.values
            and [each.keys() for each in self.options] == [each.keys() for each in other.options]
            and _are_plain(self.options)
        )

    def explains(self, state: dict[str, Any], sources: list[torch.Tensor]) -> bool:
        """Whether a state dict has these tensors, values and options alone, so that it changes with
        them alone: hooks, extra state and wrapping optimizers may add others.
        """
        known = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        optimizer = state.get("optimizer", {})
        values = [
            value
            for entries in optimizer.get("state", {}).values()
            for value in entries.values()
            if not isinstance(value, torch.Tensor)
        ]
        groups = [
            {key: value for key, value in group.items() if key not in _NAMES}
            for group in optimizer.get("param_groups", ())
        ]
        return (
            _are_plain([self.values, self.options])
            and all(isinstance(value, torch.Tensor) for value in state["model"].values())
            and all(not each.numel() or each.untyped_storage().data_ptr() in known for each in sources)
            and values == self.values
            and ("param_groups" not in optimizer or groups == self.options)
        )


_NAMES = ("params", "param_names")


def _are_plain(value) -> bool:
    """Whether a value is made of numbers, strings and None, so that equal ones are the same."""
    if isinstance(value, dict):
        return all(map(_are_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_are_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _drop_replicated(state: dict[str, Any], owned: set[str]) -> None:
    """Drop what rank 0 has as well; `owned`: parameters whose state is whole, on one rank alone."""
    state["model"] = {name: value for name, value in state["model"].items() if isinstance(value, ShardTensor)}
    if "optimizer" in state:
        entries = {
            name: {
                key: value
                for key, value in each.items()
                if isinstance(value, ShardTensor) or name in owned or not _is_large(value)
            }
            for name, each in state["optimizer"]["state"].items()
        }
        state["optimizer"] = {"state": {name: each for name, each in entries.items() if each}}


def _is_large(value) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


class _HeadPickler(pickle.Pickler):
    """Pickles a copied state, with each tensor by its place in the buffer."""

    def __init__(self, file, data: torch.Tensor):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._begin = data.data_ptr()

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        shard = isinstance(value, ShardTensor)
        local = value.local if shard else value
        offset = local.data_ptr() - self._begin if local.numel() else 0
        return offset, local.dtype, tuple(value.shape), (value.start, local.numel()) if shard else None


class _HeadUnpickler(pickle.Unpickler):
    def __init__(self, file, data: torch.Tensor):
        super().__init__(file)
        self._data = data

    def persistent_load(self, place):
        offset, dtype, shape, shard = place
        count = torch.Size(shape).numel() if shard is None else shard[1]
        end = offset + count * dtype.itemsize
        if not 0 <= offset <= end <= self._data.numel():
            raise TransportError(f"a piece of {self._data.numel()} bytes has no bytes {offset} to {end}")
        part = self._data[offset:end].view(dtype)
        return part.view(shape) if shard is None else ShardTensor(part, shape, shard[0])


def read_piece(head: bytes, data: torch.Tensor) -> dict[str, Any]:
    """Return a piece's state dict, whose tensors view `data`. The head is unpickled: verify it first."""
    return _HeadUnpickler(io.BytesIO(head), data).load()
