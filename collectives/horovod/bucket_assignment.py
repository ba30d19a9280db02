"""Assignment of an optimizer's gradients to the buckets in which they are reduced."""

from __future__ import annotations

import functools

import torch

from ..layout import pad_count
from .basics import current
from .controller import Controller
from .gradient_buckets import AllreduceBucket, CompressedGradient, ParameterState, SparseGradient, can_pack, wire_dtype
from .operations import op_name
from .process_sets import ProcessSet

__all__ = ["BucketAssignment"]

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # the first bucket is small, to start early
# On the host the copies of a gradient of this size to a flat tensor and back take longer than a
# call of its own.
_MIN_UNFUSED_BYTES = 1 << 20


class BucketAssignment:
    """Makes buckets of gradients, by the arguments of `DistributedOptimizer`.

    ``states``: the states of all parameters by the parameters' ids, in the optimizer's order; the
    owner adds to it. ``prefix``: of the names of operations.
    """

    def __init__(
        self, states: dict[int, ParameterState], prefix: str, compression, op, predivide: float, groups,
        process_set: ProcessSet, *, views: bool,
    ):  # fmt: skip
        self._states = states
        self._prefix = prefix
        self._compression = compression
        self._op = op
        self._groups = groups
        self._process_set = process_set
        self._views = views
        self._reduction = {
            "op": op_name(op), "prescale": 1.0 / predivide, "postscale": float(predivide),
            "wire": getattr(compression, "wire", ""),
        }  # fmt: skip

    def make_temporary_buckets(self, states: list[ParameterState], kinds) -> list:
        """Make buckets of single parameters, or of the user's groups, for this step alone."""
        buckets = [self._make_single(m, kinds[m]) for m in states if self._is_unfused(kinds[m])]
        for group in self._split_by_group([state for state in states if not self._is_unfused(kinds[state])]):
            bucket = self._make_bucket(group)
            if len(group) > 1 or bucket.casts:
                bucket.allocate(functools.partial(torch.empty, device=bucket.device), views=False)
            buckets.append(bucket)
        return buckets

    def make_buckets(self, states: list[ParameterState], controller: Controller) -> list:
        """Make the buckets of all further steps; ``states`` have the same order on all ranks."""
        buckets = [self._make_single(m, m.sparse) for m in states if self._is_unfused(m.sparse)]
        packed = [state for state in states if not self._is_unfused(state.sparse)]
        fill = self._fill_buckets if self._groups is None else self._split_by_group
        for group in fill(packed):
            bucket = self._make_bucket(group)
            if self._views or len(group) > 1 or bucket.casts:
                bucket.allocate(controller.comms[bucket.device.type].empty, views=self._views)
            buckets.append(bucket)
        for bucket in buckets:
            for state in bucket.states:
                state.bucket = bucket
        return buckets

    def _is_unfused(self, sparse: bool) -> bool:
        return sparse or not can_pack(self._compression)

    def _make_single(self, state: ParameterState, sparse: bool):
        name = self._prefix + state.name
        if sparse:
            return SparseGradient(state, name, self._op, self._process_set)
        return CompressedGradient(state, name, self._compression, self._reduction)

    def _make_bucket(self, states: list[ParameterState]) -> AllreduceBucket:
        name = self._prefix + states[0].name + (f" and {len(states) - 1} more" if len(states) > 1 else "")
        return AllreduceBucket(0, states, name, wire_dtype(states[0].param, self._compression), self._reduction)

    def _dtype_and_device(self, state: ParameterState) -> tuple:
        return wire_dtype(state.param, self._compression), state.param.device

    def _split_by_group(self, states: list[ParameterState]) -> list[list[ParameterState]]:
        """Return each state by itself, or the user's groups, split by dtype and device."""
        if self._groups is None:
            return [[state] for state in states]
        number_of: dict[int, int] = {}
        if isinstance(self._groups, int):
            # In the optimizer's order, of equal length but for the last one.
            keys = list(self._states)
            most = -(-len(keys) // self._groups)
            number_of = {key: at // most for at, key in enumerate(keys)}
        else:
            number_of = {id(param): at for at, group in enumerate(self._groups) for param in group}
        found: dict[tuple, list[ParameterState]] = {}
        for state in states:
            key = id(state.param)
            found.setdefault((number_of.get(key, key), *self._dtype_and_device(state)), []).append(state)
        place = {key: at for at, key in enumerate(self._states)}
        return [sorted(group, key=lambda state: place[id(state.param)]) for group in found.values()]

    def _fill_buckets(self, states: list[ParameterState]) -> list[list[ParameterState]]:
        """Fill buckets with neighbours up to the limit of bytes."""
        most = current().settings.fusion_threshold
        done: list[list[ParameterState]] = []
        filling: dict[tuple, tuple[list[ParameterState], int]] = {}
        for state in states:
            key = self._dtype_and_device(state)
            nbytes = pad_count(state.param.numel() << state.param.is_complex(), key[0].itemsize) * key[0].itemsize
            if not self._views and nbytes >= _MIN_UNFUSED_BYTES and state.param.device.type == "cpu":
                done.append([state])
                continue
            group, size = filling.get(key, (None, 0))
            if group is None or size + nbytes > min(most, _BUCKET_BYTES if len(done) > 1 else _FIRST_BUCKET_BYTES):
                group, size = [], 0
                done.append(group)
            group.append(state)
            filling[key] = group, size + nbytes
        return done
