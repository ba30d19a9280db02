"""Group buffers: allocation of a parameter group's buffers, on its device and where its shard lies."""

from __future__ import annotations

import torch

from ..comm.communicator import Communicator
from .buffer_pool import GATHERED, GRADIENTS, MIN_POOLED_BYTES, BufferPool
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

    def reserve(self, gathered: int, gradients: int) -> None:
        """Announce the largest buffers of this group, in bytes."""
        for purpose, nbytes in ((GATHERED, gathered), (GRADIENTS, gradients)):
            if (buffers := self._in_turn(purpose)) is not None:
                buffers.reserve(nbytes)

    def acquire(self, purpose: str, n: int, dtype: torch.dtype, custom=None) -> torch.Tensor:
        """Return a buffer for a purpose, `GATHERED` or `GRADIENTS`, until `release`: on a GPU one of
        those that all units use in turn.
        """
        buffers = self._in_turn(purpose) if custom is None else None
        return self.alloc(n, dtype, custom) if buffers is None else buffers.acquire(self._comm, n, dtype)

    def release(self, purpose: str, buffer: torch.Tensor) -> None:
        """Release a buffer of `acquire`, for what comes after the current stream's work."""
        if (buffers := self._in_turn(purpose)) is not None:
            buffers.release(buffer)

    @property
    def _comm(self) -> Communicator:
        return self.ranks.world if self.ranks.shard is None else self.ranks.shard

    def _in_turn(self, purpose: str) -> DeviceBuffers | None:
        return None if self.ranks.world._on_host else self.pool.in_turn(self._comm, purpose)

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
