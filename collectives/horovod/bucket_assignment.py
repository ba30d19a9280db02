"""Assignment of an optimizer's gradients to the buckets in which they are reduced."""

from __future__ import annotations

import functools

import torch

from ..gradients.bucket_assignment import fill_buckets
from ..gradients.bucket_filler import ParameterState
from ..layout import pad_count
from .basics import current
from .controller import Controller
from .gradient_buckets import AllreduceBucket, CompressedGradient, SparseGradient, can_pack, wire_dtype
from .operations import OP_NAMES
from .process_sets import ProcessSet

__all__ = ["BucketAssignment"]

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # the first bucket is small, to start early


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
            "op": OP_NAMES[op], "prescale": 1.0 / predivide, "postscale": float(predivide),
            "wire": getattr(compression, "wire", ""),
        }  # fmt: skip

    def make_temporary_buckets(self, kinds: dict[ParameterState, bool]) -> list[AllreduceBucket]:
        """Make buckets of single parameters, or of the user's groups, for this step alone.

        ``kinds``: for each parameter whether its gradient is sparse.
        """
        buckets, packed = self._make_singles(kinds)
        for states in self._split_by_group(packed):
            bucket = self._make_bucket(states)
            if len(states) > 1 or bucket.casts:
                bucket.allocate(functools.partial(torch.empty, device=bucket.device))
            buckets.append(bucket)
        return buckets

    def make_buckets(self, kinds: dict[ParameterState, bool], controller: Controller) -> list[AllreduceBucket]:
        """Make the buckets of all further steps; ``kinds`` has the same order on all ranks."""
        buckets, packed = self._make_singles(kinds)
        for states in self._fill_buckets(packed) if self._groups is None else self._split_by_group(packed):
            bucket = self._make_bucket(states)
            if self._views or len(states) > 1 or bucket.casts:
                bucket.allocate(controller.comms[bucket.device.type].empty, views=self._views)
            buckets.append(bucket)
        return buckets

    def _make_singles(self, kinds: dict[ParameterState, bool]) -> tuple[list[AllreduceBucket], list[ParameterState]]:
        """Make buckets of the gradients that are sent alone; return these, and the other parameters."""
        buckets: list[AllreduceBucket] = []
        packed = []
        for state, sparse in kinds.items():
            name, member = self._prefix + state.name, (state.name, state.param)
            if sparse:
                buckets.append(SparseGradient(name, member, self._op, self._process_set))
            elif not can_pack(self._compression):
                buckets.append(CompressedGradient(name, member, self._compression, self._reduction))
            else:
                packed.append(state)
        return buckets, packed

    def _make_bucket(self, states: list[ParameterState]) -> AllreduceBucket:
        name = self._prefix + states[0].name + (f" and {len(states) - 1} more" if len(states) > 1 else "")
        members = [(state.name, state.param) for state in states]
        return AllreduceBucket(name, members, wire_dtype(states[0].param, self._compression), self._reduction)

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
        sized = []
        for state in states:
            key = self._dtype_and_device(state)
            nbytes = pad_count(state.param.numel() << state.param.is_complex(), key[0].itemsize) * key[0].itemsize
            sized.append((state, key, nbytes))
        most = current().settings.fusion_threshold
        caps = min(most, _FIRST_BUCKET_BYTES), min(most, _BUCKET_BYTES)
        return [inside for _, inside in fill_buckets(sized, caps, views=self._views)]
