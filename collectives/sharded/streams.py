"""CUDA streams of a unit: the stream that its memory belongs to, and copies between a device and
the host.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from .. import cuda_state
from ..comm.work import Work

__all__ = [
    "HostCopies",
    "beside_current",
    "current_stream",
    "host_of",
    "on_side_stream",
    "release",
    "use_on_current",
    "wait_for_side_stream",
]

_OFFLOADED = "with CPU offload the optimizer steps on the host, which waits for the copies"


def host_of(device: torch.device) -> torch.device:
    """Return the device of a unit's shards on the host; beside the meta device, it has no memory
    either.
    """
    return torch.device("meta", 1) if device.type == "meta" else torch.device("cpu")


def current_stream(device: torch.device):
    """Return the stream on which this thread computes; None on the host."""
    return cuda_state.current_stream(device) if device.type == "cuda" else None


def release(work, home, device: torch.device) -> None:
    """Drop an operation's arrays, where the current stream waits for it and is `home`, the stream
    that they belong to.

    Then the next allocation on that stream can reuse their memory. Otherwise they are held until
    the host sees the operation end, and a host that runs ahead of the GPU needs memory for all
    units. Works of custom collectives are left alone.
    """
    if home is not None and isinstance(work, Work) and current_stream(device) == home:
        work.release()


@functools.cache
def _side_stream(device: torch.device, purpose: str):
    return cuda_state.new_comm_stream(device)


@contextlib.contextmanager
def on_side_stream(device: torch.device, purpose: str):
    """Run the block on the device's side stream for a purpose; on the host just run it.

    The stream is not ordered after the current one: what the block waits for orders it.
    """
    if device.type != "cuda":
        yield
        return
    with cuda_state.on_stream(_side_stream(device, purpose)):
        yield


@contextlib.contextmanager
def beside_current(device: torch.device, purpose: str):
    """Run the block on the device's side stream for a purpose, after what the current stream was
    given until now; on the host just run it.
    """
    home = current_stream(device)
    with on_side_stream(device, purpose):
        if home is not None:
            current_stream(device).wait_stream(home)
        yield


def wait_for_side_stream(device: torch.device, purpose: str) -> None:
    """Make the current stream wait for what the device's side stream for a purpose was given."""
    if device.type == "cuda":
        cuda_state.wait_for_stream(_side_stream(device, purpose))


def use_on_current(home, *tensors: torch.Tensor | None) -> None:
    """Keep the allocator from using memory of the stream `home` again before the current stream is
    done with it. Where that is None, for the host, nothing is done, nor for tensors on the host or
    None.
    """
    if home is not None and (here := cuda_state.current_stream(home.device)) != home:
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(here)


class HostCopies:
    """Copies between a device and the host that overlap with the computation, until `wait`.

    Until then, what was copied to the host must not be read, and what is copied from it must not be
    written. A copy to the host runs on a stream of its own, after the work of the current stream;
    one to the device runs on the current stream. A copy from or to memory that is not page-locked
    is done when its call returns, as CUDA defines it.

    `cuda`: a module with torch.cuda's streams.
    """

    def __init__(self, cuda=torch.cuda):
        self._cuda = cuda
        self._streams: dict[torch.device, object] = {}  # device -> stream of its copies to the host
        self._events: dict = {}  # stream -> the event after its last copy
        self._after: list = []

    def to_device(self, out: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to `out` on the current stream; return `out`."""
        cuda_state.refuse_capture(out.device, _OFFLOADED)
        out.copy_(host, non_blocking=True)
        self._record_event(self._cuda.current_stream(out.device))
        return out

    def to_host(self, host: torch.Tensor, tensor: torch.Tensor, after=None) -> None:
        """Copy a device's tensor to `host`; `wait` calls `after` once the copy is done."""
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device)
        side = self._streams[device]
        side.wait_stream(self._cuda.current_stream(device))
        with self._cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        self._record_event(side)
        if after is not None:
            self._after.append(after)

    def after_copies(self, device: torch.device):
        """Return a context on the stream of the copies to the host from a device."""
        return self._cuda.stream(self._streams[device])

    def wait(self) -> None:
        """Wait on the host for all copies. With offloading, this is the only wait of the host in a
        step.
        """
        events, self._events = self._events, {}
        for event in events.values():
            event.synchronize()
        after, self._after = self._after, []
        for function in after:
            function()

    def _record_event(self, stream) -> None:
        self._events[stream] = stream.record_event()
