"""Registration of arrays, so that an engine needs no staging copy (ncclCommRegister)."""

from __future__ import annotations

import weakref

import torch

from ..errors import InvalidUsage
from .arguments import invalid
from .closing import refuse_in_capture
from .malloc import MIN_SHARED_BYTES
from .memory import allocation_of, storage_of

__all__ = ["BufferRegistrationCache", "Registration", "deregister", "register"]

_MAX_ABSENT_ROUNDS = 3  # rounds without a buffer after which its registration ends


class Registration:
    """A registered array, held alive until it is deregistered. Made by `Communicator.register()`.

    `zero_copy`: whether the engine uses the array in place. On the host that needs memory that can
    be shared: of `Communicator.empty()`, or an allocation so large that malloc gave it a mapping of
    its own; an array in malloc's heap is staged. NCCL decides for each operation: None.
    """

    __slots__ = ("_storage", "array", "handle", "nbytes", "zero_copy")

    def __init__(self, array, handle: int, nbytes: int, zero_copy: bool | None):
        self.array = array
        self._storage = storage_of(array)
        self.handle = handle
        self.nbytes = nbytes
        self.zero_copy = zero_copy

    def __repr__(self):
        how = {True: ", used in place", False: ", staged", None: ""}[self.zero_copy]
        return f"<Registration of {self.nbytes} bytes{how}>"


def register(comm, array) -> Registration:
    """Register an array's allocation with a communicator; see `Communicator.register`."""
    buffer = comm._reader.read(array, "register", writes=True)
    with comm._device_guard():
        handle = comm._native.register(*allocation_of(array, buffer.ptr, buffer.nbytes))
    shared = comm.engine.library.memory_shared(buffer.ptr, buffer.nbytes) if comm._on_host else None
    registration = Registration(array, handle, buffer.nbytes, shared)
    comm._registrations.add(registration)
    return registration


def deregister(comm, registration: Registration) -> None:
    """End a registration of a communicator's; see `Communicator.deregister`."""
    if registration not in comm._registrations:
        raise invalid(comm, "deregister", f"{registration!r} isn't one of this communicator's, or ended before")
    if registration.zero_copy and comm._queue.busy():
        raise InvalidUsage(
            "operations are in flight, which may use the array: wait for them first",
            op="deregister", rank=comm.rank,
        )  # fmt: skip
    refuse_in_capture(comm, "deregister")
    with comm._device_guard():
        if not comm._on_host:
            torch.cuda.synchronize(comm.device)
        comm._native.deregister(registration.handle)
    comm._registrations.discard(registration)


class _Entry:
    """What the cache knows of one buffer."""

    __slots__ = ("comm", "finalizer", "last_round", "registration")

    def __init__(self, last_round: int):
        self.last_round = last_round  # in which the buffer was observed
        self.comm = None  # from the buffer's second round on
        self.registration: Registration | None = None  # None where the buffer can't be shared
        self.finalizer: weakref.finalize | None = None  # ends the registration when the buffer's owner is freed


class BufferRegistrationCache:
    """Cache of registrations of buffers that another library uses again, such as DDP's buckets.

    A buffer is registered when it is observed for the second time: DDP frees its first buckets
    after one backward, and later ones keep their addresses. A registration holds the buffer's
    memory until the buffer is absent for some rounds, or its `owner` (a parameter) or the cache is
    freed. Host engine only.
    """

    def __init__(self):
        self._round = 0
        self._entries: dict[tuple[int, int], _Entry] = {}  # by the allocation's address and bytes
        # Bound to the dictionary, as the entries' finalizers are, since the cache itself is freed
        # by then.
        weakref.finalize(self, _end_all, self._entries).atexit = False

    def begin_round(self) -> None:
        """Begin a round: a backward.

        Ends the registrations of buffers that were absent for too long.
        """
        self._round += 1
        for key, entry in list(self._entries.items()):  # a copy: the garbage collector may remove entries meanwhile
            if self._round - entry.last_round > _MAX_ABSENT_ROUNDS:
                _end(self._entries, key, entry.registration)

    def describe(self) -> str:
        """Return how many of the buffers that came back are shared, in words."""
        shared = [e.registration is not None for e in list(self._entries.values()) if e.comm is not None]
        return f"{sum(shared)} of {len(shared)} buckets shared" if shared else "no bucket has come back yet"

    def observe(self, comm, buffer: torch.Tensor, owner) -> None:
        """Register a buffer that was observed in an earlier round. A local call.

        `owner`: a function that returns the object that owns the buffer.
        """
        key = allocation_of(buffer, 0, 0)
        if key[1] < MIN_SHARED_BYTES:
            return
        entry = self._entries.get(key)
        registration = None if entry is None else entry.registration
        if registration is not None and registration not in entry.comm._registrations:
            self._entries.pop(key)  # its communicator was closed, which ended the registration
            entry.finalizer.detach()
            entry = None
        if entry is None:
            self._entries[key] = _Entry(self._round)
            return
        if entry.comm is None and entry.last_round != self._round:
            entry.comm = comm
            registration = comm.register(buffer)
            if registration.zero_copy:
                entry.registration = registration
                entry.finalizer = weakref.finalize(owner(), _end, self._entries, key, registration)
                entry.finalizer.atexit = False
            else:
                comm.deregister(registration)  # a staged buffer has no use for it
        entry.last_round = self._round


def _end_all(entries: dict) -> None:
    for key, entry in list(entries.items()):
        _end(entries, key, entry.registration)


def _end(entries: dict, key, registration) -> None:
    """Deregister a buffer and remove its entry, unless the buffer may be in use."""
    entry = entries.get(key)
    if entry is None or entry.registration is not registration:
        return
    comm, finalizer = entry.comm, entry.finalizer
    if registration is not None and not comm.closed and not comm._queue.all_ended():
        return  # peers may use it, too: a later round ends it, or close()
    del entries[key]
    if finalizer is not None:
        finalizer.detach()  # it holds the registration, and so the memory, as long as the owner lives
    if registration is not None and registration in comm._registrations and not comm.closed:
        comm.deregister(registration)
