"""A step of a sharded module without a tensor: what is made and let go of, in its order, and the bytes of it.

It follows `upcoming`, `unit` and `param` line by line, and takes what is lent from the same pool by the same rules.
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
    """A unit's parameters of one dtype, as `param.Group` lays them out over `ranks`."""

    counts: list[int]
    params: list[torch.nn.Parameter]
    dtype: torch.dtype
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trainable: bool
    persistent: bool
    ranks: int
    apart: bool  # the shard is on the host, and the unit is not

    def __post_init__(self):
        dtypes = (self.dtype, self.gather_dtype, self.reduce_dtype)
        self.layout, self.shard_numel = shard_layout(self.counts, dtypes, self.ranks)
        self.unsharded_numel = self.ranks * self.shard_numel
        self.persistent &= self.gather_dtype == self.dtype and not self.apart
        self.alone = self.ranks == 1 and self.gather_dtype == self.dtype and not self.apart  # nothing to gather
        self.buffer = self.post_forward_shard = self.grad = None  # what is there
        self.fulls: list = [None] * len(self.counts)
        self.sums: dict = {}  # gradients of tied weights, of the uses so far

    def pieces(self) -> list[int]:
        """Give the elements that rank 0 has of each parameter."""
        ends = zip(self.layout.offsets, self.counts, strict=True)
        return [max(0, min(offset + count, self.shard_numel) - offset) for offset, count in ends]


@dataclasses.dataclass(eq=False)
class UnitPlan:
    """A unit. `uses`: in the order of its forward, (flat, number of the parameter), or an inner unit."""

    name: str
    flats: list[GroupPlan] = dataclasses.field(default_factory=list)
    uses: list = dataclasses.field(default_factory=list)
    reshards: bool = True
    post_forward_comm: int = 0  # ranks that keep the parameters together behind a forward
    replicas: int = 1
    early: bool = True  # gathers in advance in forward, and in backward
    early_backward: bool = True
    late: bool = False  # in backward, behind its gradients
    reached: bool = True  # backward comes to it
    passed: bool = True  # and goes on to what was before it

    @property
    def trainable(self) -> list[GroupPlan]:
        return [flat for flat in self.flats if flat.trainable]


class _Shapes:
    """Gives the pool blocks without memory."""

    @staticmethod
    def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n, dtype=dtype, device="meta")


