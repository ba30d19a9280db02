"""The side stream of a communicator's units on a GPU, on which they gather and reduce."""

from __future__ import annotations

import contextlib

import torch

from .. import cuda_state

__all__ = ["SideStream"]


class SideStream:
    """A stream beside the computation's. On the host there is none, and all methods do nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = cuda_state.new_comm_stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if self._stream is not None else None
        self._held: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return self._stream is not None

    def ordered_alone(self):
        """Return a context in which it is the current stream; it waits for nothing."""
        return contextlib.nullcontext() if self._stream is None else cuda_state.on_stream(self._stream)

    def after_current(self):
        """Return a context in which it is the current stream, after the work that the current one has."""
        return contextlib.nullcontext() if self._stream is None else cuda_state.on_stream(self._stream, self._ready)

    def wait_for_current(self) -> None:
        """Make it wait for the work that the current stream has."""
        if self._stream is not None:
            self._stream.wait_stream(cuda_state.current_stream(self._device))

    def record_event(self):
        """Return an event after its work until now; None on the host."""
        return None if self._stream is None else self._stream.record_event()

    def wait_event(self, event) -> None:
        """Make the current stream wait for an event of `record_event`."""
        if event is not None:
            cuda_state.current_stream(self._device).wait_event(event)

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keep memory of the current stream until `join`, while the side stream uses it."""
        if self._stream is not None:
            self._held += tensors

    def join(self) -> None:
        """Make the current stream wait for all its work."""
        if self._stream is not None:
            cuda_state.wait_for_stream(self._stream)
            self._held.clear()
