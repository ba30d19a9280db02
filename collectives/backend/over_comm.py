"""Process groups over communicators that are open already, for programs that began with `collectives.init()`."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist

from ..comm.agree import all_gather_object
from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from ..rendezvous.job_store import share_store
from ..torch_compat import open_process_groups, register_process_group
from .registration import NAME, register_backend

__all__ = ["is_group_over", "open_group_over"]

_OP = "open_group_over"
_groups: dict[Communicator, tuple[dist.ProcessGroup, str]] = {}  # with the group's name
_seconds: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # the communicators of default groups, by the first


def open_group_over(comm: Communicator) -> dist.ProcessGroup:
    """Return a process group of a communicator's ranks, in their order, which uses the communicator.

    The first call is a collective of the communicator and blocks. Where torch.distributed has no
    default group, the communicator's ranks become it, so that all of torch.distributed works: much of
    it, such as torch.distributed.checkpoint, asks for the default group whatever group it is given. Both
    groups are destroyed when the communicator is closed, and with the default one all others. The end of
    a group doesn't close the communicator.

    Raises `InvalidUsage` where some of its ranks have a default group and others have none, or where the
    default group isn't one of all its ranks.
    """
    for other in [other for other in _groups if other.closed and not other.forked]:  # the watchdog has ended it
        _GroupEnd(other).close()
    group, _ = _groups.get(comm, (None, ""))
    if group is not None and group in open_process_groups():
        return group
    ranks = _find_ranks(comm)
    store, name = share_store(comm)
    name = f"{NAME}/{name}"
    register_backend()
    if ranks is None:
        if _open_default_group(comm, dist.PrefixStore(f"{name}/default", store), name) is comm:
            return dist.group.WORLD
        ranks = list(range(comm.size))
    group = _create_group(comm, dist.PrefixStore(name, store), name, ranks)
    register_process_group(group, NAME, store, name, ranks)
    _keep(comm, group, name)
    return group


def is_group_over(group: dist.ProcessGroup) -> bool:
    """Return whether `open_group_over` has returned a process group."""
    return group is not dist.group.WORLD and any(group is each for each, _ in _groups.values())


def _keep(comm: Communicator, group: dist.ProcessGroup, name: str) -> None:
    if comm not in _groups:
        comm._owned.append(_GroupEnd(comm))
    _groups[comm] = group, name


def _open_default_group(comm: Communicator, store, name: str) -> Communicator:
    """Open torch.distributed's default group of a communicator's ranks; return its communicator.

    On the host that is another one, so that calls of other threads, such as those of
    torch.distributed.checkpoint.async_save, don't come between the communicator's. With a communicator
    on GPUs these use the group's on the host.
    """
    second = comm if comm.device.type == "cuda" else _seconds.get(comm)
    if second is None or second.closed:
        second = _seconds[comm] = comm.split(0)
        second.timeout = comm.timeout
        comm._owned.append(second)
    dist.init_process_group(
        NAME, store=store, rank=comm.rank, world_size=comm.size, timeout=_timeout_of(comm), pg_options=second
    )
    _keep(second, dist.group.WORLD, name)
    return second


def _timeout_of(comm: Communicator) -> timedelta:
    return dist.constants.default_pg_timeout if comm.timeout is None else timedelta(seconds=comm.timeout)


def _create_group(comm: Communicator, store, name: str, ranks: list[int]) -> dist.ProcessGroup:
    from .process_group import CollectivesGroup  # subclasses torch's: only for programs that use it

    devices = sorted({"cpu", comm.device.type})
    timeout = _timeout_of(comm)
    return CollectivesGroup(store, comm.rank, comm.size, timeout, name, ranks, devices, comm.config, comm)


def _find_ranks(comm: Communicator) -> list[int] | None:
    """Return the numbers of a communicator's ranks in the default group; None where no rank has one."""
    own = [dist.get_rank(), dist.get_world_size(), _name_of_default()] if dist.is_initialized() else None
    found = all_gather_object(comm, own)
    without = [rank for rank, each in enumerate(found) if each is None]
    if len(without) == comm.size:
        return None
    if without:
        raise InvalidUsage(
            f"some ranks of the communicator have torch.distributed's default group, and rank {without[0]} has none: "
            "all must call torch.distributed.init_process_group(), or none",
            op=_OP, rank=comm.rank, peers=without,
        )  # fmt: skip
    ranks = [each[0] for each in found]
    if len(set(ranks)) < comm.size or any(each[1:] != found[0][1:] for each in found):
        raise InvalidUsage(
            "torch.distributed's default group isn't the same one on all ranks of the communicator, mostly since "
            "communicators of some of them were used first: call collectives.init_process_group() before",
            op=_OP, rank=comm.rank,
        )  # fmt: skip
    return ranks


def _name_of_default() -> str:
    """Return the name of the default group where `open_group_over` has opened it, else ""."""
    return next((name for group, name in _groups.values() if group is dist.group.WORLD), "")


class _GroupEnd:
    """The end of a communicator's group, which comes with that of the communicator."""

    def __init__(self, comm: Communicator):
        self._comm = comm

    def close(self) -> None:
        group, _ = _groups.pop(self._comm, (None, ""))
        if group is not None and group in open_process_groups():
            dist.destroy_process_group(group)

    def abort(self) -> None:
        group, _ = _groups.get(self._comm, (None, ""))
        if group is not None and not group.is_shut_down:
            group.abort()  # and with it the communicator, which comes here again
        self.close()

    def _abort_with_error(self, error) -> None:
        """Leave the group to the next `open_group_over`: this is the watchdog's thread."""
