"""What is kept of a bucket from step to step: the tables of its launches and copies."""

from __future__ import annotations

import torch

from ..errors import InvalidArgument
from ..kernels import ParameterTable, Table
from ..kernels.parameter_arrays import is_dense
from ..optim import _alike, _held
from ..torch_compat import TensorBase
from .shard_spec import Ownership, part_of

__all__ = ["Batch", "Laid", "Share"]

_data_ptr, _is_contiguous = TensorBase.data_ptr, TensorBase.is_contiguous


class Share:
    """The parameters of one group that are in one bucket."""

    __slots__ = ("batches", "members", "number")

    def __init__(self, number):
        self.number = number
        self.members: list[int] = []
        self.batches: dict[int | None, Batch] = {}  # what one launch steps: None: all but those that have their own


class Laid:
    """One bucket, as its parameters and the ranks were when it came first."""

    def __init__(self, bucket, owned, where):
        self.params = list(bucket.params)
        self.offsets = list(bucket.offsets)
        self.owned = owned
        self.where = where
        self.device = self.params[0].device
        for at, param in enumerate(self.params):
            if hasattr(param, "to_local") or not (param.is_contiguous() or is_dense(param)):
                raise InvalidArgument(
                    f"{self.name(at)} of shape {tuple(param.shape)} and strides {tuple(param.stride())} is not a dense "
                    "tensor of its own, as an optimizer inside of the hook needs: leave HookState's optimizer out, or "
                    "make it dense"
                )
            if param.dtype != self.params[0].dtype or param.device != self.device:
                raise InvalidArgument("a bucket's parameters must have one dtype and lie on one device")
        self.places = self._look()
        self.pieces = [
            owned.pieces(offset, param.numel()) for offset, param in zip(self.offsets, self.params, strict=True)
        ]
        self.wanted = [
            [offset, owned.size, owned.ranks, owned.align, owned.rank, *param.stride()]
            for offset, param in zip(self.offsets, self.params, strict=True)
        ]
        self.shares: list[Share] = []
        by_number: dict[int, Share] = {}
        for at, (number, _) in enumerate(where):
            if number not in by_number:
                by_number[number] = Share(number)
                self.shares.append(by_number[number])
            by_number[number].members.append(at)
        self.shards: list = []
        self.counted = [param for param in self.params if not param.is_inference()]
        self.through = None  # the buffer, and its parts for this bucket
        if owned.ranks > 1 and owned.part:
            own = Ownership(owned.whole, owned.ranks, owned.align, owned.rank)  # without the rest
            self.mine = self._table(own.pieces)
            self.theirs = self._table(owned.others)

    def _table(self, pieces_of) -> Table:
        found = [
            (part_of(param, first, count), offset + first)
            for offset, param in zip(self.offsets, self.params, strict=True)
            for first, count in pieces_of(offset, param.numel())
        ]
        return Table([part for part, _ in found], self.params[0].dtype, offsets=[place for _, place in found])

    def _look(self):
        params = self.params
        contiguous = list(map(_is_contiguous, params))
        strides = [] if all(contiguous) else [param.stride() for param in params]
        return list(map(_data_ptr, params)), contiguous, strides

    def holds(self, bucket, owned) -> bool:
        return (
            owned == self.owned
            and bucket.offsets == self.offsets
            and _alike(bucket.params, self.params)
            and self._look() == self.places
        )

    def name(self, at) -> str:
        return f"parameter {self.where[at][1]} of group {self.where[at][0]}"


class Batch:
    """What one launch steps: this rank's pieces of a share's parameters, as they were when the table was made."""

    def __init__(self, laid, members, params, keys, states, positions):
        self.params = params
        self.keys = keys
        self.held = _held(states, keys)
        self.places = self._look()
        self.steps = [state["step"] for state in states] if "step" in keys else []
        self.laid = laid
        # (number in the bucket, first element of the parameter, how many, the first one's place in the state)
        self.rows = []
        self.memory, self.row_steps, self.positions = [], [], []
        self.columns: dict[str, list] = {key: [] for key in keys if key != "step"}
        for at, param, state in zip(members, params, states, strict=True):
            place = 0
            for first, count in laid.pieces[at]:
                self.rows.append((at, first, count))
                self.memory.append(part_of(param, first, count))
                self.positions.append(positions[at] + first)
                for key, parts in self.columns.items():
                    value = state.get(key)  # None: a master of what is fp32 itself
                    parts.append(None if value is None else value[place : place + count])
                if self.steps:
                    self.row_steps.append(state["step"])
                place += count
        self.masters = self.columns.get("master_param", [])
        self.mastered = self.memory if self.masters else []
        self.versions = [-1] * len(self.mastered)
        self.table = None
        self.given = None
        self.planned = None
        self.one = torch.tensor(1.0, device="cpu")

    def _look(self) -> list[int]:
        return list(map(_data_ptr, [each for each in self.held if each is not None]))

    def current(self, params, keys, states) -> bool:
        return (
            keys == self.keys
            and _alike(params, self.params)
            and _alike(_held(states, keys), self.held)
            and self._look() == self.places
        )

    def give(self, op, columns, flat, from_grads) -> None:
        """Give the table its gradients, unless they lie where the last ones did."""
        if not self.rows:
            return
        if from_grads:
            grads = [param.grad for param in self.params]
            given = (list(map(_data_ptr, grads)), [grad.dtype for grad in grads])
        else:
            given = (flat.data_ptr(), flat.dtype)
        if given == self.given:
            return
        laid = self.laid
        if from_grads:
            for param, grad in zip(self.params, grads, strict=True):
                if grad.layout is not torch.strided or grad.stride() != param.stride():
                    raise InvalidArgument(
                        f"a gradient of shape {tuple(grad.shape)} isn't laid out as its parameter is: assign "
                        "torch.empty_like(param).copy_(grad) to param.grad"
                    )
            parts = [part_of(laid.params[at].grad, first, count) for at, first, count in self.rows]
        else:
            starts = [(laid.offsets[at] + first, count) for at, first, count in self.rows]
            parts = [flat[start : start + count] for start, count in starts]
        if self.table is None:
            self.table = ParameterTable(
                op,
                self.memory,
                parts,
                masters=self.columns.get("master_param"),
                **{column: self.columns[key] for key, column in columns.items()},
                steps_done=self.row_steps or None,
                positions=self.positions,
                name=lambda row: laid.name(self.rows[row][0]),
            )
        else:
            self.table.set_grads(parts)
        self.table.grads = ()  # DDP frees its first buckets after one backward, and the rows have the addresses
        self.given = given
        self.planned = None

    def plan(self, optimizer, group, how):
        """Give the launch; the last step's, where nothing that it was told has changed. None: no row."""
        if self.table is None:
            return None
        if any(isinstance(how[key], torch.Tensor) for key in ("lr", "grad_scale", "clip", "found_nonfinite")):
            return optimizer._plan(self.table, group, **how)
        # The rows on a GPU are known to be in use on the stream that they were planned on.
        stream = torch.cuda.current_stream(self.laid.device) if self.laid.device.type == "cuda" else None
        told = ({key: value for key, value in group.items() if key != "params"}, how, stream)
        if self.planned is None or self.planned[0] != told:
            self.planned = (told, optimizer._plan(self.table, group, **how))
        return self.planned[1]
