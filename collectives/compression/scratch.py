"""Scratch buffers that compressors keep from step to step, and their order between CUDA streams."""

from __future__ import annotations

import weakref

import torch

from ..cuda_state import current_stream, wait_for_stream

__all__ = ["get_wire_buffer", "use_on_current_stream"]


class _WireBuffer:
    """A communicator's wire buffer, and the CUDA stream that has used it last."""

    __slots__ = ("last", "memory")

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.last = None


_buffers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> its _WireBuffer


def use_on_current_stream(last, *tensors):
    """Order torch's current stream after `last`, the stream that has used the memory last.

    Returns the current stream. Later kernels on the current stream run after all work that is
    queued on `last` now. The allocator doesn't reuse the memory before they are done, on whichever
    stream it was allocated. `last`: the stream that an earlier call returned, None at first. On the
    host nothing happens and None is returned.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return None
    stream = current_stream(device)
    if last is not None and last != stream:
        wait_for_stream(last)
        for tensor in tensors:
            tensor.record_stream(stream)
    return stream


def get_wire_buffer(comm, nbytes: int) -> torch.Tensor:
    """Return a uint8 buffer of at least `nbytes` for compressed values.

    Each communicator has one, which is kept. On the host it is memory that the ranks share.
    """
    buffer = _buffers.get(comm)
    if buffer is None or buffer.memory.numel() < nbytes:
        buffer = _buffers[comm] = _WireBuffer(comm.empty(nbytes, torch.uint8))
    buffer.last = use_on_current_stream(buffer.last, buffer.memory)
    return buffer.memory
