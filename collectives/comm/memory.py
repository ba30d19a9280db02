"""Memory that an engine can use with no staging copy, as torch tensors that free it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref

import torch

from ..cuda_state import is_capturing
from ..errors import CollectivesError

__all__ = [
    "Registration",
    "ReturningBuffers",
    "allocate",
    "large_from_heap",
    "mapped_apart",
    "memory_of",
    "whole_allocation",
]


def memory_of(array):
    """Give what keeps an array's memory alive, also where the array is given another one (``tensor.data = other``)."""
    if isinstance(array, torch.Tensor):
        return array.untyped_storage()
    return getattr(array, "data", None) if type(array).__module__.startswith("cupy") else array


class Registration:
    """A registered array, held alive until it is deregistered. Made by `Communicator.register()`.

    `zero_copy`: whether the engine uses the array in place. On the host that needs memory that can be shared: of
    `Communicator.empty()`, or an allocation so large that malloc gave it a mapping of its own; what lies in malloc's
    heap is staged. NCCL decides for each operation: None.
    """

    __slots__ = ("_memory", "array", "handle", "nbytes", "zero_copy")

    def __init__(self, array, handle: int, nbytes: int, zero_copy: bool | None):
        self.array = array
        self._memory = memory_of(array)
        self.handle = handle
        self.nbytes = nbytes
        self.zero_copy = zero_copy

    def __repr__(self):
        how = {True: ", used in place", False: ", staged", None: ""}[self.zero_copy]
        return f"<Registration of {self.nbytes} bytes{how}>"


def whole_allocation(array, ptr: int, nbytes: int) -> tuple[int, int]:
    """Give (address, bytes) of the allocation that an array is a view of, or the array's own where that isn't known."""
    if isinstance(array, torch.Tensor):
        storage = array.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    return ptr, nbytes


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's numbers, <malloc.h>


def mapped_apart(make) -> None:
    """Call a function so that malloc gives the larger memory that it asks for mappings of their own.

    Only such memory can be shared where it lies. The function is called by a thread of its own, since malloc takes what
    is free in the heap first, and a new thread has none. Behind it malloc is as glibc makes it by itself in a process
    that has freed something large: up to 32 MiB come from the heap, and 64 MiB stay at its top. Where the user has set
    these (MALLOC_*, GLIBC_TUNABLES), and with another libc, the function is just called.
    """
    mallopt = _mallopt()
    if mallopt is None:
        make()
        return
    failed = []

    def work():
        try:
            make()
        except BaseException as error:  # the caller's
            failed.append(error)

    mallopt(_MMAP_THRESHOLD, _LEAST_SHARED)
    try:
        thread = threading.Thread(target=work, name="collectives, making buckets")
        thread.start()
        thread.join()
    finally:
        large_from_heap()
    if failed:
        raise failed[0]


