"""GradScalers over shards: a non-finite gradient in one rank's shard counts on every rank.

A scaler looks at its own rank's gradients. Ranks with other findings would go on with other scales,
and with a step that only some make. So from the first sharded module on torch's scalers exchange
their findings, in one all-reduce of a number, where the optimizer holds shards: in ``unscale_``, or
in ``step`` for optimizers that unscale themselves. Users need not do anything for that;
`ShardedGradScaler` is for programs that name FSDP's, or whose scaler has more ranks than the
shards.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from ..rendezvous.process_groups import get_communicator
from ..torch_patches import patch_scaler_checks
from .scheduler import find_schedulers

__all__ = ["ShardedGradScaler", "patch_grad_scaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks agree on non-finite gradients, with the name and arguments
    of FSDP's.

    `process_group`: the ranks that agree; None: those over which the optimizer's parameters are
    sharded, as torch's own scaler does here. All of them must call ``step``, ``unscale_`` and
    ``update``.
    """

    def __init__(
        self, device: str = "cuda", init_scale: float = 2.0**16, backoff_factor: float = 0.5,
        growth_factor: float = 2.0, growth_interval: int = 2000, enabled: bool = True, process_group=None,
    ):  # fmt: skip
        patch_grad_scaler()
        super().__init__(
            device, init_scale=init_scale, backoff_factor=backoff_factor, growth_factor=growth_factor,
            growth_interval=growth_interval, enabled=enabled,
        )  # fmt: skip
        self.process_group = process_group


def _all_reduce_found_inf(scaler, optimizer) -> None:
    """Make a scaler's findings in an optimizer's gradients the maximum of all ranks'."""
    state = scaler._per_optimizer_states[id(optimizer)]
    group = getattr(scaler, "process_group", None)
    if isinstance(group, dist.ProcessGroup):
        comms = [get_communicator(group, scaler._scale.device)]
    else:
        params = (param for each in optimizer.param_groups for param in each["params"])
        comms = [scheduler.comm for scheduler in find_schedulers(params)]
    comms = [comm for comm in comms if comm.size > 1]
    if not comms:
        return
    found = state["found_inf_per_device"]
    if not found:  # this rank has no gradients
        found[scaler._scale.device] = torch.zeros((), dtype=torch.float32, device=scaler._scale.device)
    for comm in comms:
        each = torch.stack([one.to(comm.device).reshape(()) for one in found.values()]).max().reshape(1)
        comm.all_reduce(each, "max", algorithm="native")
        for one in found.values():
            one.copy_(each[0].to(one.device))


@functools.cache
def patch_grad_scaler() -> None:
    """Patch torch's scalers to exchange their findings in shards' gradients."""
    patch_scaler_checks(_all_reduce_found_inf)
