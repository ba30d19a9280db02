"""BucketComms: the communicators of `GradientBuckets`, one for each device of its parameters."""

from __future__ import annotations

import weakref

import torch

from ..comm.communicator import Communicator
from ..rendezvous.process_groups import drop_communicator, get_communicator, get_default_group
from .streams import has_spare_cores

__all__ = ["BucketComms"]

_OP = "GradientBuckets"


class BucketComms:
    """Communicators over the ranks that average, by device.

    ``over_ranks``: the user's communicator, or those over a process group. ``reducing``: those by
    which buckets are reduced: the same, or with overlap ones split off, so that the buckets of a
    running backward and other collectives don't wait for each other. These are closed when the
    owner dies.
    """

    def __init__(self, owner, devices: list[torch.device], user_comm: Communicator | None, group):
        self.over_ranks: dict[torch.device, Communicator] = {}
        self.reducing: dict[torch.device, Communicator] = {}
        self._devices = devices
        self._user_comm = user_comm
        self._group = group
        weakref.finalize(owner, _release, self.reducing, self.over_ranks).atexit = False

    def __str__(self):
        return str(self._user_comm or self._group or "default group")

    @property
    def first(self) -> Communicator:
        """The communicator of the first device."""
        return next(iter(self.over_ranks.values()))

    @property
    def for_flags(self) -> Communicator:
        """The communicator over which the ranks exchange flags.

        On CUDA two communicators at once might deadlock; on the host the flags needn't wait for the
        buckets.
        """
        first = self._devices[0]
        return (self.reducing if first.type == "cuda" else self.over_ranks)[first]

    def find(self) -> dict[torch.device, Communicator]:
        """Return the communicators over the ranks now; opens those of a new process group.

        Raises where one is closed.
        """
        found = {
            device: self._user_comm or get_communicator(self._get_process_group(), device) for device in self._devices
        }
        for comm in found.values():
            comm._check_open("all_reduce")
        return found

    def _get_process_group(self):
        if self._group is not None:
            return self._group
        return get_default_group("these buckets'", "pass comm=collectives.init()", op=_OP)

    def are(self, found: dict[torch.device, Communicator]) -> bool:
        """Return whether these communicators are in use."""
        return all(self.over_ranks.get(device) is comm for device, comm in found.items())

    def gain_by_overlap(self) -> bool:
        """Return whether overlap is faster; on the host the reducing thread needs a spare core."""
        return all(comm.device.type != "cpu" or has_spare_cores(comm) for comm in self.over_ranks.values())

    def split(self, overlap: bool) -> None:
        """Choose the communicators that reduce; with `overlap` a collective."""
        for device, comm in self.over_ranks.items():
            self.reducing[device] = comm.split(0) if overlap else comm

    # ---- The end.

    def _split_off(self) -> list[Communicator]:
        return [comm for device, comm in self.reducing.items() if comm is not self.over_ranks[device]]

    def abort_busy(self) -> None:
        """Abort those of the buckets' own that have operations in flight, which may never end."""
        for comm in self._split_off():
            if not comm.closed and comm._queue.busy():
                comm.abort()

    def close(self) -> None:
        """Close the buckets' own communicators; blocks while buckets are in flight."""
        for comm in self._split_off():
            comm.close()
        self.reducing.clear()
        self.over_ranks.clear()

    def drop(self, *, failed: bool) -> None:
        """Abort the buckets' own communicators, and leave the others.

        `failed`: those over a process group are opened anew at the next use.
        """
        for comm in self._split_off():
            comm.abort()
        if failed and self._user_comm is None:
            for comm in self.over_ranks.values():
                drop_communicator(comm)
        self.reducing.clear()
        self.over_ranks.clear()


def _release(reducing, over_ranks) -> None:
    """Close the communicators that were split off by a dead object; never blocks."""
    for device, comm in reducing.items():
        # NCCL's destroy may wait for the other ranks; such a communicator stays until the
        # interpreter's end.
        if comm is not over_ranks[device] and comm._on_host and not comm.closed and comm._queue.all_ended():
            comm.close()
