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

__all__ = ["start_average"]


def start_average(unit: Unit, group: ParamGroup, async_op: bool) -> Callable[[], None]:
    """Begin to average a group's full gradients over all ranks.

    Returns the function that waits and stores the result. A collective of all ranks of the unit,
    which blocks unless `async_op`.
    """
    home = current_stream(unit.device)
    flat = group.gradients.pack(unit.custom_reduce_scatter)
    part, works, in_place = _average(unit, group, flat, async_op)

    def finish():
        if works:
            works[-1].wait()
        for work in works:
            release(work, home, unit.device)
        group.gradients.set_gradients(part, in_place)

    return finish


def _average(unit: Unit, group: ParamGroup, flat: torch.Tensor, async_op: bool):
    """Begin to average.

    Returns this rank's part, the operations, each of which follows the one before, and `in_place`.
    """
    ranks = unit.ranks
    op = "avg" if unit.gradient_divide_factor is None else 1.0 / unit.gradient_divide_factor
    send = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    own = slice(ranks.rank * group.shard_numel, (ranks.rank + 1) * group.shard_numel)
    if ranks.shard is None or (ranks.replicas is not None and ranks.world._on_host):
        # In one node's shared memory a sum over all ranks at once is in rank order, as DDP's is.
        work = _all_reduce(unit, ranks.world, send, op, async_op)
        in_place = flat is group.gradients.flat
        return (flat if in_place else flat[own]), [] if work is None else [work], in_place
    out, in_place = group.gradients.reduce_output()
    to = torch.view_as_real(out).view(-1) if out.is_complex() else out
    # The second of two reductions waits for the first one on a stream that is not the
    # computation's.
    with on_side_stream(unit.device) if async_op and ranks.replicas is not None else contextlib.nullcontext():
        if unit.custom_reduce_scatter is not None:
            work = unit.custom_reduce_scatter(to, send, ranks.group or ranks.shard, _reduce_op_of_torch(op), async_op)
        else:
            work = ranks.shard.reduce_scatter(to, send, op, async_op=async_op)
        works = [] if work is None else [work]
        if ranks.replicas is not None:
            if works:
                works[-1].wait()
            work = _all_reduce(unit, ranks.replicas, to, "avg" if op == "avg" else "sum", async_op)
            works += [] if work is None else [work]
    return out, works, in_place


def _all_reduce(unit: Unit, comm: Communicator, flat: torch.Tensor, op, async_op: bool):
    if unit.custom_all_reduce is not None:
        return unit.custom_all_reduce(flat, comm, _reduce_op_of_torch(op), async_op)
    return comm.all_reduce(flat, op, async_op=async_op)


def _reduce_op_of_torch(op):
    """Convert an operation to torch.distributed's."""
    ops = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}
    return ops[op] if isinstance(op, str) else premul_sum(op)
