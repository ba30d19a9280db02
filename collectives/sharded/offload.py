"""Reduced gradients of offloaded shards, which lie on the host: their copies from a GPU."""

from __future__ import annotations

import torch

from .. import cuda_state
from .streams import SideStream

__all__ = ["GradientOffload"]

_CAPTURED = "with CPU offload the optimizer steps on the host, which waits for the copies"


class GradientOffload:
    """Copies of reduced gradients to the host, and of shards from it, on the side stream, until `wait`."""

    def __init__(self, side: SideStream):
        self._side = side
        self._event = None

    def to_host(self, grads: torch.Tensor, group) -> torch.Tensor:
        """Begin to copy a flat shard of gradients to the host; return what has the values after `wait`.

        Blocks where gradients are there already, to which the new ones will be added.
        """
        cuda_state.refuse_capture(grads.device, _CAPTURED)
        pinned = group.shard.is_pinned()
        host = torch.empty(grads.numel(), dtype=grads.dtype, device="cpu", pin_memory=pinned)
        host.copy_(grads, non_blocking=True)
        self._event = self._side.record_event()
        if any(param.sharded.grad is not None for param in group.params):
            self.wait()
        return host

    def note_reads(self) -> None:
        """Note that gathers read shards on the host, which nobody may write to before `wait`."""
        self._event = self._side.record_event()

    def wait(self) -> None:
        """Wait on the host for all copies. With offloading this is the host's only wait in a step of one backward."""
        event, self._event = self._event, None
        if event is not None and not cuda_state.is_capturing(None):  # the device is idle when a capture begins
            event.synchronize()
