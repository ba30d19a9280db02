"""RankPiece: one rank's part of a model's and its optimizers' state, in host memory: a head, which is
pickled, and one buffer of all its tensors.

All ranks' pieces together are what a checkpoint is; `PieceReader` loads from them.
"""

from __future__ import annotations

import io
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
    """

    def __init__(self):
        self.head = b""
        self._snapshot = HostSnapshot()

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
        state = make_state(model, optimizers)
        if not first:
            _drop_replicated(state, {named.name for named in params_by_id(model, optimizers).values() if named.owned})
        copied = self._snapshot.take(state)
        file = io.BytesIO()
        _HeadPickler(file, self.data).dump(copied)
        self.head = file.getvalue()

    def wait(self) -> None:
        """Wait on the host until `data` is complete."""
        self._snapshot.wait()


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
