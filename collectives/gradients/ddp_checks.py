"""Checks of a DDP object: configurations in which a hook would average over wrong ranks or by a
wrong divisor.
"""

from __future__ import annotations

import torch.distributed as dist

from ..errors import InvalidUsage
from ..parameter_names import find_ddp
from ..torch_patches import find_hooked_ddps
from .step_count import find_step_count

__all__ = ["check_group", "check_join", "leaves_out_buckets", "only_ddp_waits"]


def check_group(ddp) -> None:
    """Raise `InvalidUsage` for a DDP object over a part of the default group's ranks.

    Called where the hook's state names no ranks, which means all of them: the ranks outside of the
    object's group would never join that communicator.
    """
    group = ddp.process_group
    if dist.is_initialized() and group is not dist.group.WORLD and group.size() != dist.group.WORLD.size():
        raise InvalidUsage(
            f"this DistributedDataParallel object is over a process group of {group.size()} of the "
            f"{dist.group.WORLD.size()} ranks, and the hook's state names no ranks, which means all of them: register "
            "it with HookState(process_group=group), or use collectives.DistributedDataParallel, which names its own"
        )


def only_ddp_waits(param) -> bool:
    """Return whether DDP alone waits for the futures of a parameter's buckets, after the last bucket, on the
    stream of which the last bucket's hook is called.

    So it is where one DDP object with a hook has the parameter and its hook is `fused_allreduce` itself. A
    hook around it may use a bucket once its future is complete. The last bucket of a module on several GPUs
    is on one of them.
    """
    ddps, count = find_hooked_ddps(param), find_step_count(param)
    if len(ddps) != 1 or count is None or count.ddp is None or count.ddp() is not ddps[0]:
        return False
    (ddp,) = ddps
    return not (ddp.is_multi_device_module or leaves_out_buckets(param))


def leaves_out_buckets(param) -> bool:
    """Return whether the last bucket of a backward may not come: DDP leaves out the buckets of parameters
    that the forward hasn't used with ``skip_all_reduce_unused_params``.
    """
    return any(getattr(ddp, "skip_all_reduce_unused_params", False) for ddp in find_hooked_ddps(param))


def check_join(params, *, average: bool, defers_step: bool) -> bool:
    """Return whether this is inside of DDP's ``join()``. Raises `InvalidUsage` there for options that
    can't be right, on all ranks.

    Ranks that have joined call the hook, too. `params`: those of a bucket; `average`: the hook
    divides by the number of ranks; `defers_step`: the update of the hook's optimizer waits for
    ``optimizer.step()``.
    """
    ddp = find_ddp(params)
    if ddp is None or not ddp._join_config.enable:
        return False
    if average and not ddp._divide_by_initial_world_size:
        raise InvalidUsage(
            "join(divide_by_initial_world_size=False) divides by the ranks that have not joined, which a hook is "
            "not told: leave it out"
        )
    if defers_step:
        raise InvalidUsage(
            "with a GradScaler the updates wait for optimizer.step(), which a rank that has joined doesn't call: "
            "in join() step the optimizer after the backward, without HookState's optimizer"
        )
    return True
