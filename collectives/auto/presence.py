"""Which ranks of a group build a DDP object with ``collectives.auto``, by keys in torch's store.

A rank announces itself before DDP's constructor. That compares the parameters of all ranks, so after
it every rank that has ``collectives.auto`` has announced itself, and one look shows who has not.
"""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..comm.waiting import format_ranks
from ..torch_compat import default_store

__all__ = ["Presence", "announce", "was_missed"]

_parameters = inspect.signature(DistributedDataParallel.__init__)


class Presence:
    """This rank's announcement for one DDP object over `group`.

    `number`: how many DDP objects over that group this rank has announced, this one included; the
    same on all ranks, which build them in the same order. `compared`: whether the constructor compares
    the ranks' parameters. Raises `RuntimeError` where the store can't be reached.
    """

    def __init__(self, group: dist.ProcessGroup, compared: bool):
        self.compared = compared
        self._group = group
        self._store = default_store()
        prefix = _prefix(group)
        # The store counts the objects, because it may outlive a group and its name.
        self.number = self._store.add(f"{prefix}/{group.rank()}", 1)
        self._key = f"{prefix}/object {self.number}"
        self._add(1)

    def _add(self, one: int) -> None:
        self._store.add(f"{self._key}/{self._group.rank()}", one)
        self._store.add(f"{self._key}/count", one)

    def withdraw(self) -> None:
        """Take the announcement back: the constructor has failed."""
        self._store.add(f"{_prefix(self._group)}/{self._group.rank()}", -1)
        self._add(-1)

    def describe_missing(self) -> str:
        """Return which ranks have not announced the object, and what to do; "" where all have."""
        size = self._group.size()
        if self._store.add(f"{self._key}/count", 0) == size:
            return ""
        missing = [rank for rank in range(size) if not self._store.check([f"{self._key}/{rank}"])]
        if not missing:  # the last one has announced itself between the two looks
            return ""
        for rank in missing:
            self._store.set(_missed_key(self._group, rank), "1")
        ranks = dist.get_process_group_ranks(self._group)
        return (
            f"{format_ranks(ranks[rank] for rank in missing)} built this object without collectives.auto: import it in "
            "every rank's program before the object is built, or start every rank with python -m collectives.auto"
        )


def announce(args: tuple, kwargs: dict) -> Presence | None:
    """Announce the DDP object that is built of these arguments.

    None where there are no other ranks, where the constructor will raise an error, and where the
    store can't be reached; in the last case the ranks' later comparison reports it.
    """
    try:
        given = _parameters.bind(None, *args, **kwargs).arguments
    except TypeError:
        return None
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group(mesh_dim=0)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1 or group.rank() < 0:
        return None
    try:
        return Presence(group, bool(given.get("init_sync", True)))
    except RuntimeError:
        return None


def was_missed(group: dist.ProcessGroup) -> bool:
    """Return whether other ranks have found that this one had not announced an object."""
    return default_store().check([_missed_key(group, group.rank())])


def _prefix(group: dist.ProcessGroup) -> str:
    return f"collectives/auto/{group.group_name}/{group.size()}/built"


def _missed_key(group: dist.ProcessGroup, rank: int) -> str:
    return f"{_prefix(group)}/missed {rank}"
