"""Scratch memory of collectives over several nodes."""

from __future__ import annotations

import torch

__all__ = ["Scratch"]


class Scratch:
    """Scratch buffers by name, in host memory, for calls that run one after another.

    A buffer grows by doubling when a call needs more of it, and is reused by the next call.
    """

    def __init__(self):
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, nbytes: int) -> torch.Tensor:
        """Return at least ``nbytes``, aligned to 64 bytes."""
        have = self._buffers.get(name)
        if have is None or have.numel() < nbytes:
            size = 1 << max(14, (nbytes - 1).bit_length())
            self._buffers[name] = have = torch.empty(size, dtype=torch.uint8, device="cpu")
        return have
