"""Quantized compressor of the 16-bit and 8-bit wires.

A bucket is quantized, exchanged by an all-to-all, summed in fp32 and quantized again in one fused
pass, and all-gathered. All ranks' shards of a bucket go through that in steps whose memory fits the
caches. The kernels' arguments are made and checked once for a bucket and kept as long as the bucket
has the same memory, as DDP's buckets do.
"""

from __future__ import annotations

import weakref

import torch
from torch.autograd.graph import increment_version

from .._nccl import DTYPES, OPS
from ..cuda_state import refuse_capture
from ..errors import InvalidArgument
from ..kernels import WireParts, dequantize, reduce_wires
from ..kernels.quantization import plan_dequantize, plan_quantize, plan_requantize
from ..layout import WIRE_FORMATS, wire_layout
from ..parameter_names import ParameterNames
from .base import Compressor, NoCompression
from .bucket import Bucket
from .error_feedback import Residuals
from .grad_stats import add_statistics, get_statistics
from .scratch import get_wire_buffer

__all__ = ["Quantized"]

# Elements, over all ranks, of one step on the host. Their gradients, residuals and wire buffers
# stay in the second-level cache, and the calls of a step take a tenth of its time.
_STEP_NUMEL = 1 << 17
_MAX_PLANS = 256  # buckets
_CAST = {"fp16": DTYPES["float16"], "bf16": DTYPES["bfloat16"]}
# The largest number of ranks with which reading the parts of all others takes no longer than the
# exchange.
_CAST_RANKS = 4


