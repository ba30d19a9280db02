"""Rendezvous over a torch store, in which the ranks exchange their records.

Each rank claims its number, sets its record and waits for the records of the others. A rendezvous
that fails, fails on every rank that has come, with the same error:
``CollectiveTimeout`` with the missing ranks, ``InvalidUsage`` for two processes with one rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ..comm.liveness import RankExits, exit_reason, has_ended
from ..comm.waiting import RankWait, call_with_timeout, first_line
from ..errors import CollectivesError, CollectiveTimeout, InvalidUsage, RemoteError, TransportError
from ..secret import seal, unseal
from .peers import Participant, parse_record, raise_posted_failure

__all__ = ["GRACE_S", "StoreRendezvous"]

# Seconds for which the rank that serves the others stays after a failure, so that those who have
# come get its cause.
GRACE_S = 2.0
_LATECOMERS_S = 5.0  # the same after a failure that is no timeout, for ranks that are still starting


@dataclass
class StoreRendezvous:
    """One rendezvous over a store.

    ``store``: with a prefix of this rendezvous' own; ``deadline``: on ``time.monotonic``'s clock;
    ``timeout``: the seconds that it was, for messages; ``where``: the name of the store in
    messages; ``server``: the rank whose process serves the store, if a rank's does. ``stale``
    becomes True if the store was closed before the serving rank had come: then it was an older one
    of that process. ``purpose``: what the ranks come for, for messages; ``exits``: how ranks that
    haven't come have ended; ``logged_ranks``: as in `RankWait`.

    Keys: ``arrived`` and ``left`` count processes; ``claim/R`` counts those that say they are rank
    R; ``peer/R`` has R's record; ``error`` has the cause for which the rendezvous has failed, which
    the first rank that finds it sets.
    """

    store: dist.Store | None
    participant: Participant
    deadline: float
    timeout: float
    where: str = "the store"
    server: int | None = None
    stale: bool = False
    purpose: str = "to open the job's communicator"
    exits: RankExits | None = None
    logged_ranks: Sequence[int] | None = None
    _server_arrived: bool = False
    _arrived: dict = field(default_factory=dict)  # rank -> its process

    def exchange(self) -> list[bytes]:
        """Exchange the ranks' records, and return them by rank.

        Blocks until all ranks have come or the time is over.
        """

        def timed_out() -> CollectivesError:
            return CollectiveTimeout(
                f"{self.where} has stopped answering ({self.timeout:g} s were allowed)",
                op="init",
                rank=self.participant.rank,
                peers=() if self.server is None else (self.server,),
            )

        try:
            grace = (2 if self.server == self.participant.rank else 1) * GRACE_S
            return call_with_timeout(self._exchange_records, self.deadline + grace, timed_out)
        finally:
            self.store = None

    def _exchange_records(self, stop: threading.Event) -> list[bytes]:
        """Exchange the ranks' records; rank 0's brings the unique id to the others.

        The rank that serves the store leaves it last. So after a success the store's port is free
        again before this rank goes on to the engine's init, which no other rank passes without it:
        a later ``init_process_group`` on the same port can't reach this store by mistake.
        """
        try:
            self.store.add("arrived", 1)
            try:
                records = self._gather_records(stop)
            except BaseException as error:
                timed_out = isinstance(error, CollectiveTimeout)
                until = min(time.monotonic() + _LATECOMERS_S, self.deadline) if not timed_out else self.deadline
                with contextlib.suppress(RuntimeError):  # if the store is what has failed, that is raised already
                    self.store.add("left", 1)
                    self._wait_until_all_left(stop, until + GRACE_S, 0 if timed_out else self.participant.size)
                raise
            self.store.add("left", 1)
            self._wait_until_all_left(stop, self.deadline, self.participant.size)
            return records
        except CollectivesError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError, in some stores a plain one
            kind, peers = (RemoteError, (self.server,)) if self._is_client() else (TransportError, ())
            self.stale = self._is_client() and not self._server_arrived
            text = f"{self.where} has gone away or failed: {first_line(error)}{_describe_exhaustion()}"
            ended = self._find_ended_ranks()
            if ended:
                kind, peers = RemoteError, tuple(ended)
                text = f"{text}; {'; '.join(f'rank {rank}: {how}' for rank, how in ended.items())}"
            raise kind(text, op="init", rank=self.participant.rank, peers=peers) from error
        except (ValueError, IndexError) as error:  # C++'s, of a counter whose text is none
            text = f"{self.where} has a counter that is no number: {first_line(error)}"
            raise TransportError(text, op="init", rank=self.participant.rank) from error

    def _gather_records(self, stop: threading.Event) -> list[bytes]:
        """Claim this rank, set its record, and wait for all records. Return them by rank."""
        store, rank, size = self.store, self.participant.rank, self.participant.size
        self._raise_posted_failure()
        if store.add(f"claim/{rank}", 1) > 1:
            text = f"two processes say that they are rank {rank}: {self._describe_duplicates(stop)}"
            self._post_failure(InvalidUsage, text, (rank,))
        try:
            record = self.participant.make_record()
        except CollectivesError as error:
            with contextlib.suppress(RemoteError):  # the other ranks raise it; this rank raises the cause itself
                text = f"rank {rank} could not make a unique id: {str(error)[:1000]}"
                self._post_failure(RemoteError, text, (rank,))
            raise
        store.set(f"peer/{rank}", seal(record, _purpose(f"peer/{rank}")))
        keys = [f"peer/{peer}" for peer in range(size)]
        wait = RankWait(
            self.purpose, rank, size, self.timeout, deadline=self.deadline, exit_reason=self._exit_reason, op="init",
            logged_ranks=self.logged_ranks,
        )  # fmt: skip
        pause = 0.001
        while True:
            self._raise_posted_failure()
            if store.check(keys):
                return [unseal(store.get(key), _purpose(key)) for key in keys]
            try:
                wait.check(self._find_missing_ranks)
            except (CollectiveTimeout, RemoteError) as error:
                self._post_failure(type(error), error.message, error.peers)
            if self._is_client() and not self._server_arrived:
                self._server_arrived = store.check([keys[self.server]])
            if stop.wait(pause):
                self._post_failure(RemoteError, f"rank {rank} stopped while the ranks were meeting", (rank,))
            pause = min(pause * 1.5, 0.05)

    def _find_missing_ranks(self) -> list[int]:
        """Return the ranks that have not come, and those that have come and ended since."""
        missing = []
        for peer in range(self.participant.size):
            if peer not in self._arrived and self.store.check([f"peer/{peer}"]):
                record = unseal(self.store.get(f"peer/{peer}"), _purpose(f"peer/{peer}"))
                self._arrived[peer] = parse_record(record, peer)["process"]
            if peer not in self._arrived or has_ended(self._arrived[peer]):
                missing.append(peer)
        return missing

    def _exit_reason(self, rank: int) -> str:
        if rank in self._arrived:
            return exit_reason(self._arrived[rank])
        return self.exits.reason(rank) if self.exits is not None else ""

    def _find_ended_ranks(self) -> dict[int, str]:
        """Return how ranks have ended, by rank, after the store has failed.

        The store may end a moment before its process, so it waits a little.
        """
        until = time.monotonic() + GRACE_S / 2
        while self.exits is not None:
            ended = self.exits.reasons_without_store()
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(0.02)
        return {}

    def _is_client(self) -> bool:
        """Return whether another rank's process serves the store."""
        return self.server not in (None, self.participant.rank)

    def _wait_until_all_left(self, stop: threading.Event, until: float, expected: int) -> None:
        """Wait until all who have come, and at least ``expected``, have left the store.

        Only the rank that serves it waits.
        """
        if self.server == self.participant.rank:
            while self.store.add("left", 0) < max(expected, self.store.add("arrived", 0)):
                if time.monotonic() >= until or stop.wait(0.002):
                    break

    def _describe_duplicates(self, stop: threading.Event) -> str:
        """Describe the processes with this rank's number.

        The record of the first one may still be on its way.
        """
        me, first = f"process {os.getpid()} on {socket.gethostname()}", "another one"
        key, until = f"peer/{self.participant.rank}", time.monotonic() + GRACE_S / 2
        while not self.store.check([key]) and time.monotonic() < until and not stop.wait(0.01):
            pass
        if self.store.check([key]):
            other = parse_record(unseal(self.store.get(key), _purpose(key)), self.participant.rank)
            first = f"process {other['pid']} on {other['host']}"
        return f"{first} and {me}. If they belong to two jobs, give each job a MASTER_PORT of its own"

    def _post_failure(self, kind: type[CollectivesError], text: str, peers: Iterable[int]) -> None:
        """Post a failure to all ranks, unless one is posted already, and raise the posted one."""
        if self._posted_failure() is None:
            failure = json.dumps({"kind": kind.__name__, "text": text, "peers": list(peers)}).encode()
            self.store.set("error", seal(failure, _purpose("error")))
        self._raise_posted_failure()

    def _raise_posted_failure(self) -> None:
        if (failure := self._posted_failure()) is not None:
            raise_posted_failure(failure, self.participant.rank)

    def _posted_failure(self) -> bytes | None:
        """Return the failure that a rank has posted; None for one that is nobody's who has the secret."""
        if not self.store.check(["error"]):
            return None
        try:
            return unseal(self.store.get("error"), _purpose("error"))
        except TransportError:
            return None


def _purpose(key: str) -> str:
    return f"rendezvous/{key}"


def _describe_exhaustion() -> str:
    """Return that this process has no file descriptor left, which torch's stores don't say; "" where it has one."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"; this process has all {most} file descriptors that it may have"
    return ""
