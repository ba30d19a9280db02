"""HostSnapshot: a copy of a state dict in one buffer of host memory, which is used again for the next
one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...torch_compat import tree_flatten, tree_unflatten
from ..streams import beside_current, wait_for_side_stream
from .dtensor_calls import as_pieces
from .shard_tensor import ShardTensor

__all__ = ["HostSnapshot", "align_offset"]

_ALIGNMENT = 64  # bytes, of each tensor


def align_offset(offset: int) -> int:
    """Return the first offset from this one on, in bytes, at which a tensor may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class HostSnapshot:
    """Copies state dicts to host memory of its own, page-locked for tensors on a GPU.

    `data`: all of it, uint8; the copies view parts of it. It is allocated anew where the tensors are
    others, or of other sizes.
    """

    def __init__(self):
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: list[tuple] | None = None
        self._buffers: list[torch.Tensor | None] = []
        self._events: list = []
        self._sources: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # (buffer, its source)

    @torch.no_grad()
    def take(self, state: Any) -> Any:
        """Return a copy of a state dict; what an earlier call returned is overwritten.

        Blocks for tensors on the host. Those on a GPU are copied on a side stream, for which the
        current stream waits and the host doesn't: call `wait` before the copy is read.
        """
        leaves, spec = tree_flatten(state)
        leaves = as_pieces(leaves)
        self._reserve(leaves)
        self._sources = {}
        made = []
        for leaf, buffer in zip(leaves, self._buffers, strict=True):
            if not isinstance(leaf, torch.Tensor):
                made.append(copy.deepcopy(leaf))
                continue
            made.append(leaf.like(buffer) if isinstance(leaf, ShardTensor) else buffer)
            local = _local_part(leaf)
            self._sources.setdefault(local.device, []).append((buffer, local))
        self.take_again()
        return tree_unflatten(made, spec)

    @torch.no_grad()
    def take_again(self) -> None:
        """Copy the tensors of the last `take` again, as they are now, into what it has returned."""
        for device, pairs in self._sources.items():
            if device.type != "cuda":
                for buffer, local in pairs:
                    buffer.copy_(local)
                continue
            with beside_current(device, "checkpoint"):
                for buffer, local in pairs:
                    buffer.copy_(local, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._events.append(event)
            wait_for_side_stream(device, "checkpoint")

    def list_sources(self) -> list[torch.Tensor]:
        """Return the tensors that `take_again` copies, which are held until `forget_sources`."""
        return [local for pairs in self._sources.values() for _, local in pairs]

    def forget_sources(self) -> None:
        """Hold the tensors of the last `take` no longer."""
        self._sources = {}

    def wait(self) -> None:
        """Wait on the host until the copies are complete."""
        events, self._events = self._events, []
        for event in events:
            event.synchronize()

    def _reserve(self, leaves: list) -> None:
        """Allocate memory for these leaves, unless there is for the same ones."""
        there = [_local_part(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        layout = [None if each is None else (each.shape, each.dtype) for each in there]
        pinned = any(each is not None and each.device.type == "cuda" for each in there)
        if self._layout == [pinned, *layout]:
            return
        offsets, end = [], 0
        for each in there:
            offsets.append(end)
            end += 0 if each is None else align_offset(each.numel() * each.element_size())
        self._layout, self._buffers = None, []
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
        self.data = torch.empty(end, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        for each, offset in zip(there, offsets, strict=True):
            part = None
            if each is not None:
                part = self.data[offset : offset + each.numel() * each.element_size()]
                part = part.view(each.dtype).view(each.shape)
            self._buffers.append(part)
        self._layout = [pinned, *layout]


def _local_part(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.local if isinstance(leaf, ShardTensor) else leaf.detach()
