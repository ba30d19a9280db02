"""Compressor, the interface of all wire formats, and NoCompression, the engine's own reduction of
the gradients.

A bucket is reduced in two halves: a reduce-scatter, after which each rank has its shard of the sum,
and an all-gather of the shards. A compressor does the first half by a quantization, an all-to-all
and one fused pass that dequantizes, sums in fp32 in rank order, and quantizes again; it does the
second half by an all-gather and a dequantization. So each element is rounded twice (the sum itself
once), whatever the number of ranks. Error feedback keeps the rounding errors as residuals and adds
them in the next step.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgument
from ..layout import WIRE_FORMATS
from .averaging import ReductionPlan, plan_reduction
from .bucket import Bucket, Scaling
from .grad_stats import add_grad_stats

__all__ = [
    "Compressor",
    "NoCompression",
    "has_fused_stats",
    "parse_wire",
    "ring_bytes",
]


def parse_wire(wire) -> str:
    """Return the name of a wire: "fp32", or a format of `layout.WIRE_FORMATS`.

    Raises `InvalidArgument` for any other value.
    """
    if isinstance(wire, str) and (wire == "fp32" or wire in WIRE_FORMATS):
        return wire
    if wire == "fp8":
        raise InvalidArgument(
            "wire='fp8' could be either of two: 'fp8_e4m3' has 3 bits of mantissa and is the one for gradients in "
            "blocks with a scale each, 'fp8_e5m2' has 2 and a wider range"
        )
    if isinstance(wire, str) and wire.startswith("powersgd"):
        raise InvalidArgument(
            f"wire {wire!r:.60}: PowerSGD is torch's, powerSGD_hook of torch.distributed.algorithms.ddp_comm_hooks, "
            'which DDP runs on init_process_group("collectives")'
        )
    raise InvalidArgument(f"wire must be one of {', '.join(map(repr, ('fp32', *WIRE_FORMATS)))}, not {wire!r:.60}")


class Compressor:
    """Interface of a wire format: reduces buckets over a communicator's ranks.

    Calls block on the host; on CUDA they are ordered on torch's current stream. `grad_stats`: None,
    or a float64 tensor of [sum of squares, number of non-finite values] on the bucket's device, to
    which this rank's part of the reduced bucket is added; the parts of all ranks make up the whole
    bucket. Each call returns the bytes that this rank sends.
    """

    exact = False  # whether values are sent unrounded
    align = 0  # a rank's shard is a multiple of this number of elements; 0: of 16 bytes

    def reduce(self, comm, bucket: Bucket, scaling: Scaling, *, grad_stats=None) -> int:
        """Replace a bucket's values by the reduced ones, on all ranks."""
        raise NotImplementedError

    def reduce_scatter(
        self, comm, bucket: Bucket, scaling: Scaling, shard_numel: int, *, grad_stats=None, folded: bool = False
    ) -> int:
        """Reduce rank r's shard, ``[r * shard_numel, (r + 1) * shard_numel)``, on rank r at least.

        The elements after the last shard are reduced on all ranks. `folded`: leave `folded_factor`
        to the caller; only where that isn't 1.
        """
        raise NotImplementedError

    def folded_factor(self, comm, scaling: Scaling, dtype: torch.dtype) -> float:
        """Return the factor of the scaling that an optimizer's step can apply, with the same bits,
        in place of `reduce_scatter`; 1 where there is none.
        """
        return 1.0

    def begin_backward(self) -> None:
        """Start a new backward."""

    def unclaimed_names(self) -> list[str]:
        """Return the names of parameters with loaded state that have not come in a bucket."""
        return []

    def state_dict(self) -> dict:
        """Return the state that is kept from one step to the next."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Load a `state_dict`."""
        if state.get("residuals"):
            raise InvalidArgument("the state to load has residuals, which only the wire it was saved with can use")


