"""Streams of a unit: which one its memory is of, and the copies between a device and the host that run beside them."""

from __future__ import annotations

import contextlib
import functools

import torch

from ..comm.work import Work

__all__ = ["HostCopies", "beside", "current_stream", "release"]


def current_stream(device: torch.device):
    """Give the stream that this thread computes on; None on the host."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def release(work, home, device: torch.device) -> None:
    """Let go of the arrays of an operation that the current stream waits for, where that is `home`, which they are of.

    Then the next allocation there may have their memory; else they are held until the host sees the operation end, and
    a host that runs ahead of the GPU needs memory for all units. What people's own collectives give is left alone.
    """
    if home is not None and isinstance(work, Work) and current_stream(device) == home:
        work.release()


@functools.cache
def _side(device: torch.device):
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device: torch.device):
    """Have what is in the block wait for each other on a stream beside the current one, and begin behind that."""
    if device.type != "cuda":
        yield
        return
    side = _side(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


class HostCopies:
    """Copies between a device and the host that run beside the computation, until `wait`.

    Until then what was copied to the host may not be read, and what is copied from it may not be written. A copy to the
    host runs on a stream of its own, behind what the current stream has computed; one to the device runs on the current
    stream. From and to memory that is not page-locked a copy is done when its call returns, as CUDA says.

    `cuda`: what has torch.cuda's streams.
    """

    def __init__(self, cuda=torch.cuda):
        self._cuda = cuda
        self._streams: dict[torch.device, object] = {}  # for copies to the host
        self._events: dict = {}  # stream -> the event behind its last copy
        self._after: list = []

    def to_device(self, out: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Copy what lies on the host to `out`, on the current stream; give `out`."""
        out.copy_(host, non_blocking=True)
        self._note(self._cuda.current_stream(out.device))
        return out

    def to_host(self, host: torch.Tensor, tensor: torch.Tensor, after=None) -> None:
        """Copy a device's tensor to `host`; call `after` in `wait`, once it is there."""
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device)
        side = self._streams[device]
        side.wait_stream(self._cuda.current_stream(device))
        with self._cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        self._note(side)
        if after is not None:
            self._after.append(after)

    def wait(self) -> None:
        """Wait on the host for all copies. The only wait of the host that a step has, where pieces lie there."""
        events, self._events = self._events, {}
        for event in events.values():
            event.synchronize()
        after, self._after = self._after, []
        for function in after:
            function()

    def _note(self, stream) -> None:
        self._events[stream] = stream.record_event()
