"""Simulation of a step's memory: the allocations and frees of a sharded module's step, in order,
without a tensor.

It follows `scheduler`, `unit`, `param_group` and `gradient_shard` line by line, and allocates from
the same pool by the same rules.
"""

from __future__ import annotations

import dataclasses

import torch

from .buffer_pool import MIN_POOLED_BYTES, BufferPool
from .param import shard_layout

__all__ = ["GroupPlan", "StepSimulation", "UnitPlan"]

_CUDA_BLOCK = 512  # bytes; torch's allocator counts in these


@dataclasses.dataclass(eq=False)
class GroupPlan:
    """Sizes of a unit's parameters of one dtype, laid out over `ranks` as in `ParamGroup`."""

    counts: list[int]
    params: list[torch.nn.Parameter]
    dtype: torch.dtype
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool
    persistent: bool
    ranks: int
    offloaded: bool  # the shard is on the host, and the unit computes elsewhere

    def __post_init__(self):
        dtypes = (self.dtype, self.gather_dtype, self.reduce_dtype)
        self.layout, self.shard_numel = shard_layout(self.counts, dtypes, self.ranks)
        self.unsharded_numel = self.ranks * self.shard_numel
        self.persistent &= self.gather_dtype == self.dtype and not self.offloaded
        self.is_whole = self.ranks == 1 and self.gather_dtype == self.dtype and not self.offloaded  # nothing to gather
        self.buffer = self.post_forward_shard = self.grad = None  # the buffers that are allocated
        self.full_grads: list = [None] * len(self.counts)
        self.partial_grads: dict = {}  # sums of tied weights' gradients so far

    def shard_counts(self) -> list[int]:
        """Give the elements that rank 0 has of each parameter."""
        ends = zip(self.layout.offsets, self.counts, strict=True)
        return [max(0, min(offset + count, self.shard_numel) - offset) for offset, count in ends]


@dataclasses.dataclass(eq=False)
class UnitPlan:
    """A unit. `uses`: in the order of its forward, (group, number of the parameter), or an inner
    unit.
    """

    name: str
    flats: list[GroupPlan] = dataclasses.field(default_factory=list)
    uses: list = dataclasses.field(default_factory=list)
    reshards: bool = True
    post_forward_size: int = 0  # ranks that keep all parameters between them after a forward
    replicas: int = 1
    prefetch_in_forward: bool = True  # prefetches the next unit
    prefetch_in_backward: bool = True
    prefetch_post_backward: bool = False  # prefetches after its gradients
    reaches_backward: bool = True  # the backward runs it
    continues_backward: bool = True  # and goes on to modules before it

    @property
    def trainable(self) -> list[GroupPlan]:
        return [flat for flat in self.flats if flat.trainable]


class _MetaAllocator:
    """Allocates the pool's blocks on the meta device."""

    @staticmethod
    def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device="meta")


