"""Buffers on a GPU that a module's units use in turn: those in which parameters are gathered, and
those from which gradients are reduced.

They are the engine's memory (ncclMemAlloc), registered once with the communicator, and stay from
step to step, so that a step allocates none. A buffer is free again when `release` says so; its next
user's stream waits for what its last user was given until then, and not for later work.
"""

from __future__ import annotations

import torch

from ..comm.communicator import Communicator
from ..comm.registration import Registration
from ..cuda_state import capture_id, current_stream, wait_for_stream
from ..errors import InvalidUsage
from ..torch_compat import storage_use_count

__all__ = ["DeviceBuffers"]

_ALIGNMENT = 256  # bytes; of their sizes


class _Buffer:
    """One buffer: its memory, and where its last user was when it released it."""

    __slots__ = ("capture", "event", "memory", "nbytes", "registration", "stream", "users", "view")

    def __init__(self, memory: torch.Tensor, registration: Registration):
        self.memory = memory
        self.nbytes = memory.nbytes
        self.registration = registration
        self.users = storage_use_count(memory)  # of its storage, while it is free
        self.stream: torch.cuda.Stream | None = None
        self.event: torch.cuda.Event | None = None
        self.capture: int | None = None
        self.view: torch.Tensor | None = None  # what the last user got, where views aren't counted


def _key_of(tensor: torch.Tensor) -> int:
    """Return a number that a buffer and its views share: the address, or on the meta device, where a
    step is only planned, the storage's.
    """
    return tensor.data_ptr() or tensor.untyped_storage()._cdata


class DeviceBuffers:
    """Buffers of one communicator's units for one purpose.

    `at_least`: so many are taken in turn; more where they are in use at the same time.
    `crosses_streams`: whether another stream than the next user's releases them. Then each is as
    large as the largest request; else it may be half as large, or a quarter, and so on, for smaller
    requests.
    """

    def __init__(self, purpose: str, *, at_least: int, crosses_streams: bool):
        self._purpose = purpose
        self._at_least = at_least
        self._crosses_streams = crosses_streams
        self._largest = 0  # bytes of the largest request
        self._free: list[_Buffer] = []  # those that were released longest ago first
        self._in_use: dict[int, _Buffer] = {}

    def __len__(self) -> int:
        return len(self._free) + len(self._in_use)

    def reserve(self, nbytes: int) -> None:
        """Announce a request of so many bytes, by which buffers are made from now on."""
        self._largest = max(self._largest, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)

    def acquire(self, comm: Communicator, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor of `n` elements; the current stream waits for the buffer's
        last user.

        A local call, which allocates where too few buffers are free: in the first steps. Raises
        `InvalidUsage` where that is in the capture of a CUDA graph.
        """
        nbytes = n * dtype.itemsize
        if not nbytes:  # it has no address by which `release` would find it
            return torch.empty(0, dtype=dtype, device=comm.device)
        self.reserve(nbytes)
        size = self._largest
        while not self._crosses_streams and size // 2 >= nbytes and size > _ALIGNMENT:
            size = -(-size // 2 // _ALIGNMENT) * _ALIGNMENT
        self._drop_viewed(comm)
        buffer = self._take(size)
        if buffer is None:
            buffer = self._make(comm, size)
        self._in_use[_key_of(buffer.memory)] = buffer
        view = buffer.view
        if view is None or view.dtype != dtype or view.numel() != n:
            view = buffer.memory[:nbytes].view(dtype)
            if self._crosses_streams:
                buffer.view = view
        return view

    def release(self, tensor: torch.Tensor) -> None:
        """Take a tensor of `acquire` back, after what the current stream was given. Other tensors
        are left alone.
        """
        buffer = self._in_use.pop(_key_of(tensor), None)
        if buffer is None:
            return
        if tensor.is_cuda:
            buffer.stream = current_stream(tensor.device)
            if self._crosses_streams:
                buffer.capture = capture_id(buffer.stream)
                buffer.event = buffer.stream.record_event()
        self._free.append(buffer)

    def _drop_viewed(self, comm: Communicator) -> None:
        """Drop the free buffers that a tensor of the user's still views, who keeps their memory. No
        user sees those of gradients; operations that the host has not seen end hold them.
        """
        if self._crosses_streams:
            return
        viewed = [each for each in self._free if storage_use_count(each.memory) > each.users]
        for each in viewed:
            self._free.remove(each)
            comm.deregister(each.registration)

    def _take(self, size: int) -> _Buffer | None:
        """Take out the smallest free buffer that is large enough, if there are enough of them."""
        enough = [each for each in self._free if each.nbytes >= size]
        if not enough or len(enough) + sum([b.nbytes >= size for b in self._in_use.values()]) < self._at_least:
            return None
        least = min([each.nbytes for each in enough])
        found = next(each for each in enough if each.nbytes == least)
        self._free.remove(found)
        self._wait_for_last_user(found)
        return found

    def _make(self, comm: Communicator, nbytes: int) -> _Buffer:
        if comm.device.type == "cuda" and capture_id(None) is not None:
            raise InvalidUsage(
                f"a buffer of {nbytes} bytes for {self._purpose} would be allocated while a CUDA graph is captured: "
                "make some steps of the same kind before the capture, which allocate all that a step needs",
                op="fully_shard", rank=comm.rank,
            )  # fmt: skip
        if self._crosses_streams:
            for each in [each for each in self._free if each.nbytes < nbytes]:  # no request takes them now
                self._free.remove(each)
                comm.deregister(each.registration)
        memory = comm.empty(nbytes, torch.uint8)
        return _Buffer(memory, comm.register(memory))

    def _wait_for_last_user(self, buffer: _Buffer) -> None:
        if buffer.stream is None:
            return
        here = current_stream(buffer.memory.device)
        if here == buffer.stream:
            return
        if buffer.event is None:
            wait_for_stream(buffer.stream)
        elif buffer.capture == capture_id(here):  # else one is captured and nothing was running as its capture began
            here.wait_event(buffer.event)
