"""Reduction of packed gradients over the ranks of a unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..compression.averaging import plan_division
from ..torch_compat import premul_sum
from .mesh import Ranks
from .param import as_real

__all__ = ["ReduceStages", "reduce"]


@dataclass
class ReduceStages:
    """What is done to the gradients of a unit between their packing and their storing.

    Attributes:
        divide_factor: What the sum is divided by. None: the number of ranks.
        reduce_scatter: A user's function in place of the communicator's: FSDP2's custom
            reduce-scatter, called as (output, input, group, op, async_op).
        all_reduce: A user's function for the sum over replicas, called as (tensor, group, op,
            async_op).
        hook: A user's function of this rank's reduced part, which may change it.
    """

    divide_factor: float | None = None
    reduce_scatter: Callable | None = None
    all_reduce: Callable | None = None
    hook: Callable | None = None


def reduce(flat: torch.Tensor, out: torch.Tensor, ranks: Ranks, stages: ReduceStages) -> None:
    """Reduce a flat buffer of gradients over all ranks; write this rank's part to `out`.

    A collective, which on the host blocks and on a GPU is ordered on the current stream. `flat` is
    overwritten. On the host of one node a sum over shards and replicas is one all-reduce, in rank
    order, with the bits of DDP's.
    """
    comm, world = ranks.comm, ranks.world
    flat, out = as_real(flat), as_real(out)
    factor = world.size if stages.divide_factor is None else stages.divide_factor
    if stages.reduce_scatter is not None or stages.all_reduce is not None:
        _reduce_by_custom(flat, out, ranks, stages, factor)
    elif world.size == 1:
        torch.div(flat, factor, out=out)
    else:
        plan = plan_division(world, factor, flat.dtype)
        plan.before(flat)
        if ranks.replicas is None:
            comm.reduce_scatter(out, flat, plan.op)
        elif comm.size == 1 or (world._on_host and len(world.machines or ()) == 1):
            world.all_reduce(flat, plan.op)
            out.copy_(flat[comm.rank * out.numel() :][: out.numel()])
        else:
            comm.reduce_scatter(out, flat, plan.op)
            ranks.replicas.all_reduce(out, plan.op)
        plan.after(out)
    if stages.hook is not None:
        stages.hook(out)


def _reduce_by_custom(flat, out, ranks: Ranks, stages: ReduceStages, factor: float) -> None:
    """Reduce by users' functions, which get torch's groups and operations and divide themselves."""
    op = dist.ReduceOp.AVG if stages.divide_factor is None else premul_sum(1.0 / factor)
    mesh = ranks.mesh
    if stages.reduce_scatter is not None:
        work = stages.reduce_scatter(out, flat, mesh.get_group(mesh.ndim - 1), op, False)
        if work is not None:
            work.wait()
    else:
        ranks.comm.reduce_scatter(out, flat, "avg" if stages.divide_factor is None else 1.0 / factor)
    if ranks.replicas is None:
        return
    op = dist.ReduceOp.AVG if stages.divide_factor is None else dist.ReduceOp.SUM
    if stages.all_reduce is not None:
        work = stages.all_reduce(out, mesh.get_group(0), op, False)
        if work is not None:
            work.wait()
    else:
        ranks.replicas.all_reduce(out, "avg" if stages.divide_factor is None else "sum")
