"""Quantized all-gather: parameters are sent in 16 or 8 bits, and their owner keeps them as they
are.

Each rank rounds its shard to a wire format, the ranks all-gather the bytes, and each rank
dequantizes all shards, its own too, so all ranks compute with the same values. Source: ZeRO++ (Wang
2023), whose blocks have a scale each, too.
"""

from __future__ import annotations

import contextlib

import torch

from ..kernels import WireParts, dequantize, quantize
from ..layout import WIRE_FORMATS, wire_layout
from .streams import beside_current, current_stream, use_on_current

__all__ = ["QuantizedAllGather"]


class QuantizedAllGather:
    """All-gather in a wire format. `sent` counts the bytes that this rank has sent, as a ring sends
    them.

    `format`: of `layout.WIRE_FORMATS`; `block`: values that share a scale, where the format has
    scales.
    """

    def __init__(self, format: str, block: int = 256):
        self.how = {"format": format, "block": block}
        self.itemsize = WIRE_FORMATS[format].itemsize
        self.sent = 0

    def saves(self, dtype: torch.dtype) -> bool:
        """Whether values of a dtype take fewer bytes in the wire format."""
        return dtype.is_floating_point and self.itemsize < dtype.itemsize

    def gather(self, comm, shard: torch.Tensor, out: torch.Tensor, alloc_buffer, *, async_op: bool):
        """Gather every rank's `shard` into `out`, in rank order. A collective.

        `shard` and `out`: of any floating dtype. `alloc_buffer(n, dtype)`: allocates memory for the
        bytes. `async_op`: return a handle, whose ``wait()`` makes `out` ready: on the host it
        dequantizes, on CUDA it waits for a side stream, on which all of it runs.
        """
        width = wire_layout(shard.numel(), **self.how).nbytes
        wires = alloc_buffer(comm.size * width, torch.uint8)
        own = wires[comm.rank * width : (comm.rank + 1) * width]
        home = current_stream(out.device)
        beside = async_op and home is not None
        with beside_current(out.device, "gather") if beside else contextlib.nullcontext():
            if beside:
                use_on_current(home, wires, out)
            if shard.numel():
                quantize(shard, own, **self.how)
            work = comm.all_gather(wires, own, async_op=async_op and not beside)
            self.sent += (comm.size - 1) * width
            pending = _PendingDequantize(self.how, work, wires, out, comm.size)
            if async_op and not beside:
                return pending
            pending.wait()
            return _SideStreamWork(current_stream(out.device), out) if beside else None

    def rounded(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a shard's values as the other ranks get them."""
        wire = torch.empty(wire_layout(shard.numel(), **self.how).nbytes, dtype=torch.uint8, device=shard.device)
        out = torch.empty(shard.numel(), dtype=dtype, device=shard.device)
        if shard.numel():
            quantize(shard, wire, **self.how)
            dequantize(wire, out, **self.how)
        return out


class _SideStreamWork:
    """What a side stream was given until now."""

    def __init__(self, stream, out: torch.Tensor):
        self._event = stream.record_event()
        self._device = out.device

    def wait(self) -> None:
        current_stream(self._device).wait_event(self._event)


class _PendingDequantize:
    """An all-gather in progress, whose bytes `wait` dequantizes."""

    def __init__(self, how, work, wires, out, size):
        self._pending = (how, work, wires, out, size)

    def wait(self) -> None:
        if self._pending is None:
            return
        how, work, wires, out, size = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        shard_numel, width = out.numel() // size, wires.numel() // size
        dequantize(wires, out, parts=WireParts(size, shard_numel, width), **how)
