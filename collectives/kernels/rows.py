"""Rows of a table for a kernel: passed by value in its arguments, or copied to the GPU where they
are too many.

A copy goes through pinned memory on the stream of the kernel that reads it, so that the host never
waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import numpy
import torch

from ..cuda_state import has_completed, queries_allowed

__all__ = ["Rows"]

_LEAST = 12  # the smallest pinned buffer has 1 << 12 bytes


class Rows:
    """The rows of one table, an array on the host, for kernels on ``device``.

    ``array``: contiguous; it may be written to while no kernel of the host reads it, with `changed`
    called afterwards.
    """

    __slots__ = ("_copies", "address", "array", "device", "nbytes")

    def __init__(self, array: numpy.ndarray, device: torch.device):
        self.array = array
        self.address = array.ctypes.data  # on the host
        self.nbytes = array.nbytes
        self.device = device
        self._copies: dict[int, torch.Tensor] = {}  # by stream: on the GPU

    def changed(self) -> None:
        """Drop the copies: the array has new values."""
        self._copies = {}

    def on_device(self) -> torch.Tensor:
        """Return the rows on the GPU for a kernel on the current stream.

        The caller holds them until the kernel has been queued.

        Each stream has a copy of its own, so that none has to wait for another. One that is made in
        a capture is part of the graph, and is not used outside of it.
        """
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                return _copied_in_capture(self.array)
            stream = torch.cuda.current_stream()
            copies = self._copies
            copy = copies.get(stream.cuda_stream)
            if copy is None:
                copy = copies[stream.cuda_stream] = _copied(self.array, stream)
            return copy


# ---- Pinned memory.
class _Slot(NamedTuple):
    """Pinned memory, and the event behind the copy that reads it."""

    memory: torch.Tensor
    event: torch.cuda.Event


_rings: dict[tuple[int, int], deque[_Slot]] = {}  # by GPU and size, the slot that was used first at the front
_lock = threading.Lock()
_captured: list[torch.Tensor] = []  # memory that CUDA graphs read at each replay: never freed or written again


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def _copied_from(memory: torch.Tensor, array: numpy.ndarray, device: torch.device) -> torch.Tensor:
    part = memory[: array.nbytes]
    part.numpy()[:] = numpy.frombuffer(array, dtype=numpy.uint8)
    return torch.empty(array.nbytes, dtype=torch.uint8, device=device).copy_(part, non_blocking=True)


def _copied(array: numpy.ndarray, stream: torch.cuda.Stream) -> torch.Tensor:
    """Copy an array to the current GPU through a pinned buffer: one whose last copy is done, or a
    new one.
    """
    size = max(_LEAST, (array.nbytes - 1).bit_length())
    with _lock:
        ring = _rings.setdefault((stream.device_index, size), deque())
        slot = ring.popleft() if ring and has_completed(ring[0].event) else None
    if slot is None:
        slot = _Slot(_pinned(1 << size), torch.cuda.Event())
    copy = _copied_from(slot.memory, array, stream.device)
    slot.event.record(stream)
    with _lock:
        ring.append(slot)
    return copy


def _copied_in_capture(array: numpy.ndarray) -> torch.Tensor:
    with queries_allowed():  # allows all calls that are unsafe in a capture, such as allocating pinned memory
        memory = _pinned(array.nbytes)
    _captured.append(memory)
    return _copied_from(memory, array, torch.cuda.current_stream().device)
