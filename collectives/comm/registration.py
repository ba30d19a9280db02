"""Registration of arrays, so that an engine needs no staging copy (ncclCommRegister and windows)."""

from __future__ import annotations

import weakref
from threading import get_ident

import torch

from ..cuda_state import is_capturing
from ..errors import InvalidUsage
from .agree import verify_same
from .arguments import invalid
from .closing import end_registration, refuse_in_capture
from .group import open_groups
from .mem_pool import is_pooled, missing_pool_reason
from .memory import MIN_SHARED_BYTES, allocate, allocation_of, is_window_memory, storage_of

__all__ = ["BufferRegistrationCache", "CommMemory", "Registration"]

_MAX_ABSENT_ROUNDS = 3  # rounds without a buffer after which its registration ends
_WIN_COLL_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: the ranks use the same offset in it


class Registration:
    """A registered array, held alive until it is deregistered. Made by `Communicator.register()`
    and `Communicator.register_window()`.

    `zero_copy`: whether the engine uses the array in place: True on the host; None with NCCL, which
    decides for each operation. `kind`:
    "buffer" (ncclCommRegister), "window" (ncclCommWindowRegister, symmetric), or None where the
    library has neither and nothing is registered.
    """

    __slots__ = ("_storage", "address", "array", "handle", "kind", "nbytes", "zero_copy")

    def __init__(self, array, address: int, nbytes: int, handle: int, kind: str | None, zero_copy: bool | None):
        self.array = array
        self._storage = storage_of(array)
        self.address = address
        self.nbytes = nbytes
        self.handle = handle
        self.kind = kind
        self.zero_copy = zero_copy

    def __repr__(self):
        how = ", used in place" if self.zero_copy else ""
        return f"<Registration of {self.nbytes} bytes{f' as {self.kind}' if self.kind else ''}{how}>"


class CommMemory:
    """The memory of a communicator: what it allocates and registers. Base of `Communicator`."""

    def empty(self, n: int, dtype: torch.dtype | None = None, *, window: bool = False) -> torch.Tensor:
        """Allocate a tensor in memory that the engine uses with no staging copy. A local call.

        The memory lives as long as a tensor views it, also after `close()`. On the host it is freed
        then. On CUDA it is freed by the next `empty` or `close()` of this process, which wait for
        the GPU first. An allocation takes at least 2 MiB on CUDA: tensors below 1 MiB share such
        blocks, at addresses that are multiples of 512. On the host the other ranks share the
        memory. A forked child (a DataLoader's worker) can't change the parent's contents, and sees
        what the parent writes later to pages that the child has not written: the memory is no
        snapshot for it. C: ncclMemAlloc (NCCL 2.19).

        Args:
            n: The number of elements.
            dtype: The dtype of the tensor. None: torch's default.
            window: Give the tensor an allocation of its own, whatever its size, as
                `register_window` needs.

        Returns:
            A tensor of one dimension. Its contents are undefined.
        """
        return allocate(self, n, dtype, bool(window))

    def register(self, array) -> Registration:
        """Register an array's memory, so that the engine may use it with no staging copy. A local
        call.

        The array is held alive until `deregister` or `close()`. C: ncclCommRegister (NCCL 2.19).

        Args:
            array: The array. On the host it must lie in memory that the ranks share: that of
                `empty`, of a process group's ``allocate_tensor``, or a DDP bucket's. The engine
                uses such memory in place without a registration, too.

        Raises:
            InvalidArgument: For other memory of the host: nothing makes it shared, since a driver
                may have pinned its pages.
        """
        self._check_open("register")
        buffer = self._reader.read(array, "register", writes=True)
        if self._on_host and buffer.nbytes and not is_shared(self, buffer.ptr, buffer.nbytes):
            raise invalid(
                self, "register",
                "the ranks don't share this array's memory, and the engine can't use it in place: allocate the array "
                "with Communicator.empty(n, dtype)",
            )  # fmt: skip
        place = allocation_of(array, buffer.ptr, buffer.nbytes)
        with self._device_guard():
            handle = self._native.register(*place)
        return _add(self, array, buffer, place[0], handle, "buffer")

    def register_window(self, tensor: torch.Tensor) -> Registration:
        """Register a tensor's memory as a symmetric window, which all ranks' kernels and copy
        engines can address.

        A collective, which blocks: all ranks call it with memory of one size. The tensors of an
        operation must begin at the same offset in the window on all ranks. The tensor is held alive
        until `deregister` or `close()`. Where the library has no windows the memory is registered
        as by `register`, and where it has neither it is not; the result's `kind` says which. The
        host engine registers as `register` does. C: ncclCommWindowRegister (NCCL 2.27).

        Args:
            tensor: A tensor of ``empty(n, dtype, window=True)``. All of its allocation becomes the
                window, once for each communicator.

        Raises:
            Mismatch: Where the sizes differ.
        """
        self._check_open("register_window")
        buffer = self._reader.read(tensor, "register_window", writes=True)
        if open_groups and get_ident() in open_groups:
            raise InvalidUsage("a window can't be registered in a group", op="register_window", rank=self.rank)
        refuse_in_capture(self, "register_window")
        place = address, nbytes = allocation_of(tensor, buffer.ptr, buffer.nbytes)
        if not is_window_memory(address):
            raise invalid(
                self, "register_window", "a window's memory comes from empty(n, dtype, window=True), and this doesn't"
            )
        if any(known.address == address for known in self._registrations):
            raise invalid(self, "register_window", "this memory is registered with this communicator already")
        verify_same(self, "the ranks' windows differ", {"bytes": nbytes}, "give them one size", op="register_window")
        library, handle, kind = self.engine.library, 0, None
        with self._device_guard():
            if not self._on_host and library.has("ncclCommWindowRegister"):
                handle, kind = self._native.window_register(*place, _WIN_COLL_SYMMETRIC), "window"
            elif self._on_host or library.has("ncclCommRegister"):
                handle, kind = self._native.register(*place), "buffer"
        # NCCL gives no window where its variables turn registration off.
        return _add(self, tensor, buffer, address, handle, kind if handle else None)

    def deregister(self, registration: Registration) -> None:
        """End a registration. A local call. C: ncclCommDeregister, ncclCommWindowDeregister.

        On CUDA it waits for the GPU.

        Args:
            registration: What `register` or `register_window` has returned. No operation that uses
                the array may be in flight, on any rank.

        Raises:
            InvalidUsage: On the host, while asynchronous operations are in flight.
        """
        _deregister(self, registration)