class StepSimulation:
    """Steps of a root unit. `peaks`: phase -> (bytes, where, what they are by kind), of the newest step.

    `kept`: bytes by kind that are there all the time. `beside`: collectives run beside the computation.
    """

    def __init__(self, root: UnitPlan, *, gpu: bool, beside: bool, kept: dict[str, int], activations: int):
        self.root, self.gpu, self.overlaps = root, gpu, beside
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
        self._pending: UnitPlan | None = None  # gathered in advance, and not used yet
        self._lingering: tuple[UnitPlan, list] | None = None
        self._resharded_in_backward = False
        self._seen: list[UnitPlan] = []
        self._pending_reductions: list = []
        self._syncs = True

    # ---- Counting.

    def _take(self, kind: str, n: int, dtype: torch.dtype, *, lent: bool = False):
        nbytes = n * dtype.itemsize
        block = None
        if lent and not self.gpu and nbytes >= MIN_POOLED_BYTES:
            block = self._pool._block(_Shapes, nbytes)
            self._in_pool += nbytes
        elif self.gpu:
            nbytes = -(-nbytes // _CUDA_BLOCK) * _CUDA_BLOCK
        self.now[kind] += nbytes
        self.look()
        return kind, nbytes, block

    def _free(self, taken) -> None:
        if taken is not None:
            kind, nbytes, block = taken
            self.now[kind] -= nbytes
            if block is not None:
                self._in_pool -= nbytes
                self._pool._returned.append((block, nbytes))

    def look(self, extra: int = 0) -> None:
        """Count what is there now, and `extra` bytes that an optimizer works in."""
        what = {**self.now, "idle": self._pool.reserved - self._in_pool, "work": extra}
        what["activations"] = self._activations if self._phase != "step" else 0
        total = sum(what.values())
        if self._phase not in self.peaks or total > self.peaks[self._phase][0]:
            self.peaks[self._phase] = total, self._where, what

    # ---- A step.

    def step(self, work: int, *, accumulate: bool) -> None:
        """Rehearse one step of an optimizer, in which it needs `work` bytes; `accumulate`: over several backwards."""
        self.peaks = {}
        for syncs in (False, False, True) if accumulate else (True,):
            self._syncs = syncs
            self._seen = []
            self._phase, self._where = "forward", self.root.name
            self.look()  # with the gradients that zero_grad has taken off the pieces: each forward lets go of its own
            self._forward(self.root)
            self._forward_order = self._seen
            self._phase, self._seen = "backward", []
            self._resharded_in_backward, self._units_before_reshard = False, 0
            self._backward(self.root)
            self._wait_for_reductions()
            for unit in self._all(self.root):
                self._reshard(unit)
                if not syncs:
                    self._keep(unit)
            self._backward_order, self._pending, self._lingering = self._seen, None, None
        self._phase, self._where = "step", ""
        self.look()
        gathered = [unit for unit in self._all(self.root) if any(not f.persistent and not f.alone for f in unit.flats)]
        lets_go = any(unit.reshards for unit in gathered)
        if work and lets_go:
            self._pool.trim()  # as for torch's optimizers
        self.look(work)

    def _all(self, unit: UnitPlan):
        yield unit
        for use in unit.uses:
            if isinstance(use, UnitPlan):
                yield from self._all(use)

    # ---- Gathering.

    def _gather(self, unit: UnitPlan) -> None:
        for flat in unit.flats:
            if flat.buffer is None and not flat.alone and not flat.persistent:
                flat.buffer = self._take("gathered", flat.unsharded_numel, flat.gather_dtype, lent=True)

    def _need(self, unit: UnitPlan) -> None:
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
                if post_forward and unit.post_forward_comm:
                    flat.post_forward_shard = self._take(
                        "gathered", flat.unsharded_numel // unit.post_forward_comm, flat.gather_dtype
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
            self._seen.append(unit)
        for flat in unit.trainable:
            if flat.ranks > 1:  # zero_grad has taken it off the pieces
                self._free(flat.grad)
                flat.grad = None
        self._need(unit)
        self._prefetch(unit, self._forward_order if unit.early else [])
        for use in unit.uses:
            if isinstance(use, UnitPlan):
                self._forward(use)
        self._where = unit.name
        if unit.reshards and unit not in self._backward_order[: self._units_before_reshard + self.overlaps]:
            self._reshard(unit, post_forward=True)

    # ---- Backward.

    def _backward(self, unit: UnitPlan) -> None:
        if not unit.reached:
            return
        self._where = unit.name
        if unit.flats:
            self._seen.append(unit)
            self._units_before_reshard += not self._resharded_in_backward
        self._need(unit)
        upcoming = self._backward_order if unit.early_backward else []
        if not unit.late:
            self._prefetch(unit, upcoming)
        if self._lingering is not None:
            (left, its), self._lingering = self._lingering, None
            self._leave(left, its)
        missing = {(id(flat), number) for flat in unit.trainable for number in range(len(flat.counts))}
        for at in reversed(range(len(unit.uses))):
            use = unit.uses[at]
            if isinstance(use, UnitPlan):
                self._backward(use)
                self._where = unit.name
            elif use[0].trainable:
                last = use not in unit.uses[:at]  # tied weights' come at their first use
                self._gradient(*use, last)
                if last:
                    missing.discard((id(use[0]), use[1]))
                    if not missing:
                        self._arrived(unit, upcoming)
        if self._lingers(unit):
            self._lingering = unit, upcoming

    def _gradient(self, flat: GroupPlan, number: int, last: bool) -> None:
        """A use of a parameter gives its gradient; behind the last one, in backward's order, it is kept or added."""
        sizes = flat.counts[number], flat.gather_dtype
        new = self._take("full_gradients", *sizes)
        if (before := flat.sums.pop(number, None)) is not None:
            both, new = (before, new), self._take("full_gradients", *sizes)  # autograd's sum is a tensor of its own
            for each in both:
                self._free(each)
        if not last:
            flat.sums[number] = new
            return
        full = flat.fulls[number]
        if full is None:
            flat.fulls[number] = new
        elif flat.gather_dtype == flat.reduce_dtype:
            self._free(new)  # added
        else:  # beside what is kept in the wider dtype
            flat.fulls[number] = (full[0], full[1] + new[1], None)

    def _keep(self, unit: UnitPlan) -> None:
        for flat in unit.trainable:
            if flat.gather_dtype != flat.reduce_dtype:
                for number, count in enumerate(flat.counts):
                    kept = self._take("full_gradients", count, flat.reduce_dtype)
                    self._free(flat.fulls[number])
                    flat.fulls[number] = kept

    @staticmethod
    def _lingers(unit: UnitPlan) -> bool:
        """Tell whether a unit goes with the gradients of its inputs, at which the unit before it begins."""
        return len(unit.trainable) < len(unit.flats) and unit.passed

    def _arrived(self, unit: UnitPlan, upcoming: list[UnitPlan]) -> None:
        if self._syncs:
            if not self._lingers(unit):
                self._reshard(unit)
            self._wait_for_reductions()
            for flat in unit.trainable:
                self._reduce(flat, unit)
            if not self.overlaps:
                self._wait_for_reductions()
        if not self._lingers(unit):
            self._leave(unit, upcoming)

    def _leave(self, unit: UnitPlan, upcoming: list[UnitPlan]) -> None:
        self._resharded_in_backward = True
        self._reshard(unit)
        if unit.late:
            self._prefetch(unit, upcoming)

    def _reduce(self, flat: GroupPlan, unit: UnitPlan) -> None:
        fits = flat.reduce_dtype == flat.dtype and not flat.apart
        if flat.ranks == 1 and fits:
            if flat.grad is None:
                flat.grad = self._take("gradients", flat.shard_numel, flat.dtype)
            buffer = None
        else:
            buffer = self._take("flat", flat.unsharded_numel, flat.reduce_dtype, lent=True)
        for number, full in enumerate(flat.fulls):
            self._free(full)
            flat.fulls[number] = None
        whole = flat.ranks == 1 or (unit.replicas > 1 and not self.gpu)  # all is summed, and a part of it taken
        part = None
        if not whole:
            if fits:
                self._own(flat)
            else:
                part = self._take("flat", flat.shard_numel, flat.reduce_dtype)
            if not self.overlaps:
                self._free(buffer)
                buffer = None

        def finish():
            self._own(flat)
            self._free(part)
            self._free(buffer)

        self._pending_reductions.append(finish)

    def _own(self, flat: GroupPlan) -> None:
        if flat.grad is None and not flat.apart:
            flat.grad = self._take("gradients", flat.shard_numel, flat.dtype)

    def _wait_for_reductions(self) -> None:
        unfinished, self._pending_reductions = self._pending_reductions, []
        for finish in unfinished:
            finish()
