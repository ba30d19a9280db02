"""Scratch memory of collectives over several nodes."""

from __future__ import annotations

import torch

from ...cuda_state import stream_from_address

__all__ = ["Scratch"]


class Scratch:
    """Scratch buffers by name and stream, for calls of a stream that run one after another.

    On the host a buffer grows by doubling when a call needs more of it, and is reused by the next
    call. On CUDA each call gets that stream's own memory, which may be freed as soon as the call is
    issued, in a capture too.
    """

    def __init__(self, device: torch.device | None = None):
        self._device = device or torch.device("cpu")
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._replaced: list[torch.Tensor] = []  # calls in a queue may use them yet

    def get(self, name: str, nbytes: int, stream: int = 0) -> torch.Tensor:
        """Return at least ``nbytes``, aligned to 64 bytes, to hold until the call is issued."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device), torch.cuda.stream(stream_from_address(stream, self._device)):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        have = self._buffers.get((name, stream))
        if have is None or have.numel() < nbytes:
            if have is not None and stream:
                self._replaced.append(have)
            size = 1 << max(14, (nbytes - 1).bit_length())
            self._buffers[name, stream] = have = torch.empty(size, dtype=torch.uint8)
        return have

    def clear(self) -> None:
        """Free everything; nothing may be in flight."""
        self._buffers.clear()
        self._replaced.clear()
