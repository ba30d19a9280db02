"""Quantized all-gather: parameters are sent in 16 or 8 bits, and their owner keeps them as they are.

Each rank rounds its shard to a wire format, the ranks all-gather the bytes, and each rank
dequantizes all shards, its own too, so all ranks compute with the same values. Source: ZeRO++ (Wang
2023), whose blocks have a scale each, too.
"""

from __future__ import annotations

import torch

from ..kernels import WireParts, dequantize, quantize
from ..layout import WIRE_FORMATS, wire_layout
from .arena import Arena

__all__ = ["QuantizedAllGather"]


class QuantizedAllGather:
    """All-gather in a wire format.

    Args:
        format: Of `layout.WIRE_FORMATS`.
        block: Values that share a scale, where the format has scales.

    Attributes:
        sent: The bytes that this rank has sent, as a ring sends them.
    """

    def __init__(self, format: str, block: int = 256):
        self.how = {"format": format, "block": block}
        self.itemsize = WIRE_FORMATS[format].itemsize
        self.sent = 0

    def saves(self, dtype: torch.dtype) -> bool:
        """Whether values of a dtype take fewer bytes in the wire format."""
        return dtype.is_floating_point and self.itemsize < dtype.itemsize

    def gather(self, comm, shard: torch.Tensor, out: torch.Tensor, arena: Arena, *, async_op: bool):
        """Gather every rank's `shard` into `out`, in rank order, both of any floating dtypes. A
        collective, which on a GPU is ordered on the current stream.

        `arena`: has memory for the bytes. `async_op`: return a handle, whose ``wait()`` dequantizes.
        """
        width = wire_layout(shard.numel(), **self.how).nbytes
        block = arena.acquire(comm.size * width)
        wires = block.memory[: comm.size * width]
        own = wires[comm.rank * width :][:width]
        quantize(shard, own, **self.how)
        work = comm.all_gather(wires, own, async_op=async_op)
        self.sent += (comm.size - 1) * width

        def finish():
            dequantize(wires, out, parts=WireParts(comm.size, shard.numel(), width), **self.how)
            arena.release(block)

        if async_op:
            return _Pending(work, finish)
        finish()
        return None

    def rounded(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a shard's values as all ranks get them."""
        wire = torch.empty(wire_layout(shard.numel(), **self.how).nbytes, dtype=torch.uint8, device=shard.device)
        out = torch.empty(shard.numel(), dtype=dtype, device=shard.device)
        quantize(shard, wire, **self.how)
        dequantize(wire, out, **self.how)
        return out


class _Pending:
    """An all-gather in progress, whose bytes `wait` dequantizes."""

    def __init__(self, work, finish):
        self._work, self._finish = work, finish

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            if self._work is not None:
                self._work.wait()
            finish()