class Quantized(Compressor):
    """16-bit and 8-bit formats: sums in fp32, in rank order, and two roundings whatever the number
    of ranks.

    `format` and `block`: of `layout.WIRE_FORMATS`. `seed`: of stochastic rounding; None rounds to
    nearest. `error_feedback`: rounding errors are kept in fp32 and added in the next step. A rank
    keeps its own rounding error, and that of the sum for the shard that it owns. So the sum of all
    results so far differs from the sum of all gradients only by the residuals.
    """

    def __init__(
        self, format: str, block: int = 256, *, error_feedback: bool = False, seed: int | None = None,
        parameter_names: ParameterNames | None = None,
    ):  # fmt: skip
        self.format = format
        self.block = block
        # Elements of which a rank's shard is a multiple: whole blocks, and 16 bytes of payload.
        self.align = block if WIRE_FORMATS[format].scaled else 16
        self.residuals = Residuals(parameter_names) if error_feedback else None
        self.seed = seed
        self.steps = 0
        self._loaded_at = -3  # never
        self._plans: dict[tuple, _Plan] = {}

    def begin_backward(self):
        self.steps += 1

    def unclaimed_names(self):
        return [] if self.residuals is None else self.residuals.unclaimed_names()

    def state_dict(self):
        residuals = {} if self.residuals is None else self.residuals.state_dict()
        return {"residuals": residuals, "steps": self.steps, "seed": self.seed}

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

    def reduce(self, comm, bucket, scaling, *, grad_stats=None):
        flat, size = bucket.flat, comm.size
        if size == 1:
            return self._reduce_alone(comm, bucket, scaling, grad_stats)
        if grad_stats is None and self._can_cast(comm, flat, scaling):
            return self._all_reduce_cast(comm, flat, scaling)
        shard_numel = -(-flat.numel() // (size * self.align)) * self.align
        return self._exchange(comm, bucket, scaling, shard_numel, flat.numel(), grad_stats, gather=True)

    def reduce_scatter(self, comm, bucket, scaling, shard_numel, *, grad_stats=None, folded=False):
        if comm.size == 1:
            return self._reduce_alone(comm, bucket, scaling, grad_stats)
        end = comm.size * shard_numel
        sent = self._exchange(comm, bucket, scaling, shard_numel, end, grad_stats, gather=False)
        remainder = bucket.flat[end:]
        if remainder.numel():  # less than a block a rank
            small = Bucket(remainder, bucket.params[-1:], [0], bucket.index)
            sent += NoCompression().reduce(comm, small, scaling, grad_stats=grad_stats)
        return sent

    def _reduce_alone(self, comm, bucket, scaling, grad_stats) -> int:
        """Reduce without compression on one rank, and apply loaded residuals, which came from more
        ranks.
        """
        if self.residuals is not None and self._loaded_at < self.steps <= self._loaded_at + 2:
            residual = self.residuals.get(bucket)
            bucket.flat.add_(residual, alpha=1.0 / scaling.prescale)
            residual.zero_()
        return NoCompression().reduce(comm, bucket, scaling, grad_stats=grad_stats)

    # ---- The host engine's all-reduce with a cast, without residuals and statistics.

    def _can_cast(self, comm, flat, scaling) -> bool:
        """Return whether the host engine's all-reduce with a cast can do this reduction."""
        plain = self.residuals is None and self.seed is None
        plain = plain and scaling.divisor in (0, comm.size) and scaling.postscale == 1.0
        fits = comm._on_host and comm.size <= _CAST_RANKS and flat.dtype in (torch.float32, torch.float64)
        fits = fits and comm.engine.library.has("collHostAllReduceCast")
        return plain and fits and self.format in _CAST

    def _all_reduce_cast(self, comm, flat, scaling) -> int:
        """All-reduce a bucket by the host engine's all-reduce with a cast.

        The engine rounds the gradients to the wire's format on their way into shared memory, and
        sums them in fp32: one pass, and the sum isn't rounded again.
        """
        op = OPS["avg" if scaling.divisor else "sum"]
        dtype = DTYPES[str(flat.dtype).removeprefix("torch.")]
        place = comm._reader.read(flat, "all_reduce", writes=True)
        comm._native.all_reduce_cast(place.ptr, place.ptr, place.count, dtype, _CAST[self.format], op, scaling.prescale)
        increment_version([flat])
        return (comm.size - 1) * 2 * place.count

    # ---- The exchange.

    def _exchange(self, comm, bucket, scaling, shard_numel, end, grad_stats, gather) -> int:
        """Reduce the first `end` elements of a bucket in the wire's format.

        Quantizes the gradients, exchanges shards by an all-to-all, and sums this rank's shard in
        fp32. `gather`: then quantizes the sum, all-gathers and dequantizes it, so that all ranks
        have the whole bucket; else each rank has its shard. Returns the bytes that this rank sends.
        """
        flat, size = bucket.flat, comm.size
        residual = None if self.residuals is None else self.residuals.get(bucket)
        plan = self._get_plan(comm, bucket, scaling, shard_numel, end, residual, gather)
        if self.seed is not None:
            refuse_capture(comm.device, "stochastic rounding draws by a seed of the host's, the same in each replay")
            plan.set_seeds((self.seed + self.steps * (size + 1)) % (1 << 62), comm.rank, size)
        found = None if grad_stats is None else get_statistics(flat.device)
        for step in plan.steps:
            step.quantize()
            comm.all_to_all(step.received, step.sent)
            if not gather:
                if step.own.numel():
                    reduce_wires(step.wires, step.own, statistics=found, **plan.sum_options)
                    add_statistics(found, grad_stats)
                continue
            if step.requantize is not None:
                if step.sum_error is not None:
                    step.sum_error.zero_()
                step.requantize()
                if step.sum_error is not None:  # scaled up: the sum takes only a part of this rank's gradient
                    step.residual.add_(step.sum_error, alpha=plan.error_scale)
            comm.all_gather(step.sent, step.own_sent)
            step.dequantize()
            if found is not None and step.own.numel():
                dequantize(step.sum_wire, step.own, statistics=found, **plan.format_options)
                add_statistics(found, grad_stats)
        increment_version([flat])
        return plan.nbytes_sent

    def _get_plan(self, comm, bucket, scaling, shard_numel, end, residual, gather) -> _Plan:
        """Return the plan of a bucket's exchange.

        A new plan is made where the bucket's memory or anything else has changed.
        """
        flat = bucket.flat
        key = (id(bucket.params[0]), bucket.index)
        made_of = (
            flat.data_ptr(), flat.numel(), flat.dtype,
            residual is None or residual.data_ptr(), scaling, shard_numel, end, gather,
        )  # fmt: skip
        plan = self._plans.get(key)
        known = plan is not None and plan.made_of == made_of and plan.comm() is comm
        if known:
            step, nbytes = plan.step, plan.memory_nbytes
        else:
            step, nbytes = self._sizes(comm, flat, shard_numel, residual, gather)
        memory = get_wire_buffer(comm, nbytes)
        if not known or memory is not plan.memory:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            format_options = {"format": self.format, "block": self.block}
            stochastic = self.seed is not None
            plan = _Plan(
                made_of, comm, bucket, scaling, shard_numel, end, step, memory, residual, gather, format_options,
                stochastic,
            )  # fmt: skip
            plan.memory_nbytes = nbytes
            plan.params = set(map(id, bucket.params))
            # DDP has made its buckets again: the old plans would keep the memory of the old ones.
            for other, old in list(self._plans.items()):
                if not plan.params.isdisjoint(old.params):
                    self._plans.pop(other, None)
            plan.owner = _drop_with(self._plans, key, bucket.params[0])
            self._plans[key] = plan
        return plan

    def _sizes(self, comm, flat, shard_numel, residual, gather) -> tuple[int, int]:
        """Return the elements of each rank's shard in one step of an exchange, and the bytes of wire
        buffers and scratch that it takes.
        """
        step = shard_numel
        if not flat.is_cuda:
            step = min(shard_numel, max(self.align, _STEP_NUMEL // comm.size // self.align * self.align))
        width = wire_layout(step, self.format, self.block).nbytes
        return step, 2 * comm.size * width + (4 * step if residual is not None and gather else 0)


def _drop_with(plans: dict, key: tuple, param) -> weakref.ref:
    """Return a weak reference to a parameter.

    The plan, which holds a bucket's memory, is dropped when the parameter dies.
    """

    def drop(reference):
        plan = plans.get(key)
        if plan is not None and plan.owner is reference:
            plans.pop(key, None)

    return weakref.ref(param, drop)


class _Plan:
    """Steps of one bucket's exchange, valid as long as the bucket's memory stays."""

    def __init__(
        self, made_of, comm, bucket, scaling, shard_numel, end, step, memory, residual, gather, format_options,
        stochastic,
    ):  # fmt: skip
        self.comm = weakref.ref(comm)
        self.made_of = made_of
        self.step = step
        self.memory = memory
        self.memory_nbytes = 0  # that were asked for
        self.params: set[int] = set()  # ids
        self.owner: weakref.ref | None = None
        self.format_options = format_options
        self.sum_options = {"average_over": scaling.divisor or None, "scale": scaling.postscale, **format_options}
        self.error_scale = (scaling.divisor or 1) / scaling.postscale
        self.nbytes_sent = 0
        self.steps = []
        self._seeded: tuple[list, list] = ([], [])  # launches that draw random bits: for this rank, and for the sum
        size = comm.size
        width = wire_layout(step, **format_options).nbytes
        scratch = memory[2 * size * width :]
        position = bucket.index << 40  # so that no two buckets draw the same random bits
        seed = 0 if stochastic else None
        for first in range(0, shard_numel, max(step, 1)):
            most = min(step, shard_numel - first)
            made = _Step(comm, bucket.flat, shard_numel, end, first, most, memory, format_options)
            if residual is not None:
                made.residual = residual[made.begin :][: made.own.numel()]
                made.sum_error = scratch.view(torch.float32)[: made.own.numel()] if gather else None
            made.quantize = plan_quantize(
                made.all, made.sent, scale=scaling.prescale, seed=seed, position=position + first, parts=made.parts,
                residual=None if residual is None else residual[first : first + made.all.numel()], **format_options,
            )  # fmt: skip
            self._seeded[0].append(made.quantize)
            if gather and made.own.numel():
                made.requantize = plan_requantize(
                    made.wires, made.sum_wire, count=made.own.numel(), residual=made.sum_error, seed=seed,
                    position=position + made.begin, **self.sum_options,
                )  # fmt: skip
                self._seeded[1].append(made.requantize)
            if gather:
                made.dequantize = plan_dequantize(made.sent, made.all, parts=made.parts, **format_options)
            self.steps.append(made)
            self.nbytes_sent += (size - 1) * made.nbytes * (2 if gather else 1)

    def set_seeds(self, seed: int, rank: int, size: int) -> None:
        """Seed this step's launches by `seed` and `rank`, and the sum's by `seed` and `size`."""
        for launches, number in zip(self._seeded, (seed + rank, seed + size), strict=True):
            for launch in launches:
                launch.args.to.seed = number


class _Step:
    """One step of an exchange: elements [first, first + most) of each rank's shard.

    One kernel quantizes all of them and one dequantizes them, whatever the number of ranks.
    """

    def __init__(self, comm, flat, shard_numel, end, first, most, memory, format_options):
        size, rank = comm.size, comm.rank
        self.nbytes = width = wire_layout(most, **format_options).nbytes
        self.sent = memory[: size * width]
        self.received = memory[size * width : 2 * size * width]
        self.all = flat[first : min((size - 1) * shard_numel + first + most, end)]
        self.parts = WireParts(size, most, width, shard_numel)
        self.begin = min(rank * shard_numel + first, end)
        self.own = flat[self.begin : min(rank * shard_numel + first + most, end)]
        nbytes = wire_layout(self.own.numel(), **format_options).nbytes
        self.wires = [self.received[r * width : r * width + nbytes] for r in range(size)]
        self.own_sent = self.sent[rank * width : (rank + 1) * width]
        self.sum_wire = self.own_sent[:nbytes]
        self.quantize = self.requantize = self.dequantize = None
        self.sum_error = self.residual = None
