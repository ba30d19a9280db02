"""16-bit and 8-bit wires: quantize, all-to-all, one fused pass that sums in fp32 and quantizes again, all-gather.

All ranks' parts of a bucket go through that in steps whose memory fits the caches. The kernels' arguments are made and
checked once for a bucket and kept as long as it comes with the same memory, which DDP's buckets do.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch.autograd.graph import increment_version

from .._nccl import DTYPES, OPS
from ..errors import InvalidArgument
from ..kernels import dequantize, reduce_wires
from ..kernels.quantization import plan_dequantize, plan_quantize, plan_requantize
from ..layout import WIRE_FORMATS, wire_layout
from ..parameter_names import Names
from .base import Bucket, Plain, Residuals, Wire, add_found, statistics_for, transport

__all__ = ["Quantized"]

# Elements, over all ranks, that go through the wire at a time on the host: their gradients, residuals and wires stay in
# the second-level cache, and the calls of a step take a tenth of its time.
_CHUNK = 1 << 17
_MOST_PLANS = 256  # buckets
_CAST = {"fp16": DTYPES["float16"], "bf16": DTYPES["bfloat16"]}
_CAST_RANKS = 4  # up to which all read all of the others' parts in no more time than an exchange takes


class Quantized(Wire):
    """16-bit and 8-bit formats: sums in fp32, in rank order, and two roundings whatever the number of ranks.

    `format` and `block`: of `layout.WIRE_FORMATS`; `seed`: rounds at random, None to nearest; `error_feedback`: what is
    lost is kept in fp32 and added in the next step: a rank's own rounding, and that of the sum by the rank whose part
    it is, so that all that was ever applied differs from the sum of all gradients by what is kept alone.
    """

    def __init__(
        self, format: str, block: int = 256, *, error_feedback: bool = False, seed: int | None = None,
        names: Names | None = None,
    ):  # fmt: skip
        self.format = format
        self.block = block
        # Elements that a rank's part is a multiple of: whole blocks, and 16 bytes of payload.
        self.align = block if WIRE_FORMATS[format].scaled else 16
        self.residuals = Residuals(names) if error_feedback else None
        self.seed = seed
        self.steps = 0
        self._loaded_at = -3  # never
        self._plans: dict[tuple, _Plan] = {}

    def begin(self):
        self.steps += 1

    def unclaimed(self):
        return [] if self.residuals is None else self.residuals.unclaimed()

    def state_dict(self):
        kept = {} if self.residuals is None else self.residuals.state_dict()
        return {"residuals": kept, "steps": self.steps, "seed": self.seed}

    def load_state_dict(self, state):
        if "steps" not in state:
            raise InvalidArgument(f"the state to load was saved with another wire than {self.format}")
        if state["residuals"] and self.residuals is None:
            raise InvalidArgument("the state to load has residuals, which are lost without error_feedback=True")
        self.steps = self._loaded_at = state["steps"]
        if self.seed is not None and state["seed"] is not None:
            self.seed = state["seed"]
        if self.residuals is not None:
            self.residuals.load_state_dict(state["residuals"])

    def reduce(self, comm, bucket, factor, *, health=None):
        flat, size = bucket.flat, comm.size
        if size == 1:
            return self._alone(comm, bucket, factor, health)
        if health is None and self._is_cast(comm, flat, factor):
            return self._cast(comm, flat, factor)
        share = -(-flat.numel() // (size * self.align)) * self.align
        return self._exchange(comm, bucket, factor, share, flat.numel(), health, gather=True)

    def scatter(self, comm, bucket, factor, share, *, health=None):
        if comm.size == 1:
            return self._alone(comm, bucket, factor, health)
        end = comm.size * share
        sent = self._exchange(comm, bucket, factor, share, end, health, gather=False)
        behind = bucket.flat[end:]
        if behind.numel():  # less than a block a rank
            rest = Bucket(behind, bucket.params[-1:], [0], bucket.index)
            sent += Plain().reduce(comm, rest, factor, health=health)
        return sent

    def _alone(self, comm, bucket, factor, health) -> int:
        """Lose nothing, where there is nobody to send to; and pay back what was lost among more ranks and loaded."""
        if self.residuals is not None and self._loaded_at < self.steps <= self._loaded_at + 2:
            lost = self.residuals.of(bucket)
            bucket.flat.add_(lost, alpha=1.0 / factor.before)
            lost.zero_()
        return Plain().reduce(comm, bucket, factor, health=health)

    # ---- The engine's own cast, where it does all that is wanted.

    def _is_cast(self, comm, flat, factor) -> bool:
        plain = self.residuals is None and self.seed is None and factor.over in (0, comm.size) and factor.after == 1.0
        fits = comm._on_host and comm.size <= _CAST_RANKS and flat.dtype in (torch.float32, torch.float64)
        fits = fits and comm.engine.library.has("collHostAllReduceCast")
        return plain and fits and self.format in _CAST

    def _cast(self, comm, flat, factor) -> int:
        """Round on the way into shared memory and sum in fp32: one pass, and the sum isn't rounded again."""
        op = OPS["avg" if factor.over else "sum"]
        dtype = DTYPES[str(flat.dtype).removeprefix("torch.")]
        place = comm._reader.place(flat, "all_reduce", writes=True)
        comm._native.all_reduce_cast(place.ptr, place.ptr, place.count, dtype, _CAST[self.format], op, factor.before)
        increment_version([flat])
        return (comm.size - 1) * 2 * place.count

    # ---- The exchange.

    def _exchange(self, comm, bucket, factor, share, end, health, gather) -> int:
        flat, size = bucket.flat, comm.size
        lost = None if self.residuals is None else self.residuals.of(bucket)
        plan = self._plan(comm, bucket, factor, share, end, lost, gather)
        if self.seed is not None:
            plan.draw((self.seed + self.steps * (size + 1)) % (1 << 62), comm.rank, size)
        counted = None if health is None else statistics_for(flat.device)
        for step in plan.steps:
            for launch in step.give:
                launch()
            comm.all_to_all(step.taken, step.given)
            if not gather:
                if step.own.numel():
                    reduce_wires(step.wires, step.own, statistics=counted, **plan.summed)
                    add_found(counted, health)
                continue
            if step.middle is not None:
                if step.left is not None:
                    step.left.zero_()
                step.middle()
                if step.left is not None:  # comes back through this rank's gradient, of which the sum takes a part
                    step.lost.add_(step.left, alpha=plan.alpha)
            comm.all_gather(step.given, step.given_own)
            for launch in step.back:
                launch()
            if counted is not None and step.own.numel():
                dequantize(step.sum_wire, step.own, statistics=counted, **plan.how)
                add_found(counted, health)
        increment_version([flat])
        return plan.sent

    def _plan(self, comm, bucket, factor, share, end, lost, gather) -> _Plan:
        flat = bucket.flat
        step = share if flat.is_cuda else min(share, max(self.align, _CHUNK // comm.size // self.align * self.align))
        width = wire_layout(step, self.format, self.block).nbytes
        memory = transport(comm, 2 * comm.size * width + (4 * step if lost is not None and gather else 0))
        key = (id(bucket.params[0]), bucket.index)
        made_of = (
            comm, flat.data_ptr(), flat.numel(), flat.dtype, memory.data_ptr(), lost is None or lost.data_ptr(), factor,
            share, end, gather,
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None or plan.made_of[1:] != made_of[1:] or plan.made_of[0]() is not comm:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            how = {"format": self.format, "block": self.block}
            made_of = (weakref.ref(comm), *made_of[1:])
            at_random = self.seed is not None
            plan = _Plan(made_of, comm, bucket, factor, share, end, step, memory, lost, gather, how, at_random)
            plan.params = set(map(id, bucket.params))
            # DDP has made its buckets again: the old plans would keep the memory of the old ones.
            for other, old in list(self._plans.items()):
                if not plan.params.isdisjoint(old.params):
                    self._plans.pop(other, None)
            plan.owner = _dropping(self._plans, key, bucket.params[0])
            self._plans[key] = plan
        return plan


def _dropping(plans: dict, key: tuple, param) -> weakref.ref:
    """Refer to a parameter weakly; with it goes its plan, which holds the memory of a bucket."""

    def gone(reference):
        plan = plans.get(key)
        if plan is not None and plan.owner is reference:
            plans.pop(key, None)

    return weakref.ref(param, gone)


class _Plan:
    """The steps of one bucket's exchange, for as long as its memory stays."""

    def __init__(self, made_of, comm, bucket, factor, share, end, step, memory, lost, gather, how, at_random):
        self.made_of = made_of
        self.params: set[int] = set()  # ids
        self.owner: weakref.ref | None = None
        self.how = how
        self.summed = {"average_over": factor.over or None, "scale": factor.after, **how}
        self.alpha = (factor.over or 1) / factor.after
        self.sent = 0
        self.steps = []
        self._seeded: tuple[list, list] = ([], [])  # launches that draw for this rank, and for the sum
        size = comm.size
        width = wire_layout(step, **how).nbytes
        spare = memory[2 * size * width :]
        place = bucket.index << 40  # so that no two buckets draw the same random bits
        seed = 0 if at_random else None
        for first in range(0, share, max(step, 1)):
            most = min(step, share - first)
            made = _Step(comm, bucket.flat, share, end, first, most, memory, how)
            if lost is not None:
                made.lost = lost[made.begins[comm.rank] :][: made.own.numel()]
                made.left = spare.view(torch.float32)[: made.own.numel()] if gather else None
            for begin, part, wire in zip(made.begins, made.parts, made.wires_given, strict=True):
                if part.numel():
                    kept = None if lost is None else lost[begin : begin + part.numel()]
                    made.give.append(
                        plan_quantize(
                            part, wire, scale=factor.before, residual=kept, seed=seed, position=place + begin, **how
                        )
                    )
            self._seeded[0].extend(made.give)
            if gather and made.own.numel():
                made.middle = plan_requantize(
                    made.wires, made.sum_wire, count=made.own.numel(), residual=made.left, seed=seed,
                    position=place + made.begins[comm.rank], **self.summed,
                )  # fmt: skip
                self._seeded[1].append(made.middle)
            if gather:
                pairs = zip(made.parts, made.wires_given, strict=True)
                made.back = [plan_dequantize(wire, part, **how) for part, wire in pairs if part.numel()]
            self.steps.append(made)
            self.sent += (size - 1) * made.nbytes * (2 if gather else 1)

    def draw(self, seed: int, rank: int, size: int) -> None:
        """Let this step's launches draw by a seed and `rank`, and the sum's by the seed and `size`."""
        for launches, number in zip(self._seeded, (seed + rank, seed + size), strict=True):
            for launch in launches:
                launch.args.to.seed = number


class _Step:
    """One step: elements [first, first + most) of each rank's part."""

    def __init__(self, comm, flat, share, end, first, most, memory, how):
        size, rank = comm.size, comm.rank
        self.nbytes = width = wire_layout(most, **how).nbytes
        self.given = memory[: size * width]
        self.taken = memory[size * width : 2 * size * width]
        self.begins = [min(r * share + first, end) for r in range(size)]
        self.parts = [flat[a : min(r * share + first + most, end)] for r, a in enumerate(self.begins)]
        sizes = [wire_layout(part.numel(), **how).nbytes for part in self.parts]
        places = list(itertools.accumulate([width] * (size - 1), initial=0))
        self.wires_given = [self.given[at : at + nbytes] for at, nbytes in zip(places, sizes, strict=True)]
        self.wires = [self.taken[at : at + sizes[rank]] for at in places]
        self.own = self.parts[rank]
        self.given_own = self.given[rank * width : (rank + 1) * width]
        self.sum_wire = self.wires_given[rank]
        self.give, self.back = [], []
        self.middle = self.left = self.lost = None
