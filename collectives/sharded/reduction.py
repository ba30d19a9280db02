"""Reduction of a unit's gradients: reduce-scatter over the shard ranks, all-reduce over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..compression import ReductionPlan, plan_division
from ..torch_compat import premul_sum
from .param_group import ParamGroup
from .streams import beside_current, current_stream, on_side_stream, release, use_on_current, wait_for_side_stream

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["PendingReductions", "as_real", "start_average", "start_reduction"]


class PendingReductions:
    """Reductions of one unit in progress, whose results are stored on a device.

    `pending`: the functions of `Unit.start_reduce`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stores = False  # whether a side stream stores results for which no stream has waited
        self.pending: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Store the results: on the host wait for them, on CUDA on a side stream, so that the
        computation doesn't wait.
        """
        pending, self.pending = self.pending, []
        if pending:
            self._stores = True
            with on_side_stream(self._device, "store"):
                for finish in pending:
                    finish()

    def wait(self) -> None:
        """Store the results; on CUDA the current stream waits for them."""
        self.finish()
        if self._stores:
            self._stores = False
            wait_for_side_stream(self._device, "store")


def start_average(unit: Unit, group: ParamGroup, async_op: bool) -> Callable[[], None]:
    """Begin to average a group's full gradients over all ranks, or to divide their sum by the
    unit's own factor; see `start_reduction`.
    """
    world = unit.ranks.world
    factor = world.size if unit.gradient_divide_factor is None else unit.gradient_divide_factor
    if unit.custom_reduce_scatter is None and unit.custom_all_reduce is None:
        plan = plan_division(world, factor, group.reduce_dtype)
    else:  # custom collectives divide themselves
        plan = ReductionPlan("avg" if unit.gradient_divide_factor is None else 1.0 / factor)
    # In one node's shared memory a sum over all ranks at once is in rank order, as DDP's is.
    whole = unit.ranks.shard is None or (unit.ranks.replicas is not None and world._on_host)
    flat = group.gradients.pack(unit.custom_reduce_scatter)
    return start_reduction(unit, group, flat, plan, whole=whole, async_op=async_op)


def start_reduction(
    unit: Unit, group: ParamGroup, flat: torch.Tensor, plan: ReductionPlan, *, whole: bool, async_op: bool,
    finish=None, **options,
) -> Callable[[], None]:  # fmt: skip
    """Begin to reduce a group's packed gradients over all ranks, in their own dtype, as `plan` says.

    Returns the function that waits and makes this rank's part the shards' gradients. A collective
    of all ranks of the unit, which blocks unless `async_op`. On CUDA that function may be called on
    another stream, which then waits instead of the computation's. `whole`: all ranks get all of it,
    by one all-reduce. `finish`: a function of the reduced tensor, which that calls first. `options`:
    of the first collective.
    """
    home, ranks, gradients = current_stream(unit.device), unit.ranks, group.gradients
    if unit.device.type != "cpu":
        gradients.alloc_flat()  # here, not on the stream that stores the result
    plan.before(as_real(flat))
    if whole:
        reduced, in_place = flat, flat is gradients.flat
        works = [_all_reduce(unit, ranks.world, as_real(flat), plan.op, async_op, **options)]
    else:
        reduced, in_place = gradients.reduce_output(flat)
        works = _reduce_scatter(unit, as_real(reduced), as_real(flat), plan.op, async_op, options)
    works = [work for work in works if work is not None]

    def end():
        if works:
            works[-1].wait()  # each operation follows the one before
        elif home is not None and current_stream(unit.device) != home:
            current_stream(unit.device).wait_stream(home)
        for work in works:
            release(work, home, unit.device)
        plan.after(as_real(gradients.local_shard(reduced)))
        if unit.all_reduce_hook is not None:
            use_on_current(home, reduced)
            unit.all_reduce_hook(gradients.local_shard(reduced))
        if finish is not None:
            finish(reduced)
        use_on_current(home, reduced, gradients.flat)
        gradients.set_gradients(reduced, in_place)
        gradients.free_packed(flat)

    return end


def start_compressed(
    unit: Unit, group: ParamGroup, flat: torch.Tensor, reduce: Callable[[], int], async_op: bool
) -> tuple[int, Callable[[], None]]:
    """Begin a group's reduction by a compressor, `reduce`, which orders its work on the current
    stream: with `async_op` on CUDA a side stream.

    Returns the bytes that it sends, and the function that stores the result, as `start_reduction`.
    """
    home, gradients = current_stream(unit.device), group.gradients
    if home is not None:
        gradients.alloc_flat()  # here, not on the stream that stores the result
    with beside_current(unit.device, "compressed") if async_op else contextlib.nullcontext():
        here = current_stream(unit.device)
        use_on_current(home, flat)
        sent = reduce()

    def end():
        if here is not None:
            current_stream(unit.device).wait_stream(here)
            use_on_current(home, flat, gradients.flat)
        gradients.set_gradients(flat, flat is gradients.flat)
        gradients.free_packed(flat)

    return sent, end


def _reduce_scatter(unit: Unit, out: torch.Tensor, send: torch.Tensor, op, async_op: bool, options: dict) -> list:
    """Begin to reduce-scatter, and to all-reduce the result over replicas; return the operations."""
    ranks = unit.ranks
    if unit.custom_reduce_scatter is not None:
        work = unit.custom_reduce_scatter(out, send, ranks.group or ranks.shard, _reduce_op_of_torch(op), async_op)
    else:
        work = ranks.shard.reduce_scatter(out, send, op, async_op=async_op, **options)
    if ranks.replicas is None:
        return [work]
    # The second of two reductions waits for the first one on a stream of its own. The next unit's
    # reduce-scatter doesn't wait for it.
    with on_side_stream(unit.device, "replicas") if async_op else contextlib.nullcontext():
        if work is not None:
            work.wait()
        return [work, _all_reduce(unit, ranks.replicas, out, "avg" if op == "avg" else "sum", async_op)]


def _all_reduce(unit: Unit, comm: Communicator, flat: torch.Tensor, op, async_op: bool, **options):
    if unit.custom_all_reduce is not None:
        return unit.custom_all_reduce(flat, comm, _reduce_op_of_torch(op), async_op)
    return comm.all_reduce(flat, op, async_op=async_op, **options)


def _reduce_op_of_torch(op):
    """Convert an operation to torch.distributed's."""
    ops = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}
    return ops[op] if isinstance(op, str) else premul_sum(op)


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """View a flat tensor's complex numbers as pairs of real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
