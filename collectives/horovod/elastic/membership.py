"""Who of a job's ranks is still there, and how those who are meet again.

A rank is gone when its process is. Every rank sees that by itself, and at any moment all see the same, so nothing has
to be agreed on: those who are there meet under a name made of exactly those who are there. Ranks that have not yet
seen the same wait under different names; the wait is cut into slices, after each of which a rank looks again who is
there. So it doesn't matter who dies when, nor how often somebody has tried (which is why this isn't done by
`Communicator.shrink`, whose calls are numbered).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, replace

import numpy

from ...comm.communicator import Communicator
from ...comm.waiting import name_ranks
from ...errors import CollectivesError, CollectiveTimeout, InvalidUsage, TransportError
from ...rendezvous.peers import PeerInfo
from ..basics import World
from ..functions import allgather_object

__all__ = ["Gone", "Member", "Membership", "Report"]

_SLICE = 0.5  # seconds of one try to meet, and so how long a death during it may go unnoticed
_INIT_SECONDS = 60.0  # the engine's default, which is put back
_REPORT = 2048  # bytes


@dataclass(frozen=True)
class Member:
    """A rank's process: its number, and when it was started, in clock ticks since boot."""

    pid: int
    begun: int

    def lives(self) -> bool:
        """Tell whether the process is there, and isn't just a zombie."""
        return _look(self.pid) == self.begun


@dataclass(frozen=True)
class Report:
    """What a rank tells the others when they meet: why it ends the job, or None, and how often it has met."""

    error: str | None = None
    resets: int = 0


class Gone(RuntimeError):
    """The ranks that are left are too few, or didn't come in time."""


@dataclass(frozen=True)
class Membership:
    """The processes of a world's ranks, by rank. ``token``: a secret of the job, part of the names of its meetings."""

    token: str
    members: tuple[Member, ...]
    rank: int

    @classmethod
    def of(cls, world: World) -> Membership:
        """Learn them; a collective of all ranks, that must be healthy. `InvalidUsage` where they can't be watched."""
        own = os.getpid(), _look(os.getpid()), os.readlink("/proc/self/ns/pid"), secrets.token_hex(16)
        rows = allgather_object(own)
        if len({namespace for _, _, namespace, _ in rows}) > 1 or len({peer.node for peer in world.peers}) > 1:
            raise InvalidUsage("the ranks don't see each other's processes: they are in several containers or machines")
        return cls(rows[0][3], tuple(Member(pid, begun) for pid, begun, _, _ in rows), world.rank)

    def alive(self) -> list[int]:
        """Give the ranks whose processes are there."""
        return [rank for rank, member in enumerate(self.members) if rank == self.rank or member.lives()]

    def meet(self, world: World, report: Report, *, least: int, seconds: float) -> tuple[World, Membership, list]:
        """Make a world of those who are there, in the order of their ranks; give it, its membership, and all reports.

        ``world``: the old one, aborted. Blocks until all who are there have come, at most ``seconds``. `Gone` where
        fewer than ``least`` are left, or some don't come.
        """
        until = time.monotonic() + seconds
        while True:
            ranks = self.alive()
            if len(ranks) < least:
                lost = sorted(set(range(len(self.members))) - set(ranks))
                raise Gone(f"{name_ranks(lost)} died, and of the {least} ranks that it takes {len(ranks)} are left")
            comm = None
            try:
                comm = self._open(world, ranks)
                reports = _exchange(comm, report)
                peers = [replace(world.peers[old], rank=new) for new, old in enumerate(ranks)]
                return _world(comm, peers, world), self._of(ranks), reports
            except CollectivesError as error:  # somebody died, or has not come yet
                if comm is not None and not comm.closed:
                    comm.abort()
                if time.monotonic() < until:
                    continue
                late = [ranks[peer] for peer in error.peers] if isinstance(error, CollectiveTimeout) else []
                who = name_ranks(late) if late else "some ranks"
                raise Gone(
                    f"{who} live, and did not come within {seconds:g} s (HOROVOD_ELASTIC_TIMEOUT) to go on: {error}"
                ) from error

    def _of(self, ranks: list[int]) -> Membership:
        return Membership(self.token, tuple(self.members[rank] for rank in ranks), ranks.index(self.rank))

    def _open(self, world: World, ranks: list[int]) -> Communicator:
        engine, old = world.comm.engine, world.comm
        name = json.dumps([self.token, [(self.members[rank].pid, self.members[rank].begun) for rank in ranks]])
        unique_id = engine.library.named_unique_id(name.encode())
        engine.library.set_init_timeout(_SLICE)
        try:
            return Communicator(
                engine, unique_id, ranks.index(self.rank), len(ranks), device=old.device, timeout=old.timeout,
                local_rank=ranks.index(self.rank), local_size=len(ranks), deterministic=old.deterministic,
            )  # fmt: skip
        finally:
            engine.library.set_init_timeout(_INIT_SECONDS)


def _world(comm: Communicator, peers: list[PeerInfo], old: World) -> World:
    comm.peers = tuple(peers)
    return World(comm, peers, owns=True, settings=old.settings)


def _exchange(comm: Communicator, report: Report) -> list[Report]:
    """Give all ranks' reports."""
    text = None if report.error is None else report.error[: _REPORT // 8]
    data = json.dumps([text, report.resets]).encode()
    sent = numpy.zeros(_REPORT, dtype=numpy.uint8)
    sent[: len(data)] = numpy.frombuffer(data, dtype=numpy.uint8)
    got = numpy.zeros((comm.size, _REPORT), dtype=numpy.uint8)
    comm.all_gather(got, sent)
    reports = []
    for rank, row in enumerate(got):
        try:
            error, resets = json.loads(row.tobytes().rstrip(b"\0"))
            reports.append(Report(None if error is None else str(error), int(resets)))
        except (ValueError, TypeError) as wrong:
            raise TransportError(f"what rank {rank} reports can't be read", op="elastic.run", peers=(rank,)) from wrong
    return reports


def _look(pid: int) -> int | None:
    """Give when a process was started; None where there is none, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
