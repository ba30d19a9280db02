"""Reduction of a unit's gradients: reduce-scatter over the shard ranks, all-reduce over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..torch_compat import premul_sum
from .param_group import ParamGroup
from .streams import current_stream, on_side_stream, release

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["as_real", "start_average", "start_reduction"]


def start_average(unit: Unit, group: ParamGroup, async_op: bool) -> Callable[[], None]:
    """Begin to average a group's full gradients over all ranks, or to divide their sum by the
    unit's own factor; see `start_reduction`.
    """
    op = "avg" if unit.gradient_divide_factor is None else 1.0 / unit.gradient_divide_factor
    # In one node's shared memory a sum over all ranks at once is in rank order, as DDP's is.
    whole = unit.ranks.shard is None or (unit.ranks.replicas is not None and unit.ranks.world._on_host)
    flat = group.gradients.pack(unit.custom_reduce_scatter)
    return start_reduction(unit, group, flat, op, whole=whole, async_op=async_op)


def start_reduction(
    unit: Unit, group: ParamGroup, flat: torch.Tensor, op, *, whole: bool, async_op: bool, finish=None, **options
) -> Callable[[], None]:
    """Begin to reduce a group's packed gradients over all ranks, in their own dtype.

    Returns the function that waits and makes this rank's part the shards' gradients. A collective
    of all ranks of the unit, which blocks unless `async_op`. `whole`: all ranks get all of it, by
    one all-reduce. `finish`: a function of the reduced tensor, which that calls first. `options`:
    of the first collective.
    """
    home, ranks = current_stream(unit.device), unit.ranks
    if whole:
        in_place = flat is group.gradients.flat
        works = [_all_reduce(unit, ranks.world, as_real(flat), op, async_op, **options)]
        reduced = flat
    else:
        reduced, in_place = group.gradients.reduce_output()
        works = _reduce_scatter(unit, as_real(reduced), as_real(flat), op, async_op, options)
    works = [work for work in works if work is not None]

    def end():
        if works:
            works[-1].wait()  # each operation follows the one before
        for work in works:
            release(work, home, unit.device)
        if finish is not None:
            finish(reduced)
        group.gradients.set_gradients(reduced, in_place)

    return end


def _reduce_scatter(unit: Unit, out: torch.Tensor, send: torch.Tensor, op, async_op: bool, options: dict) -> list:
    """Begin to reduce-scatter, and to all-reduce the result over replicas; return the operations."""
    ranks = unit.ranks
    # The second of two reductions waits for the first one on a stream that is not the
    # computation's.
    with on_side_stream(unit.device) if async_op and ranks.replicas is not None else contextlib.nullcontext():
        if unit.custom_reduce_scatter is not None:
            work = unit.custom_reduce_scatter(out, send, ranks.group or ranks.shard, _reduce_op_of_torch(op), async_op)
        else:
            work = ranks.shard.reduce_scatter(out, send, op, async_op=async_op, **options)
        if ranks.replicas is None:
            return [work]
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
