"""Communicators of torch's process groups: one per group and device, opened at its first use."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..comm.config import CommConfig
from ..comm.engine import get_engine
from ..comm.liveness import RankExits, publish_process
from ..comm.waiting import first_line
from ..errors import InvalidUsage, TransportError
from ..torch_compat import default_store, open_process_groups
from .job_store import share_store
from .join import identify_process, join_over_store
from .open import open_communicator, remaining_seconds
from .world import init

__all__ = [
    "drop_communicator",
    "find_group_backend",
    "get_communicator",
    "get_default_group",
    "get_group_timeout",
    "init_process_group",
    "open_over_store",
    "register_group_backend",
    "unregister_group_backend",
]

_communicators: dict = {}  # (id of the group, device) -> (weak reference to the group, communicator)
_backends: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # by name of their group
_lock = threading.Lock()


def init_process_group(backend: str | None = None, *, comm: Communicator | None = None, **options) -> None:
    """Initialise torch.distributed's default group for the ranks of this job, under any launcher.

    With MASTER_ADDR and MASTER_PORT, which torchrun sets, it is
    ``torch.distributed.init_process_group(backend, **options)``. mpirun and srun set no RANK, no
    MASTER_ADDR, or neither: there rank 0 serves a torch store on a free port, and the ranks get the
    port over `comm`. Blocks until all ranks have come. Raises as `init()` and torch do.

    Args:
        backend: The backend, as torch takes it.
        comm: The communicator by which the ranks get the port. None: that of `init()`.
        **options: Further arguments of torch's function.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        who = identify_process() if comm is None else comm
        dist.init_process_group(backend, rank=who.rank, world_size=who.size, **options)
        return
    comm = init() if comm is None else comm
    store, name = share_store(comm)
    store = dist.PrefixStore(name, store)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, **options)


def get_default_group(whose: str, instead: str, *, op: str | None = None):
    """Return torch.distributed's default group. Raises `InvalidUsage` where there is none.

    `whose`, `instead`, `op`: for the message: whose communicator it is for, and what to do instead.
    """
    if not dist.is_initialized():
        raise InvalidUsage(
            f"{whose} communicator is opened over torch.distributed's default group, which isn't initialised: "
            f"call torch.distributed.init_process_group(), or {instead}",
            op=op,
        )
    return dist.group.WORLD


def get_group_timeout(group, device: torch.device) -> float:
    """Return the timeout with which a ``torch.distributed`` group was created, in seconds."""
    for each in (device, *group._device_types):
        try:
            seconds = group._get_backend(each).options._timeout.total_seconds()
        except (RuntimeError, AttributeError):  # no backend for this device, or one without such options
            continue
        if seconds > 0:
            return seconds
    return dist.constants.default_pg_timeout.total_seconds()


def get_communicator(group, device: torch.device) -> Communicator:
    """Return the communicator of a process group's ranks on a device, opened at the first call.

    The first call is a collective of the group: it blocks until all its ranks have come, at most
    the group's timeout, which becomes the communicator's. Raises `CollectiveTimeout` past it,
    `RemoteError` as soon as it is known that a rank's process has ended, and `TransportError` where
    torch's store is closed or fails.
    """
    key = (id(group), device)
    known = _communicators.get(key)
    if known is not None and known[0]() is group and (not known[1].closed or known[1].forked):
        return known[1]
    backend = _find_backend(group, device)
    if backend is not None:
        return backend.communicator(device)
    with _lock:
        _close_stale()
        publish_process()
        name, timeout = group.group_name, get_group_timeout(group, device)
        # A store may outlive a group and its name.
        comm = open_over_store(
            default_store(), f"ddp/{name}/{group.size()}/{device.type}", group.rank(), group.size(), device, timeout,
            f"to open the communicator of process group {name!r} on {device.type}, which all its ranks do at its "
            "first use",
            RankExits(default_store(), dist.get_process_group_ranks(group)),
        )  # fmt: skip
        _communicators[key] = (weakref.ref(group), comm)
        return comm


def open_over_store(
    store, name: str, rank: int, size: int, device: torch.device, timeout: float, purpose: str, exits: RankExits,
    config: CommConfig | None = None, agrees: bool = True, logged_ranks: Sequence[int] | None = None,
) -> Communicator:  # fmt: skip
    """Open a communicator of ranks that share a torch store; blocks until all have come.

    `name`: of the communicator in the store, the same on all ranks, and used again for the next one
    there; `timeout`: seconds, also the communicator's; `purpose`, `exits`, `logged_ranks`: as in
    `join_over_store`;
    `config`: the communicator's, the same on all ranks, else `InvalidUsage`; `agrees`: as
    `Communicator` takes it.
    Raises as `get_communicator`.
    """
    engine = get_engine(None, device.type)
    prefix = f"collectives/{name}"
    # Openings are counted, by rank and in the store itself: a count in this process would differ
    # from that of a process that has come later.
    try:
        number = store.add(f"{prefix}/opened/{rank}", 1)
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError, in some stores a plain one
        raise TransportError(
            f"torch.distributed's store has gone away or failed: {first_line(error)}. Its server is in torchrun's "
            "process or in rank 0's, mostly: it has ended",
            op="init", rank=rank,
        ) from error  # fmt: skip
    deadline = time.monotonic() + timeout
    rendezvous = join_over_store(
        store, f"{prefix}/{number}", rank, size, engine=engine, timeout=timeout, device=device, purpose=purpose,
        exits=exits, config=repr(config or CommConfig()), logged_ranks=logged_ranks,
    )  # fmt: skip
    return open_communicator(
        rendezvous, engine, device=device, seconds=remaining_seconds(deadline, timeout), timeout=timeout,
        config=config, agrees=agrees,
    )  # fmt: skip


def register_group_backend(name: str, backend) -> None:
    """Make `get_communicator` use the communicators of a process group's own backend.

    `name`: the group's; `backend`: has ``communicator(device)``, ``find(device)``,
    ``forget(comm)`` and ``supports_tensor_alloc(device)``. The reference is weak.
    """
    _backends[name] = backend


def unregister_group_backend(name: str, backend) -> None:
    """Undo `register_group_backend`: torch gives the name to another group after this one's end."""
    if _backends.get(name) is backend:
        del _backends[name]


def find_group_backend(group):
    """Return the registered backend of a process group, else None."""
    try:
        return _backends.get(group.group_name)
    except (AttributeError, RuntimeError):  # no group; torch raises the second for a group that was given no name
        return None


def _find_backend(group, device: torch.device):
    """Return the registered backend of a process group if it serves a device, else None."""
    backend = find_group_backend(group)
    return backend if backend is not None and backend.supports_tensor_alloc(device) else None


def _close_stale() -> None:
    """Close the communicators of process groups that were destroyed."""
    groups = open_process_groups()
    for key, (reference, comm) in list(_communicators.items()):
        group = reference()
        if group is None or group not in groups or comm.closed:
            del _communicators[key]
            comm.abort() if comm._queue.busy() else comm.close()


def drop_communicator(comm: Communicator) -> None:
    """Abort a communicator that has failed: its group's next `get_communicator` opens another."""
    for key, (_, known) in list(_communicators.items()):
        if known is comm:
            del _communicators[key]
    for backend in list(_backends.values()):
        backend.forget(comm)
    comm.abort()
