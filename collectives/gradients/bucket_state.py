"""State of a bucket that is kept from step to step: the tables of its optimizer launches and of its
copies.
"""

from __future__ import annotations

import torch

from ..cuda_state import current_stream
from ..errors import InvalidArgument
from ..kernels import ParameterTable, Table
from ..kernels.parameter_arrays import is_dense
from ..optimizer_state import same_objects, state_values
from ..torch_compat import TensorBase
from .parameter_views import find_in_place
from .shard_spec import ShardSpec, flat_view

__all__ = ["BucketState", "GroupSlice", "StepBatch"]

_data_ptr, _is_contiguous = TensorBase.data_ptr, TensorBase.is_contiguous


class GroupSlice:
    """Parameters of one param group that are in one bucket."""

    __slots__ = ("batches", "members", "number")

    def __init__(self, number):
        self.number = number  # of the param group
        self.members: list[int] = []  # indices in the bucket
        # None: the launch that steps all parameters but those that have a launch of their own, by
        # their index.
        self.batches: dict[int | None, StepBatch] = {}


class BucketState:
    """A bucket with its parameters, their memory and the ranks as they were when it first came.

    `group_places`: for each parameter the number of its param group and its index there. `in_place`:
    gather the parameters in place where they lie as the bucket has them.
    """

    def __init__(self, bucket, spec: ShardSpec, group_places, *, in_place: bool = True):
        self.params = list(bucket.params)
        self.offsets = list(bucket.offsets)
        self.spec = spec
        self.group_places = group_places
        self.device = self.params[0].device
        for at, param in enumerate(self.params):
            if hasattr(param, "to_local") or not is_dense(param):
                raise InvalidArgument(
                    f"{self.name(at)} of shape {tuple(param.shape)} and strides {tuple(param.stride())} is not a dense "
                    "tensor of its own, as an optimizer inside of the hook needs: leave HookState's optimizer out, or "
                    "make it dense"
                )
            if param.dtype != self.params[0].dtype or param.device != self.device:
                raise InvalidArgument("a bucket's parameters must have one dtype and lie on one device")
        self.memory = self._memory()
        self.spans = [
            spec.local_spans(offset, param.numel()) for offset, param in zip(self.offsets, self.params, strict=True)
        ]
        self.shard_fields = [  # of the states' "shard"
            [offset, spec.numel, spec.world_size, spec.align, spec.rank, *param.stride()]
            for offset, param in zip(self.offsets, self.params, strict=True)
        ]
        self.group_slices: list[GroupSlice] = []
        by_number: dict[int, GroupSlice] = {}
        for at, (number, _) in enumerate(group_places):
            if number not in by_number:
                by_number[number] = GroupSlice(number)
                self.group_slices.append(by_number[number])
            by_number[number].members.append(at)
        self.shards: list = []  # the states' "shard" tensors
        self.versioned = [param for param in self.params if not param.is_inference()]
        self.updates = 0  # with this state
        self.stays = None  # why the parameters can't be views of the bucket
        self.gather_views = None  # the all-gather's buffer, and this bucket's views of it
        self.gathers = spec.world_size > 1 and spec.shard_numel > 0
        # The parameters' own memory where they can be gathered in place, and this rank's shard.
        self.in_place = self.own_shard = None
        if self.gathers and in_place:
            self.in_place = find_in_place(self.params, self.offsets, spec.sharded_numel)
        if self.in_place is not None:
            self.own_shard = self.in_place[spec.shard]
        elif self.gathers:
            own = ShardSpec(spec.sharded_numel, spec.world_size, spec.align, spec.rank)  # without the remainder
            self.own_table = self._table(own.local_spans)
            self.remote_table = self._table(spec.remote_spans)

    def _table(self, spans_of) -> Table:
        """Return the table of copies between the parameters' spans and the flat buffer."""
        found = [
            (flat_view(param, first, count), offset + first)
            for offset, param in zip(self.offsets, self.params, strict=True)
            for first, count in spans_of(offset, param.numel())
        ]
        return Table([part for part, _ in found], self.params[0].dtype, offsets=[place for _, place in found])

    def _memory(self):
        """Return addresses and strides of the parameters."""
        params = self.params
        contiguous = list(map(_is_contiguous, params))
        strides = [] if all(contiguous) else [param.stride() for param in params]
        return list(map(_data_ptr, params)), contiguous, strides

    def matches(self, bucket, spec) -> bool:
        """Return whether a bucket has these parameters and ranks, and the parameters' memory is
        where it was.
        """
        return (
            spec == self.spec
            and bucket.offsets == self.offsets
            and same_objects(bucket.params, self.params)
            and self._memory() == self.memory
        )

    def drop_views(self) -> None:
        """Drop all that views the parameters' memory. The state can't be used any more."""
        for part in self.group_slices:
            for batch in part.batches.values():
                batch.drop_views()
            part.batches.clear()
        self.own_table = self.remote_table = self.in_place = self.own_shard = None
        self.memory = None  # matches no bucket

    def name(self, at) -> str:
        """Return the name of parameter `at` of the bucket, for messages."""
        return f"parameter {self.group_places[at][1]} of group {self.group_places[at][0]}"


