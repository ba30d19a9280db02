"""Communication streams: communicators over the same ranks, each with its own CUDA stream, or
thread on the host.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from ..comm.communicator import Communicator
from ..cuda_state import current_stream, new_comm_stream
from ..errors import InvalidArgument
from ..torch_compat import current_graph_task_id

__all__ = [
    "CommStream",
    "close_comm_streams",
    "get_comm_streams",
    "has_spare_cores",
    "keep_for_caller",
    "should_overlap",
]


def should_overlap(comm: Communicator) -> bool:
    """Return whether other threads reduce buckets on the host during the backward.

    Otherwise the hook's call reduces them. Other threads do where each rank has more cores than
    torch uses; COLLECTIVES_OVERLAP=0 or 1 overrides that. A thread that shares its core with the
    backward only delays it.
    """
    named = os.environ.get("COLLECTIVES_OVERLAP", "").strip()
    if named in ("0", "1"):
        return named == "1"
    if named:
        raise InvalidArgument(f"COLLECTIVES_OVERLAP={named}: must be 0 or 1")
    return has_spare_cores(comm)


def has_spare_cores(comm: Communicator) -> bool:
    """Return whether each rank of this node has more cores than torch computes with."""
    return len(os.sched_getaffinity(0)) // comm.local_size > torch.get_num_threads()


class CommStream:
    """A communicator with a side stream on CUDA; on the host with a thread, started when needed."""

    def __init__(self, comm: Communicator, trace_row: str):
        self.comm = comm
        self.trace_row = trace_row
        self.stream = None if comm._on_host else new_comm_stream(comm.device)
        self.stopped = False
        self._jobs: queue.SimpleQueue | None = None
        self._owner = 0  # process id

    def submit(self, job) -> threading.Event:
        """Run a job on the thread of a host stream, after earlier ones.

        Returns an event that is set when it is done.
        """
        if self._jobs is None or self._owner != os.getpid():  # a forked child has no threads
            self._jobs, self._owner = queue.SimpleQueue(), os.getpid()
            name = f"collectives {self.trace_row}"
            threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True).start()
        done = threading.Event()
        self._jobs.put((job, done))
        return done

    def stop(self) -> None:
        """End the thread after the jobs that it has. The stream is not used any more."""
        self.stopped = True
        if self._jobs is not None and self._owner == os.getpid():
            self._jobs.put(None)


def _run_jobs(jobs: queue.SimpleQueue) -> None:
    while (item := jobs.get()) is not None:
        job, done = item
        job()
        done.set()
        del item, job, done  # they hold a bucket


_streams: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # communicator -> streams; the first is its own


def get_comm_streams(comm: Communicator, count: int) -> list[CommStream]:
    """Return `count` streams over a communicator's ranks.

    The first call for a larger count is a collective.
    """
    streams = _streams.get(comm)
    if streams is None:
        _close_stale()
        streams = _streams[comm] = []
    while len(streams) < count:
        trace_row = f"lane {len(streams)}"
        streams.append(CommStream(comm if not streams else comm.split(0), trace_row))
    return streams[:count]


def _close_stale() -> None:
    """Close the streams over closed communicators: their threads, and the communicators that were
    split off.
    """
    for comm in list(_streams):
        if comm.closed:
            close_comm_streams(comm, abort=any(each.comm._queue.busy() for each in _streams[comm]))


def close_comm_streams(comm: Communicator, *, abort: bool = False) -> None:
    """Close the streams over a communicator, which itself stays open."""
    for each in _streams.pop(comm, []):
        each.stop()
        if each.comm is not comm:
            each.comm.abort() if abort else each.comm.close()


def keep_for_caller(record: Callable[[torch.cuda.Stream], object], device: torch.device) -> None:
    """Call ``record(stream)`` with the stream of a device on which ``backward()`` was called, at its end.

    `record` is to call `record_stream` for the buckets of a hook. DDP uses them on that stream, which can
    be another one than those of the hook and of their allocation.
    """
    if current_graph_task_id() == -1:  # a rank in DDP's join() that has no more batches
        record(current_stream(device))
    else:  # autograd makes it the current one for its callbacks
        torch.autograd.Variable._execution_engine.queue_callback(lambda: record(current_stream(device)))
