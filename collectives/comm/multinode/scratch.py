"""Scratch memory on the host that is kept from call to call."""

from __future__ import annotations

import torch

__all__ = ["Scratch"]


class Scratch:
    """Scratch buffers by name.

    A buffer grows when a call needs more of it, and is reused by the next call.
    """

    def __init__(self):
        self._buffers: dict[str, torch.Tensor] = {}

    def address_of(self, name: str, nbytes: int) -> int:
        """Return the address of a buffer of at least ``nbytes``, aligned to 64 bytes."""
        have = self._buffers.get(name)
        if have is None or have.numel() < nbytes + 64:
            size = 1 << max(14, (nbytes + 63).bit_length())
            self._buffers[name] = have = torch.empty(size, dtype=torch.uint8)
        return -(-have.data_ptr() // 64) * 64
