"""Barriers of a process group of this backend."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.barrier import start_barrier
from ..comm.waiting import first_line
from ..errors import CollectiveTimeout, TransportError
from .work import BackendWork, completed_work

__all__ = ["Barriers"]

_c10d = dist.distributed_c10d
_POLL_S = 0.002


class Barriers:
    """Mixin of a process group: its barriers. See `Launching` for what it needs."""

    def barrier(self, opts=None, timeout=None):
        """Block until all ranks have come; on CUDA also until this GPU has done what was queued.

        With `timeout`, or the options', at most so long.
        """
        self._sequence += 1
        if isinstance(opts, timedelta):
            timeout, opts = opts, None
        seconds = _seconds(timeout if timeout is not None else getattr(opts, "timeout", None))
        comm = self._barrier_communicator(getattr(opts, "device", None))
        if seconds is None and not getattr(opts, "asyncOp", True):
            comm.barrier()
            return completed_work()
        work = BackendWork((start_barrier(comm),), [])
        if seconds is not None:
            work.wait(seconds)
        return work

    def _barrier_communicator(self, device):
        """Return the communicator of the options' device; of the CPU where they name none."""
        if device is not None and device.type == "cuda" and "cuda" in self._device_names:
            return self.communicator(device)
        return self.communicator(torch.device("cpu" if "cpu" in self._device_names else "cuda"))

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Block until all ranks have come; names the ranks that have not within `timeout`.

        It goes over the store, so it works where collectives hang. Rank 0 waits for the others and
        lets them go on; with `wait_all_ranks` it names all that are missing, else the first. All
        ranks that have come raise `CollectiveTimeout`.
        """
        if not isinstance(timeout, timedelta | None):  # Backend's form: the options
            timeout = timeout.timeout
        limit = _seconds(timeout) or self._timeout
        number = self._monitored = self._monitored + 1
        deadline = time.monotonic() + limit
        try:
            if self._rank:
                self._follow(number, deadline, limit)
            else:
                self._lead(number, deadline, limit, wait_all_ranks)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise TransportError(
                f"the store has gone away or failed: {first_line(error)}", op="monitored_barrier", rank=self._rank
            ) from error

    def _lead(self, number, deadline, limit, wait_all_ranks) -> None:
        store, missing = self._store, []
        for rank in range(1, self._size):
            key = f"monitored/{number}/{rank}"
            while not store.check([key]):
                if time.monotonic() > deadline:
                    missing.append(rank)
                    break
                time.sleep(_POLL_S)
            if missing and not wait_all_ranks:
                break
        text = "" if not missing else _describe(missing, limit)
        store.set(f"monitored/{number}/go", text)
        if missing:
            raise CollectiveTimeout(text, op="monitored_barrier", rank=self._rank, peers=tuple(missing))

    def _follow(self, number, deadline, limit) -> None:
        store, key = self._store, f"monitored/{number}/go"
        store.set(f"monitored/{number}/{self._rank}", "")
        while not store.check([key]):
            if time.monotonic() > deadline + 1.0:  # rank 0's own verdict comes at the deadline: it names the ranks
                raise CollectiveTimeout(_describe([0], limit), op="monitored_barrier", rank=self._rank, peers=(0,))
            time.sleep(_POLL_S)
        text = store.get(key).decode()
        if text:
            raise CollectiveTimeout(text, op="monitored_barrier", rank=self._rank)


def _describe(missing, limit) -> str:
    ranks = ", ".join(map(str, missing))
    return f"Rank{'s' if len(missing) > 1 else ''} {ranks} failed to pass monitoredBarrier in {limit * 1000:.0f} ms"


def _seconds(timeout) -> float | None:
    """Return torch's timeout in seconds; None for none, which torch writes as 0 or below."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return seconds if seconds is not None and seconds > 0 else None
