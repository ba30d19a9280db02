"""Membership of an elastic job: which of its ranks are alive, and how they connect again.

A rank is dead when its process is. Each rank detects that by itself, and at any moment all ranks
detect the same, so no consensus is needed: the ranks that are alive connect under a name that is
made of exactly these ranks. Ranks that have not yet detected the same wait under different names.
The wait consists of short attempts, after each of which a rank checks again who is alive. So it
doesn't matter which ranks die when, nor how many attempts a rank has made. That is why this isn't
done by `Communicator.shrink`, whose calls are numbered.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, replace

from ...comm.communicator import Communicator
from ...comm.consensus import all_gather_object
from ...comm.liveness import has_ended, this_process
from ...comm.waiting import format_ranks
from ...errors import CollectivesError, CollectiveTimeout, InvalidUsage
from ...rendezvous.open import open_communicator
from ...rendezvous.peers import Rendezvous
from ..basics import World
from ..functions import NegotiatedComm
from ..process_sets import global_process_set

__all__ = ["Membership", "NotEnoughRanks", "Report"]

_ATTEMPT_SECONDS = 0.5  # of one attempt to connect, and so the time for which a death may stay undetected
_INIT_SECONDS = 60.0  # the engine's default, which is restored
_MAX_REPORT = 4096  # characters of an error


@dataclass(frozen=True)
class Report:
    """Report of a rank to the others: the error by which it ends the job, or None, and how often it
    has recovered.
    """

    error: str | None = None
    resets: int = 0


class NotEnoughRanks(RuntimeError):
    """Too few ranks are left, or some didn't connect in time."""


@dataclass(frozen=True)
class Membership:
    """Processes of a world's ranks, by rank, as `liveness.this_process` names them.

    ``token``: a secret of the job, part of the names for connections.
    """

    token: str
    processes: tuple[str, ...]
    rank: int

    @classmethod
    def gather(cls, world: World) -> Membership:
        """Gather the processes; a collective call of all ranks.

        `InvalidUsage` where the ranks can't see each other's processes.
        """
        rows = all_gather_object(NegotiatedComm(global_process_set), (this_process(), secrets.token_hex(16)))
        processes, tokens = zip(*rows, strict=True)
        namespaces = {process.rsplit("|", 2)[0] for process in processes}  # each with its node
        if len(namespaces) > 1 or len({peer.node for peer in world.peers}) > 1:
            raise InvalidUsage("the ranks don't see each other's processes: they are in several containers or machines")
        return cls(tokens[0], processes, world.rank)

    def alive_ranks(self) -> list[int]:
        """Return the ranks that are alive."""
        return [rank for rank, process in enumerate(self.processes) if not has_ended(process)]

    def rebuild_world(
        self, world: World, report: Report, *, min_ranks: int, seconds: float
    ) -> tuple[World, Membership, list]:
        """Connect the ranks that are alive, in the order of their ranks.

        Return the new world, its membership and all reports. ``world``: the old one, aborted.
        Blocks until all of them have connected, at most ``seconds``. `NotEnoughRanks` where fewer
        than ``min_ranks`` are left, or some don't connect.
        """
        deadline = time.monotonic() + seconds
        while True:
            ranks = self.alive_ranks()
            if len(ranks) < min_ranks:
                dead = sorted(set(range(len(self.processes))) - set(ranks))
                raise NotEnoughRanks(
                    f"{format_ranks(dead)} died, and of the {min_ranks} ranks that it takes {len(ranks)} are left"
                )
            survivors = Membership(self.token, tuple(self.processes[rank] for rank in ranks), ranks.index(self.rank))
            comm = None
            try:
                comm = survivors._connect(world, ranks)
                reports = _gather_reports(comm, report)
                return World(comm, list(comm.peers), owns=True, settings=world.settings), survivors, reports
            except CollectivesError as error:  # a rank died, or hasn't connected yet
                if comm is not None and not comm.closed:
                    comm.abort()
                if time.monotonic() < deadline:
                    continue
                late = [ranks[peer] for peer in error.peers] if isinstance(error, CollectiveTimeout) else []
                who = format_ranks(late) if late else "some ranks"
                raise NotEnoughRanks(
                    f"{who} live, and did not come within {seconds:g} s (HOROVOD_ELASTIC_TIMEOUT) to go on: {error}"
                ) from error

    def _connect(self, world: World, ranks: list[int]) -> Communicator:
        """Connect the members, which have these ranks in the old world."""
        engine, old = world.comm.engine, world.comm
        name = json.dumps([self.token, self.processes])
        peers = tuple(replace(world.peers[old], rank=new) for new, old in enumerate(ranks))
        try:
            return open_communicator(
                Rendezvous(engine.library.named_unique_id(name.encode()), peers, self.rank, self.rank, len(ranks)),
                engine, device=old.device, seconds=_ATTEMPT_SECONDS, timeout=old.timeout,
                deterministic=old.deterministic,
            )  # fmt: skip
        finally:
            engine.library.set_init_timeout(_INIT_SECONDS)


def _gather_reports(comm: Communicator, report: Report) -> list[Report]:
    """Return all ranks' reports."""
    text = None if report.error is None else report.error[:_MAX_REPORT]
    return [Report(error, resets) for error, resets in all_gather_object(comm, (text, report.resets))]
