"""HostSnapshot: a copy of a state dict in host memory, which is used again for the next one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...torch_compat import tree_flatten, tree_unflatten
from ..streams import beside_current, wait_for_side_stream
from .dtensor_calls import as_pieces
from .shard_tensor import ShardTensor

__all__ = ["HostSnapshot"]


class HostSnapshot:
    """Copies state dicts to host memory of its own, page-locked for tensors on a GPU."""

    def __init__(self):
        self._buffers: list[torch.Tensor | None] = []
        self._events: list = []

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Return a copy of a state dict; what an earlier call returned is overwritten.

        Blocks for tensors on the host. Those on a GPU are copied on a side stream, for which the
        current stream waits and the host doesn't: call `wait` before the copy is read.
        """
        leaves, spec = tree_flatten(state)
        leaves = as_pieces(leaves)
        self._buffers += [None] * (len(leaves) - len(self._buffers))
        devices = dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        made: list[Any] = [None] * len(leaves)
        for device in [*devices, None]:
            chosen = [at for at, leaf in enumerate(leaves) if getattr(leaf, "device", None) == device]
            if device is None or device.type != "cuda":
                for at in chosen:
                    made[at] = self._copy(at, leaves[at])
                continue
            with beside_current(device, "checkpoint"):
                for at in chosen:
                    made[at] = self._copy(at, leaves[at])
                event = torch.cuda.Event()
                event.record()
                self._events.append(event)
            wait_for_side_stream(device, "checkpoint")
        return tree_unflatten(made, spec)

    def wait(self) -> None:
        """Wait on the host until the copies are complete."""
        events, self._events = self._events, []
        for event in events:
            event.synchronize()

    def _copy(self, at: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        there = leaf.local if isinstance(leaf, ShardTensor) else leaf.detach()
        buffer = self._buffers[at]
        if buffer is None or buffer.shape != there.shape or buffer.dtype != there.dtype:
            buffer = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.device.type == "cuda")
            self._buffers[at] = buffer
        buffer.copy_(there, non_blocking=True)
        return leaf.like(buffer) if isinstance(leaf, ShardTensor) else buffer
