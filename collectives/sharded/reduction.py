"""Reduction of packed gradients over the ranks of a unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm import is_on_one_host
from ..compression.averaging import plan_division
from ..torch_compat import premul_sum
from .mesh import Ranks
from .param import as_real

__all__ = ["ReduceStages", "reduce", "reduces_whole", "ring_elements"]


@dataclass
class ReduceStages:
    """What is done to the gradients of a unit between their packing and their storing.

    Attributes:
        divide_factor: What the sum is divided by. None: the number of ranks.
        reduce_scatter: A user's function in place of the communicator's: FSDP2's custom
            reduce-scatter, called as (output, input, group, op, async_op).
        hook: A user's function of this rank's reduced part, which may change it.
        wire: A function (comm, flat, part) that sends gradients in a wire format in place of the
            communicator's collectives. It divides, too. `part`: the elements of a rank's part, which
            that rank gets; None: all ranks get all of it.
        algorithm: The algorithm of the communicator's collectives. None: its default.
    """

    divide_factor: float | None = None
    reduce_scatter: Callable | None = None
    hook: Callable | None = None
    wire: Callable | None = None
    algorithm: str | None = None


def reduce(flat: torch.Tensor, out: torch.Tensor, ranks: Ranks, stages: ReduceStages) -> None:
    """Reduce a flat buffer of gradients over all ranks; write this rank's part to `out`.

    A collective, which on the host blocks and on a GPU is ordered on the current stream. `flat` is
    overwritten. On the host of one node a sum over shards and replicas is one all-reduce, in rank
    order, with the bits of DDP's.
    """
    comm, world = ranks.comm, ranks.world
    flat, out = as_real(flat), as_real(out)
    factor = world.size if stages.divide_factor is None else stages.divide_factor
    if stages.wire is not None:
        whole = reduces_whole(ranks, stages)
        stages.wire(world if whole else comm, flat, None if whole else out.numel())
        out.copy_(_rank_part(flat, out, comm))
    elif stages.reduce_scatter is not None:
        _reduce_by_custom(flat, out, ranks, stages, factor)
    elif world.size == 1:
        torch.div(flat, factor, out=out)
    else:
        options = {} if stages.algorithm is None else {"algorithm": stages.algorithm}
        plan = plan_division(world, factor, flat.dtype, stages.algorithm)
        plan.before(flat)
        if reduces_whole(ranks, stages):
            world.all_reduce(flat, plan.op, **options)
            out.copy_(_rank_part(flat, out, comm))
        else:
            comm.reduce_scatter(out, flat, plan.op, **options)
            if ranks.replicas is not None:
                ranks.replicas.all_reduce(out, "avg" if plan.op == "avg" else "sum", **options)
        plan.after(out)
    if stages.hook is not None:
        stages.hook(out)


def reduces_whole(ranks: Ranks, stages: ReduceStages) -> bool:
    """Whether all ranks get all of the sum, by one collective of shards and replicas."""
    if ranks.replicas is None or ranks.comm.size == 1:
        return ranks.comm.size == 1
    return is_on_one_host(ranks.world) or stages.wire is not None or stages.algorithm is not None


def ring_elements(numel: int, ranks: Ranks, stages: ReduceStages) -> int:
    """Return the number of elements that a rank sends where rings reduce so many."""
    if reduces_whole(ranks, stages):
        return 2 * (ranks.world.size - 1) * numel // ranks.world.size
    size, replicas = ranks.comm.size, 1 if ranks.replicas is None else ranks.replicas.size
    return (size - 1) * numel // size + 2 * (replicas - 1) * (numel // size) // replicas


def _rank_part(flat: torch.Tensor, out: torch.Tensor, comm) -> torch.Tensor:
    return flat[comm.rank * out.numel() :][: out.numel()]


def _reduce_by_custom(flat, out, ranks: Ranks, stages: ReduceStages, factor: float) -> None:
    """Reduce by a user's function, which gets torch's group and operation and divides itself."""
    op = dist.ReduceOp.AVG if stages.divide_factor is None else premul_sum(1.0 / factor)
    work = stages.reduce_scatter(out, flat, ranks.mesh.get_group(ranks.mesh.ndim - 1), op, False)
    if work is not None:
        work.wait()
    if ranks.replicas is not None:
        ranks.replicas.all_reduce(out, "avg" if stages.divide_factor is None else "sum")
