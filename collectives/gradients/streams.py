"""Lanes: communicators over the same ranks, each with a stream of its own on CUDA, and on the host with a thread."""

from __future__ import annotations

import os
import queue
import threading
import weakref

import torch

from ..comm.communicator import Communicator
from ..errors import InvalidArgument

__all__ = ["Lane", "close_lanes", "has_spare_cores", "lanes_of", "overlaps"]


def overlaps(comm: Communicator) -> bool:
    """Tell whether buckets on the host are reduced beside the backward, by other threads, or where the hook is called.

    Beside it where each rank has more cores than torch uses; COLLECTIVES_OVERLAP=0 or 1 says otherwise. A thread that
    shares its core with the backward only holds it up.
    """
    named = os.environ.get("COLLECTIVES_OVERLAP", "").strip()
    if named in ("0", "1"):
        return named == "1"
    if named:
        raise InvalidArgument(f"COLLECTIVES_OVERLAP={named}: must be 0 or 1")
    return has_spare_cores(comm)


def has_spare_cores(comm: Communicator) -> bool:
    """Tell whether each rank of this machine has more cores than torch computes with."""
    return len(os.sched_getaffinity(0)) // comm.local_size > torch.get_num_threads()


class Lane:
    """A communicator and where its operations run: a side stream on CUDA, a thread on the host once it is needed."""

    def __init__(self, comm: Communicator, row: str):
        self.comm = comm
        self.row = row  # in traces
        self.stream = None if comm._on_host else torch.cuda.Stream(comm.device)
        self._jobs: queue.SimpleQueue | None = None
        self._owner = 0

    def submit(self, job) -> threading.Event:
        """Run a job on the lane's thread, after those before it; on a host lane."""
        if self._jobs is None or self._owner != os.getpid():  # a forked child has no threads
            self._jobs, self._owner = queue.SimpleQueue(), os.getpid()
            threading.Thread(target=_work, args=(self._jobs,), name=f"collectives {self.row}", daemon=True).start()
        done = threading.Event()
        self._jobs.put((job, done))
        return done

    def end(self) -> None:
        if self._jobs is not None and self._owner == os.getpid():
            self._jobs.put(None)


def _work(jobs: queue.SimpleQueue) -> None:
    while (item := jobs.get()) is not None:
        job, done = item
        job()
        done.set()
        del item, job, done  # they hold a bucket


_lanes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> its lanes, itself on the first


def lanes_of(comm: Communicator, count: int) -> list[Lane]:
    """Give so many lanes over a communicator's ranks; the first call for more of them is a collective."""
    if comm not in _lanes:
        _close_stale()
    lanes = _lanes.setdefault(comm, [])
    while len(lanes) < count:
        row = f"lane {len(lanes)}"
        lanes.append(Lane(comm if not lanes else comm.split(0), row))
    return lanes[:count]


def _close_stale() -> None:
    """End the lanes over communicators that were closed: their threads, and the communicators beside the first one."""
    for comm in list(_lanes):
        if comm.closed:
            close_lanes(comm, abort=any(lane.comm._queue.busy() for lane in _lanes[comm]))


def close_lanes(comm: Communicator, *, abort: bool = False) -> None:
    """End the lanes over a communicator, which itself stays open."""
    for lane in _lanes.pop(comm, []):
        lane.end()
        if lane.comm is not comm:
            lane.comm.abort() if abort else lane.comm.close()