def large_from_heap() -> None:
    """Have malloc take up to 32 MiB from its heap, and keep 64 MiB at its top, as it does by itself after a while.

    A new tensor then has no page faults where an old one was. Does nothing where the user has set these, or with
    another libc than glibc.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)


def _mallopt():
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    tuned = tuned or any(name.startswith("MALLOC_") for name in os.environ)
    return None if tuned else getattr(ctypes.CDLL(None), "mallopt", None)


_LEAST_SHARED = 64 << 10  # bytes; malloc gives smaller ones no mapping of their own
_AWAY = 3  # backwards after which a buffer that doesn't come any more is let go


class ReturningBuffers:
    """Registers buffers of somebody else's that come again and again, as DDP's buckets do, when they come back.

    DDP throws its first buckets away after one backward. The later ones keep their addresses; a registration holds
    their memory until they stay away for some rounds, or their `owner` (a parameter) or this object is gone. Host
    engine only.
    """

    def __init__(self):
        self._round = 0
        # address, bytes -> [newest round, communicator, Registration, what lets go of it when its owner is gone]
        self._known: dict[tuple[int, int], list] = {}
        # Bound to the dictionary, as the entries' are, since this object is gone by then.
        weakref.finalize(self, _forget_all, self._known).atexit = False

    def begin(self) -> None:
        """Begin a round: a backward."""
        self._round += 1
        for key, entry in list(self._known.items()):  # a copy: the collector may let some go meanwhile
            if self._round - entry[0] > _AWAY:
                _forget(self._known, key, entry[2])

    def told(self) -> str:
        """Tell how many of the buffers that came back are shared."""
        back = [entry[2] is not None for entry in list(self._known.values()) if entry[1] is not None]
        return f"{sum(back)} of {len(back)} buckets shared" if back else "no bucket has come back yet"

    def see(self, comm, buffer: torch.Tensor, owner) -> None:
        """Register a buffer that was here in an earlier round. A local call. `owner`: a function that gives it."""
        key = whole_allocation(buffer, 0, 0)
        if key[1] < _LEAST_SHARED:
            return
        entry = self._known.get(key)
        if entry is not None and entry[2] is not None and entry[2] not in entry[1]._registered:
            self._known.pop(key)  # its communicator was closed, and took the registration along
            entry[3].detach()
            entry = None
        if entry is None:
            self._known[key] = [self._round, None, None, None]
            return
        if entry[1] is None and entry[0] != self._round:
            entry[1] = comm
            registration = comm.register(buffer)
            if registration.zero_copy:
                entry[2] = registration
                entry[3] = weakref.finalize(owner(), _forget, self._known, key, registration)
                entry[3].atexit = False
            else:
                comm.deregister(registration)  # there is no use in holding it
        entry[0] = self._round


def _forget_all(known: dict) -> None:
    for key, entry in list(known.items()):
        _forget(known, key, entry[2])


def _forget(known: dict, key, registration) -> None:
    entry = known.get(key)
    if entry is None or entry[2] is not registration:
        return
    comm, finalizer = entry[1], entry[3]
    if registration is not None and not comm.closed and not comm._lane.settled():
        return  # it may be in use, by the peers too: a later round lets it go, or close()
    del known[key]
    if finalizer is not None:
        finalizer.detach()  # it holds the registration, and so the memory, as long as the owner lives
    if registration is not None and registration in comm._registered and not comm.closed:
        comm.deregister(registration)


class _CudaBlock:
    """What torch reads a CUDA allocation from; it keeps this object alive as long as a tensor views the memory."""

    def __init__(self, ptr: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 3,
        }  # fmt: skip


def allocate(library, device: torch.device, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of `n` elements by ``ncclMemAlloc``; it is freed when the last tensor that views it is gone."""
    nbytes = n * dtype.itemsize
    if not nbytes:
        return torch.empty(n, dtype=dtype, device=device)
    if device.type == "cpu":
        ptr = library.mem_alloc(nbytes)
        block = (ctypes.c_char * nbytes).from_address(ptr)
        _free_with(block, library, ptr, None)
        return torch.frombuffer(block, dtype=dtype)
    with torch.cuda.device(device):
        if not is_capturing(None):
            _free_late()
        ptr = library.mem_alloc(nbytes)
    block = _CudaBlock(ptr, nbytes)
    _free_with(block, library, ptr, device)
    return torch.as_tensor(block, device=device).view(dtype)


def _free_with(block, library, ptr: int, device: torch.device | None) -> None:
    # Not at interpreter exit: tensors may still be in use by then, and the system takes the memory back anyway.
    weakref.finalize(block, _free, library, ptr, device, os.getpid()).atexit = False


def _free(library, ptr: int, device: torch.device | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has the mapping, but it isn't the child's to give back
        return
    try:
        if device is None:
            library.mem_free(ptr)
            return
        with torch.cuda.device(device):
            if is_capturing(None):
                _later.append((library, ptr, device, owner))
                return
            torch.cuda.synchronize(device)  # freeing is not ordered by streams
            library.mem_free(ptr)
    except CollectivesError as error:
        print(f"collectives: memory at {ptr:#x} could not be freed: {error}", file=sys.stderr)


_later: list[tuple] = []  # what couldn't be freed, since a stream was captured: the next allocation frees it


def _free_late() -> None:
    while _later:
        _free(*_later.pop())