class NoCompression(Compressor):
    """The wire "fp32": the reduction of NCCL or the host engine, on the gradients as they are."""

    exact = True

    def __init__(self, algorithm: str | None = None, *, deterministic: bool = False):
        self.algorithm = algorithm
        self.deterministic = deterministic

    def choose_algorithm(self, comm) -> str | None:
        """Return the algorithm for a communicator; None: its default."""
        if self.algorithm is None and self.deterministic:
            return "native" if comm._on_host else "direct"  # the ones that sum in rank order
        return self.algorithm

    def plan(self, comm, scaling: Scaling, dtype: torch.dtype) -> tuple[ReductionPlan, str | None]:
        """Return how `reduce` takes a bucket of a dtype: the factors and the op of its one all-reduce, and the
        algorithm of that.
        """
        algorithm = self.choose_algorithm(comm)
        return plan_reduction(comm, scaling, dtype, algorithm), algorithm

    def reduce(self, comm, bucket, scaling, *, grad_stats=None):
        flat = bucket.flat
        plan, algorithm = self.plan(comm, scaling, flat.dtype)
        plan.before(flat)
        if grad_stats is None:
            comm.all_reduce(flat, plan.op, algorithm=algorithm)
            plan.after(flat)
        elif has_fused_stats(comm, algorithm):
            found = _before_factors(plan, grad_stats)
            comm.all_reduce(flat, plan.op, share=found)
            plan.after(flat)
            _add_scaled(found, plan, grad_stats)
        else:
            comm.all_reduce(flat, plan.op, algorithm=algorithm)
            plan.after(flat)
            shard_numel = flat.numel() // comm.size // 16 * 16
            self._add_own_stats(comm, flat, shard_numel, grad_stats)
        return ring_bytes(flat, comm.size, 2)

    def folded_factor(self, comm, scaling, dtype):
        if comm._on_host:  # it divides in the pass that sums
            return 1.0
        plan, _ = self.plan(comm, scaling, dtype)
        return plan.fold_into_step(dtype)[1]

    def reduce_scatter(self, comm, bucket, scaling, shard_numel, *, grad_stats=None, folded=False):
        flat = bucket.flat
        plan, algorithm = self.plan(comm, scaling, flat.dtype)
        if folded:
            plan, _ = plan.fold_into_step(flat.dtype)
        plan.before(flat)
        fused = grad_stats is not None and has_fused_stats(comm, algorithm)
        found = _before_factors(plan, grad_stats) if fused else None
        options = {"share": found} if fused else {"algorithm": algorithm}
        end = comm.size * shard_numel
        sharded = flat if flat.numel() == end else flat[:end]
        sent = 0
        if shard_numel:
            own = flat[comm.rank * shard_numel : (comm.rank + 1) * shard_numel]
            comm.reduce_scatter(own, sharded, plan.op, **options)
            plan.after(own)
            sent = ring_bytes(sharded, comm.size, 1)
        if flat.numel() > end:
            remainder = flat[end:]
            comm.all_reduce(remainder, plan.op, **options)
            plan.after(remainder)
            sent += ring_bytes(remainder, comm.size, 2)
        if fused:
            _add_scaled(found, plan, grad_stats)
        elif grad_stats is not None:
            self._add_own_stats(comm, flat, shard_numel, grad_stats)
        return sent

    def _add_own_stats(self, comm, flat, shard_numel, grad_stats):
        """Add the statistics of this rank's shard, and on rank 0 those of the remainder."""
        add_grad_stats(flat[comm.rank * shard_numel : (comm.rank + 1) * shard_numel], grad_stats)
        if comm.rank == 0:
            add_grad_stats(flat[comm.size * shard_numel :], grad_stats)


def has_fused_stats(comm, algorithm) -> bool:
    """Return whether the engine counts the statistics in the reduction.

    Otherwise a pass over a rank's shard counts them.
    """
    return comm._on_host and algorithm in (None, "native")


def ring_bytes(flat, size: int, halves: int) -> int:
    """Return the bytes that a rank sends in a ring's reduce-scatter or all-gather (`halves` 1), or
    in both (2).
    """
    return halves * (size - 1) * flat.numel() * flat.element_size() // size


def _before_factors(plan, grad_stats) -> torch.Tensor:
    """Return where a reduction adds its statistics: apart, if factors come after it."""
    return grad_stats if plan.statistics_factor == 1.0 else torch.zeros_like(grad_stats)


def _add_scaled(found, plan, grad_stats) -> None:
    """Add the statistics of `_before_factors`, times the factors."""
    if found is not grad_stats:
        found[0] *= plan.statistics_factor
        grad_stats += found