class StepSimulation:
    """Simulated steps of a root unit. `peaks`: phase -> (bytes, unit, bytes by kind), of the newest
    step.

    `kept`: bytes by kind that are always there. `overlaps`: whether collectives overlap with the
    computation.
    """

    def __init__(self, root: UnitPlan, *, gpu: bool, overlaps: bool, kept: dict[str, int], activations: int):
        self.root, self.gpu, self.overlaps = root, gpu, overlaps
        self.now = {"gathered": 0, "full_gradients": 0, "flat": 0, "gradients": 0, **kept}
        self._in_pool = 0
        self._pool = BufferPool()
        self._activations = activations
        self._phase = self._where = ""
        self.peaks: dict[str, tuple[int, str, dict]] = {}
        self._forward_order: list[UnitPlan] = []
        self._backward_order: list[UnitPlan] = []
        self._units_before_reshard = 0
        self._gathered: set[UnitPlan] = set()
        self._pending: UnitPlan | None = None  # prefetched, and not used yet
        self._late_unit: tuple[UnitPlan, list] | None = None
        self._resharded_in_backward = False
        self._current_order: list[UnitPlan] = []
        self._pending_reductions: list = []
        self._syncs = True

    # ---- Counting.

    def _allocate(self, kind: str, n: int, dtype: torch.dtype, *, pooled: bool = False):
        nbytes = n * dtype.itemsize
        block = None
        if pooled and not self.gpu and nbytes >= MIN_POOLED_BYTES:
            block = self._pool._block(_MetaAllocator, nbytes)
            self._in_pool += nbytes
        elif self.gpu:
            nbytes = -(-nbytes // _CUDA_BLOCK) * _CUDA_BLOCK
        self.now[kind] += nbytes
        self.record_peak()
        return kind, nbytes, block

    def _free(self, taken) -> None:
        if taken is not None:
            kind, nbytes, block = taken
            self.now[kind] -= nbytes
            if block is not None:
                self._in_pool -= nbytes
                self._pool._returned.append((block, nbytes))

    def record_peak(self, extra: int = 0) -> None:
        """Count the bytes that are there now, and `extra` temporary bytes of an optimizer."""
        what = {**self.now, "idle": self._pool.reserved - self._in_pool, "work": extra}
        what["activations"] = self._activations if self._phase != "step" else 0
        total = sum(what.values())
        if self._phase not in self.peaks or total > self.peaks[self._phase][0]:
            self.peaks[self._phase] = total, self._where, what

    # ---- A step.

    def step(self, work: int, *, accumulate: bool) -> None:
        """Simulate one step of an optimizer with `work` temporary bytes. `accumulate`: over several
        backwards.
        """
        self.peaks = {}
        for syncs in (False, False, True) if accumulate else (True,):
            self._syncs = syncs
            self._current_order = []
            self._phase, self._where = "forward", self.root.name
            self.record_peak()  # gradients that zero_grad dropped are freed in each forward
            self._forward(self.root)
            self._forward_order = self._current_order
            self._phase, self._current_order = "backward", []
            self._resharded_in_backward, self._units_before_reshard = False, 0
            self._backward(self.root)
            self._wait_for_reductions()
            for unit in self._all(self.root):
                self._reshard(unit)
                if not syncs:
                    self._to_accumulated_grad(unit)
            self._backward_order, self._pending, self._late_unit = self._current_order, None, None
        self._phase, self._where = "step", ""
        self.record_peak()
        gathered = [
            unit for unit in self._all(self.root) if any(not f.persistent and not f.is_whole for f in unit.flats)
        ]
        trims = any(unit.reshards for unit in gathered)
        if work and trims:
            self._pool.trim()  # as for torch's optimizers
        self.record_peak(work)

    def _all(self, unit: UnitPlan):
        yield unit
        for use in unit.uses:
            if isinstance(use, UnitPlan):
                yield from self._all(use)

    # ---- Gathering.

    def _gather(self, unit: UnitPlan) -> None:
        for flat in unit.flats:
            if flat.buffer is None and not flat.is_whole and not flat.persistent:
                flat.buffer = self._allocate("gathered", flat.unsharded_numel, flat.gather_dtype, pooled=True)

    def _ensure_unsharded(self, unit: UnitPlan) -> None:
        if self._pending is unit:
            self._pending = None
        self._gather(unit)
        self._gathered.add(unit)

    def _reshard(self, unit: UnitPlan, *, post_forward: bool = False) -> None:
        if self._pending is unit:
            self._pending = None
        self._gathered.discard(unit)
        for flat in unit.flats:
            self._free(flat.post_forward_shard)
            flat.post_forward_shard = None
            if flat.buffer is not None:
                if post_forward and unit.post_forward_size:
                    flat.post_forward_shard = self._allocate(
                        "gathered", flat.unsharded_numel // unit.post_forward_size, flat.gather_dtype
                    )
                self._free(flat.buffer)
                flat.buffer = None

    def _prefetch(self, unit: UnitPlan, upcoming: list[UnitPlan]) -> None:
        if not self.overlaps or unit not in upcoming or self._pending is not None:
            return
        at = upcoming.index(unit) + 1
        for each in upcoming[at : at + 1]:
            if each not in self._gathered:
                self._gather(each)
                self._gathered.add(each)
                self._pending = each

    # ---- Forward.

    def _forward(self, unit: UnitPlan) -> None:
        self._where = unit.name
        if unit.flats:
            self._current_order.append(unit)
        for flat in unit.trainable:
            if flat.ranks > 1:  # zero_grad has dropped it
                self._free(flat.grad)
                flat.grad = None
        self._ensure_unsharded(unit)
        self._prefetch(unit, self._forward_order if unit.prefetch_in_forward else [])
        for use in unit.uses:
            if isinstance(use, UnitPlan):
                self._forward(use)
        self._where = unit.name
        if unit.reshards and unit not in self._backward_order[: self._units_before_reshard + self.overlaps]:
            self._reshard(unit, post_forward=True)

    # ---- Backward.

    def _backward(self, unit: UnitPlan) -> None:
        if not unit.reaches_backward:
            return
        self._where = unit.name
        if unit.flats:
            self._current_order.append(unit)
            self._units_before_reshard += not self._resharded_in_backward
        self._ensure_unsharded(unit)
        upcoming = self._backward_order if unit.prefetch_in_backward else []
        if not unit.prefetch_post_backward:
            self._prefetch(unit, upcoming)
        if self._late_unit is not None:
            (left, its), self._late_unit = self._late_unit, None
            self._reshard_in_backward(left, its)
        missing = {(id(flat), number) for flat in unit.trainable for number in range(len(flat.counts))}
        for at in reversed(range(len(unit.uses))):
            use = unit.uses[at]
            if isinstance(use, UnitPlan):
                self._backward(use)
                self._where = unit.name
            elif use[0].trainable:
                last = use not in unit.uses[:at]  # tied weights get theirs at their first use
                self._gradient(*use, last)
                if last:
                    missing.discard((id(use[0]), use[1]))
                    if not missing:
                        self._post_backward(unit, upcoming)
        if self._reshards_late(unit):
            self._late_unit = unit, upcoming

    def _gradient(self, flat: GroupPlan, number: int, last: bool) -> None:
        """Allocate the gradient of one use of a parameter; after the last use, in backward order,
        keep it or add it.
        """
        sizes = flat.counts[number], flat.gather_dtype
        new = self._allocate("full_gradients", *sizes)
        if (before := flat.partial_grads.pop(number, None)) is not None:
            both, new = (before, new), self._allocate("full_gradients", *sizes)  # autograd's sum is a new tensor
            for each in both:
                self._free(each)
        if not last:
            flat.partial_grads[number] = new
            return
        full = flat.full_grads[number]
        if full is None:
            flat.full_grads[number] = new
        elif flat.gather_dtype == flat.reduce_dtype:
            self._free(new)  # added
        else:  # next to the one kept in reduce_dtype
            flat.full_grads[number] = (full[0], full[1] + new[1], None)

    def _to_accumulated_grad(self, unit: UnitPlan) -> None:
        for flat in unit.trainable:
            if flat.gather_dtype != flat.reduce_dtype:
                for number, count in enumerate(flat.counts):
                    kept = self._allocate("full_gradients", count, flat.reduce_dtype)
                    self._free(flat.full_grads[number])
                    flat.full_grads[number] = kept

    @staticmethod
    def _reshards_late(unit: UnitPlan) -> bool:
        """Whether a unit is resharded when its inputs have gradients, at which the unit before it
        begins.
        """
        return len(unit.trainable) < len(unit.flats) and unit.continues_backward

    def _post_backward(self, unit: UnitPlan, upcoming: list[UnitPlan]) -> None:
        if self._syncs:
            if not self._reshards_late(unit):
                self._reshard(unit)
            self._wait_for_reductions()
            for flat in unit.trainable:
                self._reduce(flat, unit)
            if not self.overlaps:
                self._wait_for_reductions()
        if not self._reshards_late(unit):
            self._reshard_in_backward(unit, upcoming)

    def _reshard_in_backward(self, unit: UnitPlan, upcoming: list[UnitPlan]) -> None:
        self._resharded_in_backward = True
        self._reshard(unit)
        if unit.prefetch_post_backward:
            self._prefetch(unit, upcoming)

    def _reduce(self, flat: GroupPlan, unit: UnitPlan) -> None:
        fits = flat.reduce_dtype == flat.dtype and not flat.offloaded
        if flat.ranks == 1 and fits:
            if flat.grad is None:
                flat.grad = self._allocate("gradients", flat.shard_numel, flat.dtype)
            buffer = None
        else:
            buffer = self._allocate("flat", flat.unsharded_numel, flat.reduce_dtype, pooled=True)
        for number, full in enumerate(flat.full_grads):
            self._free(full)
            flat.full_grads[number] = None
        whole = flat.ranks == 1 or (unit.replicas > 1 and not self.gpu)  # all is summed, and a part of it copied
        part = None
        if not whole:
            if fits:
                self._allocate_shard_grad(flat)
            else:
                part = self._allocate("flat", flat.shard_numel, flat.reduce_dtype)
            if not self.overlaps:
                self._free(buffer)
                buffer = None

        def finish():
            self._allocate_shard_grad(flat)
            self._free(part)
            self._free(buffer)

        self._pending_reductions.append(finish)

    def _allocate_shard_grad(self, flat: GroupPlan) -> None:
        if flat.grad is None and not flat.offloaded:
            flat.grad = self._allocate("gradients", flat.shard_numel, flat.dtype)

    def _wait_for_reductions(self) -> None:
        unfinished, self._pending_reductions = self._pending_reductions, []
        for finish in unfinished:
            finish()