class StepBatch:
    """Parameters that one launch steps: this rank's spans of them, as they were when the table was
    made.
    """

    def __init__(self, bucket_state, members, params, keys, states, positions):
        self.params = params
        self.keys = keys
        self.values = state_values(states, keys)
        self.addresses = self._addresses()
        self.steps = [state["step"] for state in states] if "step" in keys else []
        self.bucket_state = bucket_state
        # (index in the bucket, first element of the parameter, count); by row of the table
        self.rows = []
        self.memory, self.row_steps, self.positions = [], [], []
        self.columns: dict[str, list] = {key: [] for key in keys if key != "step"}
        for at, param, state in zip(members, params, states, strict=True):
            place = 0
            for first, count in bucket_state.spans[at]:
                self.rows.append((at, first, count))
                self.memory.append(flat_view(param, first, count))
                self.positions.append(positions[at] + first)
                for key, parts in self.columns.items():
                    value = state.get(key)  # None: the master of an fp32 parameter
                    parts.append(None if value is None else value[place : place + count])
                if self.steps:
                    self.row_steps.append(state["step"])
                place += count
        self.masters = self.columns.get("master_param", [])
        self.mastered = self.memory if self.masters else []
        self.versions = [-1] * len(self.mastered)
        self.table = None
        self.grads_key = None  # addresses and dtypes of the gradients in the table
        self.planned = None  # arguments of the last plan, and its launch
        self.one = torch.tensor(1.0, device="cpu")

    def drop_views(self) -> None:
        """Drop all that views the parameters' memory."""
        self.table = self.planned = None
        self.memory, self.mastered = [], []

    def _addresses(self) -> list[int]:
        return list(map(_data_ptr, [each for each in self.values if each is not None]))

    def is_current(self, params, keys, states) -> bool:
        """Return whether the table still has the memory of these parameters and states."""
        return (
            keys == self.keys
            and same_objects(params, self.params)
            and same_objects(state_values(states, keys), self.values)
            and self._addresses() == self.addresses
        )

    def set_grads(self, op, columns, flat, from_grads) -> None:
        """Enter the gradients into the table, unless it has them: from `flat`, or from
        ``param.grad`` (`from_grads`).
        """
        if not self.rows:
            return
        if from_grads:
            grads = [param.grad for param in self.params]
            grads_key = (list(map(_data_ptr, grads)), [grad.dtype for grad in grads])
        else:
            grads_key = (flat.data_ptr(), flat.dtype)
        if grads_key == self.grads_key:
            return
        bucket_state = self.bucket_state
        if from_grads:
            for param, grad in zip(self.params, grads, strict=True):
                if grad.layout is not torch.strided or grad.stride() != param.stride():
                    raise InvalidArgument(
                        f"a gradient of shape {tuple(grad.shape)} isn't laid out as its parameter is: assign "
                        "torch.empty_like(param).copy_(grad) to param.grad"
                    )
            parts = [flat_view(bucket_state.params[at].grad, first, count) for at, first, count in self.rows]
        else:
            starts = [(bucket_state.offsets[at] + first, count) for at, first, count in self.rows]
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
                name=lambda row: bucket_state.name(self.rows[row][0]),
            )
        else:
            self.table.set_grads(parts)
        self.table.grads = ()  # DDP frees its first buckets after one backward, and the rows have the addresses
        self.grads_key = grads_key
        self.planned = None

    def plan(self, optimizer, group, options):
        """Return the launch of a step, or None where the table has no row.

        The last step's launch is used again if no argument has changed.
        """
        if self.table is None:
            return None
        factors = [options[key] for key in ("lr", "grad_scale", "clip", "found_nonfinite")]
        if True in [isinstance(factor, torch.Tensor) for factor in factors]:
            return optimizer._plan(self.table, group, **options)
        # The rows on a GPU are known to be in use on the stream that they were planned on.
        device = self.bucket_state.device
        stream = current_stream(device) if device.type == "cuda" else None
        arguments = ({key: value for key, value in group.items() if key != "params"}, options, stream)
        if self.planned is None or self.planned[0] != arguments:
            self.planned = (arguments, optimizer._plan(self.table, group, **options))
        return self.planned[1]
