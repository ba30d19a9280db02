"""Barriers of a process group of this backend."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.barrier import start_barrier
from ..comm.liveness import RankExits
from ..comm.waiting import RankWait, first_line
from ..errors import CollectivesError, CollectiveTimeout, InvalidArgument, RemoteError, TransportError
from ..json_records import parse_json, parse_numbers, parse_text
from .launching import make_options
from .options import seconds_of
from .work import BackendWork, completed_work

__all__ = ["Barriers"]

_c10d = dist.distributed_c10d
_POLL_S = 0.002
_VERDICT_S = 1.0


class Barriers:
    """Mixin of a process group: its barriers. See `Launching` for what it needs."""

    def barrier(self, opts=None, timeout=None):
        """Block until all ranks have come; on CUDA also until this GPU has done what was queued.

        With `timeout`, or the options', at most so long.
        """
        self._sequence += 1
        opts = make_options(_c10d.BarrierOptions, opts, timeout=timeout)
        seconds = seconds_of(opts.timeout)
        comm = self._barrier_communicator(opts.device)
        if seconds is None and not opts.asyncOp:
            comm.barrier()
            return completed_work()
        work = BackendWork((start_barrier(comm),), [], None, seconds)
        if not opts.asyncOp:
            work.wait()
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
        ranks that have come raise `CollectiveTimeout`, or `RemoteError` as soon as a missing rank's
        process has ended.
        """
        timeout = getattr(timeout, "timeout", timeout)  # Backend's form: the options
        if not isinstance(timeout, timedelta | int | float | None):
            raise InvalidArgument(
                f"timeout must be a datetime.timedelta, not {timeout!r}", op="monitored_barrier", rank=self._rank
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        limit = self._timeout if seconds is None or seconds < 0 else float(seconds)
        number = self._monitored = self._monitored + 1
        wait = RankWait(
            "to pass monitored_barrier", self._rank, self._size, limit, op="monitored_barrier",
            exit_reason=RankExits(self._store, range(self._size)).reason if limit else None,
        )  # fmt: skip
        try:
            if self._rank:
                self._follow(number, wait)
            else:
                self._lead(number, wait, wait_all_ranks)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise TransportError(
                f"the store has gone away or failed: {first_line(error)}", op="monitored_barrier", rank=self._rank
            ) from error

    def _lead(self, number, wait: RankWait, wait_all_ranks) -> None:
        store, missing = self._store, list(range(1, self._size))

        def find_missing():
            missing[:] = [rank for rank in missing if not store.check([f"monitored/{number}/{rank}"])]
            return missing if wait_all_ranks else missing[:1]

        try:
            while find_missing():
                wait.check(find_missing)
                time.sleep(_POLL_S)
        except CollectivesError as error:
            if isinstance(error, CollectiveTimeout):
                error = self._late(error.peers, wait.seconds)
            store.set(f"monitored/{number}/go", json.dumps([type(error).__name__, error.detail, error.peers]))
            raise error from None
        store.set(f"monitored/{number}/go", "")

    def _follow(self, number, wait: RankWait) -> None:
        store, key = self._store, f"monitored/{number}/go"
        store.set(f"monitored/{number}/{self._rank}", "")
        wait.deadline += _VERDICT_S  # rank 0's own verdict comes at the deadline: it names the ranks
        try:
            while not store.check([key]):
                wait.check(lambda: [0])
                time.sleep(_POLL_S)
        except CollectiveTimeout:
            raise self._late((0,), wait.seconds) from None
        if data := store.get(key):
            raise parse_verdict(data, self._rank)

    def _late(self, missing, limit: float) -> CollectiveTimeout:
        """Return the error that names late ranks, in the words of torch's."""
        ranks = ", ".join(map(str, missing))
        text = f"Rank{'s' if len(missing) > 1 else ''} {ranks} failed to pass monitoredBarrier in {limit * 1000:.0f} ms"
        if not limit:
            text += f", the time that was given: Rank {self._rank} timed out in monitoredBarrier"
        return CollectiveTimeout(
            text, op="monitored_barrier", rank=self._rank, peers=tuple(missing),
        )  # fmt: skip


def parse_verdict(data: bytes, rank: int) -> CollectivesError:
    """Return the error that rank 0 has set for all ranks; `TransportError` where it is none."""
    try:
        kind, detail, peers = parse_json(data)
        error = RemoteError if kind == "RemoteError" else CollectiveTimeout
        return error(detail and parse_text(detail), op="monitored_barrier", rank=rank, peers=parse_numbers(peers))
    except (ValueError, TypeError):
        text = f"what rank 0 has set as the outcome can't be read: {data[:80]!r}"
        return TransportError(text, op="monitored_barrier", rank=rank, peers=(0,))