def _add(comm, array, buffer, address: int, handle: int, kind: str | None) -> Registration:
    registration = Registration(array, address, buffer.nbytes, handle, kind, True if comm._on_host else None)
    comm._registrations.add(registration)
    return registration


def _deregister(comm, registration: Registration) -> None:
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
        end_registration(comm._native, registration)
    comm._registrations.discard(registration)


class _Entry:
    """What the cache knows of one buffer."""

    __slots__ = ("comm", "finalizer", "in_place", "last_round", "registration")

    def __init__(self, last_round: int):
        self.last_round = last_round  # in which the buffer was observed
        self.comm = None  # from the buffer's second round on
        self.in_place = False  # the engine needs no staging copy
        self.registration: Registration | None = None  # of a buffer in a `mem_pool`
        self.finalizer: weakref.finalize | None = None  # ends the registration when the buffer's owner is freed


class BufferRegistrationCache:
    """Cache of registrations of buffers that another library uses again, such as DDP's buckets.

    On CUDA a buffer in a `mem_pool` is registered when it is observed for the second time: DDP
    frees its first buckets after one backward, and later ones keep their addresses. A registration
    holds the buffer's memory until the buffer is absent for some rounds, or its `owner` (a
    parameter) or the cache is freed. On the host nothing is registered: what the engine has
    allocated is used in place.
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

    def is_settled(self) -> bool:
        """Return whether all buffers were observed in this round, and in an earlier one: observing the
        same ones again then changes nothing.
        """
        return all(
            entry.comm is not None and entry.last_round == self._round for entry in list(self._entries.values())
        )

    def describe(self) -> str:
        """Return how many of the buffers that came back are shared, or registered, in words."""
        entries = [entry for entry in list(self._entries.values()) if entry.comm is not None]
        if not entries:
            return "no bucket has come back yet"
        count = f"{sum(entry.in_place for entry in entries)} of {len(entries)} buckets"
        if entries[0].comm._on_host:
            return f"{count} shared"
        reason = missing_pool_reason()
        return f"{count} registered" + (f" ({reason})" if reason else "")

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
            if comm._on_host:
                entry.in_place = is_shared(comm, *key)
            elif is_pooled(buffer) and comm.engine.library.has("ncclCommRegister"):
                entry.in_place = True
                entry.registration = registration = comm.register(buffer)
                entry.finalizer = weakref.finalize(owner(), _end, self._entries, key, registration)
                entry.finalizer.atexit = False
        entry.last_round = self._round


def is_shared(comm, address: int, nbytes: int) -> bool:
    """Return whether all of a range of the host's memory is shared with the ranks of the node."""
    return comm.engine.library.memory_shared(address, nbytes)


def _end_all(entries: dict) -> None:
    for key, entry in list(entries.items()):
        _end(entries, key, entry.registration)


def _end(entries: dict, key, registration) -> None:
    """Deregister a buffer and remove its entry, unless the buffer may be in use."""
    entry = entries.get(key)
    if entry is None or entry.registration is not registration:
        return
    comm, finalizer = entry.comm, entry.finalizer
    if registration is not None and not comm.closed and (not comm._queue.all_ended() or _captures(comm)):
        return  # peers may use it, too: a later round ends it, or close()
    del entries[key]
    if finalizer is not None:
        finalizer.detach()  # it holds the registration, and so the memory, as long as the owner lives
    if registration is not None and registration in comm._registrations and not comm.closed:
        comm.deregister(registration)


def _captures(comm) -> bool:
    """Return whether a CUDA graph is being captured, in which nothing can be deregistered."""
    return not comm._on_host and is_capturing(None)
