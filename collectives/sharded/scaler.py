"""ShardedGradScaler: torch's GradScaler with the name and the arguments of FSDP1's.

Torch's own scaler is right for sharded parameters: its check of their gradients is dispatched to
`RaggedTensor`, which agrees on it over the ranks of the shards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..rendezvous.process_groups import get_communicator

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks agree on non-finite gradients.

    All of the ranks must call ``step``, ``unscale_`` and ``update``. Arguments that aren't
    described below are torch's.

    Args:
        process_group: The ranks that agree. None: those over which the parameters are sharded, as
            with torch's own scaler.
    """

    def __init__(
        self, device: str = "cuda", init_scale: float = 2.0**16, backoff_factor: float = 0.5,
        growth_factor: float = 2.0, growth_interval: int = 2000, enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ):  # fmt: skip
        super().__init__(
            device, init_scale=init_scale, backoff_factor=backoff_factor, growth_factor=growth_factor,
            growth_interval=growth_interval, enabled=enabled,
        )  # fmt: skip
        self.process_group = process_group

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, *args, **kwargs):
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, *args, **kwargs)
        if self.process_group is not None:
            if not found:  # this rank has no gradients
                found[found_inf.device] = found_inf.clone()
            largest = torch.stack([each.to(found_inf.device).reshape(()) for each in found.values()]).max().reshape(1)
            get_communicator(self.process_group, largest.device).all_reduce(largest, "max")
            for device, each in found.items():
                each.copy_(largest[0].to(device))
        return found
