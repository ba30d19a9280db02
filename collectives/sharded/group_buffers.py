"""Group buffers: allocation of a parameter group's buffers, on its device and where its shard lies."""

from __future__ import annotations

import torch

from .buffer_pool import MIN_POOLED_BYTES, BufferPool
from .device_buffers import DeviceBuffers
from .mesh import Ranks

__all__ = ["GroupBuffers"]


class GroupBuffers:
    """Allocates buffers of a parameter group.

    `device`: where the unit computes; `store`: where the flat shard lies. `pinned`: on the host
    beside another device, in page-locked memory.
    """

    def __init__(self, ranks: Ranks, pool: BufferPool, *, device: torch.device, store: torch.device, pinned: bool):
        self.ranks = ranks
        self.pool = pool
        self.device = device
        self.store = store
        self._pinned = pinned

    @property
    def offloads(self) -> bool:
        """Whether the flat shard lies on another device than the one where the unit computes."""
        return self.store != self.device

    # ---- Buffers that all units use in turn on a GPU.

    def reserve(self, gathered: int, gradients: int) -> None:
        """Announce the largest buffers of this group, in bytes."""
        if self._in_turn:
            self._gathered.reserve(gathered)
            self._gradients.reserve(gradients)

    def alloc_gathered(self, n: int, dtype: torch.dtype, custom=None) -> torch.Tensor:
        """Return a buffer for gathered parameters, until `free_gathered`."""
        if custom is None and self._in_turn:
            return self._gathered.acquire(self._comm, n, dtype)
        return self.alloc(n, dtype, custom)

    def free_gathered(self, buffer: torch.Tensor) -> None:
        """Give up a buffer of `alloc_gathered`, for what comes after the current stream's work."""
        if self._in_turn:
            self._gathered.release(buffer)

    def alloc_gradients(self, n: int, dtype: torch.dtype, custom=None) -> torch.Tensor:
        """Return a buffer for gradients to reduce, until `free_gradients`."""
        if custom is None and self._in_turn:
            return self._gradients.acquire(self._comm, n, dtype)
        return self.alloc(n, dtype, custom)

    def free_gradients(self, buffer: torch.Tensor) -> None:
        """Give up a buffer of `alloc_gradients`, for what comes after the current stream's work."""
        if self._in_turn:
            self._gradients.release(buffer)

    @property
    def _comm(self):
        return self.ranks.world if self.ranks.shard is None else self.ranks.shard

    @property
    def _in_turn(self) -> bool:
        return not self.ranks.world._on_host

    @property
    def _gathered(self) -> DeviceBuffers:
        return self.pool.in_turn(self._comm, "gathered parameters")

    @property
    def _gradients(self) -> DeviceBuffers:
        return self.pool.in_turn(self._comm, "gradients")

    # ---- Others.

    def alloc(self, n: int, dtype: torch.dtype, custom=None) -> torch.Tensor:
        """Return an uninitialised buffer of `n` elements on the unit's device; a pool reuses it
        when no tensor views it.
        """
        if custom is not None and hasattr(custom, "allocate"):
            return custom.allocate((n,), dtype=dtype, device=self.device)
        if self.ranks.world._on_host and n * dtype.itemsize >= MIN_POOLED_BYTES:
            return self.pool.allocate(self.ranks.world, n, dtype)
        return torch.empty(n, dtype=dtype, device=self.device)

    def alloc_stored(
        self, n: int, dtype: torch.dtype, *, shared: bool, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return uninitialised memory of `n` elements that stays, on `store` or another `device`.

        `shared`: the engine's memory, which peers read in place.
        """
        device = self.store if device is None else device
        if shared and n * dtype.itemsize >= MIN_POOLED_BYTES:
            return self.ranks.world.empty(n, dtype)
        pinned = self._pinned and self.offloads and device.type == "cpu"
        return torch.empty(n, dtype=dtype, device=device, pin_memory=pinned)
