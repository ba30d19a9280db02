"""ShardedGradScaler: torch's GradScaler under the name of FSDP's.

The operation by which a scaler checks gradients takes the maximum over the ranks of the shards
itself. So torch.amp.GradScaler is as good; this one is for programs that name FSDP's, or whose
scaler has more ranks than the shards.
"""

from __future__ import annotations

import torch

from ..gradients.found_inf import share_found_inf

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks agree on non-finite gradients, with the name and arguments
    of FSDP's.

    All of the ranks must call ``step``, ``unscale_`` and ``update``. Arguments that aren't
    described below are torch's.

    Args:
        process_group: The ranks that agree. None: those over which the optimizer's parameters are
            sharded, as torch's own scaler does here.
    """

    def __init__(
        self, device: str = "cuda", init_scale: float = 2.0**16, backoff_factor: float = 0.5,
        growth_factor: float = 2.0, growth_interval: int = 2000, enabled: bool = True, process_group=None,
    ):  # fmt: skip
        if process_group is not None:
            share_found_inf(_find_no_comms)
        super().__init__(
            device, init_scale=init_scale, backoff_factor=backoff_factor, growth_factor=growth_factor,
            growth_interval=growth_interval, enabled=enabled,
        )  # fmt: skip
        self.process_group = process_group


def _find_no_comms(optimizer) -> list:
    return []  # other scalers exchange nothing
