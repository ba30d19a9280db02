"""torch.distributed's default group of an elastic job, which is opened anew whenever ranks have changed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.agree import all_gather_object
from ..comm.communicator import Communicator
from ..comm.waiting import call_with_timeout, format_ranks
from ..errors import CollectiveTimeout, InvalidUsage
from ..rendezvous import world
from ..torch_compat import group_backends, reset_group_names
from .membership import LAUNCHERS, Membership

__all__ = ["ProcessGroup"]

_ABORT_TAG = 1  # of Gloo's; torch's own calls have 0 where the program names none
_PAUSE_S = 0.005  # of a rank that has opened its group, and waits for the others


class ProcessGroup:
    """The default group of the present ranks. ``backend``: of torch's; None: there is no group."""

    def __init__(self, backend: str | None):
        self.backend = backend
        self._membership: Membership | None = None
        self._tries = 0  # with these ranks

    def abort(self) -> None:
        """Close the group's connections: another rank may wait in a call of torch's, such as a broadcast of
        DistributedDataParallel's, for this one, which has left for the recovery.
        """
        if self.backend is None or not dist.is_initialized():
            return
        group = dist.group.WORLD
        for backend in dict.fromkeys(group_backends(group)):  # Gloo's is the same one for CPU and CUDA
            if isinstance(backend, dist.ProcessGroupGloo):
                _close_connections(backend, [rank for rank in range(group.size()) if rank != group.rank()])
            else:
                backend.abort()

    def open(self, comm: Communicator, membership: Membership | None, seconds: float) -> None:
        """Open the group of a communicator's ranks, in place of an old one. All ranks call it; it blocks.

        torch itself waits for a rank that has died until its own time limit. So it runs on a thread,
        while the ranks ask each other over the communicator whether all are done: this raises
        `RemoteError` where one has died, or has given up. A thread that is left then waits on at a
        connection to the store, and under names, of its own, and what it opens is of no concern.
        """
        if self.backend is None:
            return
        self._tries = self._tries + 1 if membership is self._membership else 0
        self._membership = membership
        store = world.round_store(f"group/{self._tries}")
        if store is None:
            raise InvalidUsage(
                f"process_group takes {LAUNCHERS}: the launcher's store connects the ranks again", op="elastic.run"
            )
        if dist.is_initialized():
            dist.destroy_process_group()
        reset_group_names()  # a try that has failed has taken one
        comm.barrier()  # no thread is left where a rank has died before
        opened, ready = threading.Event(), [False] * comm.size

        def open_group(stop: threading.Event) -> None:
            device = torch.cuda.device(comm.device) if comm.device.type == "cuda" else contextlib.nullcontext()
            with device:  # a new thread's is the first one
                dist.init_process_group(self.backend, store=store, rank=comm.rank, world_size=comm.size)
            if stop.is_set():
                dist.destroy_process_group()
            opened.set()

        def look() -> None:
            if not all(ready):
                ready[:] = all_gather_object(comm, opened.is_set())

        def timed_out() -> CollectiveTimeout:
            late = [rank for rank, done in enumerate(ready) if not done]
            return CollectiveTimeout(
                f"{format_ranks(late)} of {comm.size} did not open torch.distributed's group within {seconds:g} s",
                op="elastic.run", rank=comm.rank, peers=late,
            )  # fmt: skip

        call_with_timeout(open_group, time.monotonic() + seconds, timed_out, look)
        look()
        while not all(ready):
            time.sleep(_PAUSE_S)
            look()


def _close_connections(gloo: dist.ProcessGroupGloo, peers: Iterable[int]) -> None:
    """Close all connections of a group, from any thread. ``peers``: its other ranks."""
    # Gloo has no call for it (its `abort` and `shutdown` leave them open), but closes all connections
    # of a group when one wait runs out of time. A receive from a peer that has closed its connection
    # fails at once instead: so it is tried with all peers.
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            received = torch.empty(1, dtype=torch.uint8, device="cpu")
            gloo.recv([received], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
