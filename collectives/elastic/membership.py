"""Membership of an elastic job: which of its ranks are alive, and how they connect again.

`RoundMembership` is that of a job that an elastic launcher has started: its rounds are agreed on in
the launcher's store (`rendezvous.rounds`), over any number of nodes, and new ranks can join.

`NamedMembership` needs no launcher. A rank is dead when its process is. Each rank detects that by
itself, and at any moment all ranks detect the same, so no consensus is needed: the ranks that are
alive connect under a name that is made of exactly these ranks. Ranks that have not yet detected the
same wait under different names. The wait consists of short attempts, after each of which a rank
checks again who is alive. So it doesn't matter which ranks die when, nor how many attempts a rank
has made. That is why this isn't done by `Communicator.shrink`, whose calls are numbered.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from ..comm.agree import all_gather_object
from ..comm.communicator import Communicator
from ..comm.liveness import has_ended, this_process
from ..comm.waiting import format_ranks
from ..errors import CollectivesError, CollectiveTimeout, InvalidUsage, TransportError
from ..rendezvous import world
from ..rendezvous.open import open_communicator
from ..rendezvous.peers import Rendezvous
from ..rendezvous.rounds import Round

__all__ = ["LAUNCHERS", "Membership", "NotEnoughRanks", "Report", "find_membership"]

LAUNCHERS = "`python -m collectives.run --elastic` or `torchrun --rdzv-backend collectives`"
_ATTEMPT_SECONDS = 0.5  # of one attempt to connect, and so the time for which a death may stay undetected
_INIT_SECONDS = 60.0  # the engine's default, which is restored
_MAX_REPORT = 4096  # characters of an error


@dataclass(frozen=True)
class Report:
    """Report of a rank to the others: the error by which it ends the job, or None, how often it
    has recovered, and how often it has committed.
    """

    error: str | None = None
    resets: int = 0
    commits: int = 0


class NotEnoughRanks(RuntimeError):
    """Too few ranks are left, or some didn't connect in time."""


class Membership(ABC):
    """The processes of a job's ranks, as `liveness.this_process` names them, and this rank."""

    processes: tuple[str, ...]
    rank: int

    def alive_ranks(self) -> list[int]:
        """Return the ranks that are alive, as far as this process knows."""
        return [rank for rank, process in enumerate(self.processes) if not has_ended(process)]

    @abstractmethod
    def rejoin(
        self, comm: Communicator, peers: tuple, report: Report, *, min_ranks: int, seconds: float
    ) -> tuple[Communicator, Membership, list[Report]]:
        """Connect the ranks that are alive, and those that wait to join.

        ``comm``, ``peers``: the old communicator, aborted, and its ranks. Return the new one, its
        membership and all ranks' reports. Blocks until all of them have connected, at most
        ``seconds``. Raises `NotEnoughRanks` where fewer than ``min_ranks`` are left, or some don't
        connect.
        """


@dataclass(frozen=True)
class RoundMembership(Membership):
    """Membership by a round of the launcher's store."""

    round: Round

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(member.process for member in self.round.members)

    @property
    def rank(self) -> int:
        return self.round.rank

    def rejoin(self, comm, peers, report, *, min_ranks, seconds):
        text = None if report.error is None else report.error[:_MAX_REPORT]
        try:
            new, joined = world.join_next_round(
                seconds, commits=report.commits, report=asdict(replace(report, error=text)), least=min_ranks
            )
        except (CollectiveTimeout, TransportError) as error:
            raise NotEnoughRanks(str(error)) from error
        reports = [Report(**member.report) if member.report else Report() for member in joined.members]
        return new, RoundMembership(joined), reports


@dataclass(frozen=True)
class NamedMembership(Membership):
    """Membership of ranks on one node, which can watch each other's processes.

    ``token``: a secret of the job, part of the names for connections.
    """

    token: str
    processes: tuple[str, ...]
    rank: int

    def rejoin(self, comm, peers, report, *, min_ranks, seconds):
        deadline = time.monotonic() + seconds
        while True:
            ranks = self.alive_ranks()
            if len(ranks) < min_ranks:
                dead = sorted(set(range(len(self.processes))) - set(ranks))
                raise NotEnoughRanks(
                    f"{format_ranks(dead)} died, and of the {min_ranks} ranks that it takes {len(ranks)} are left"
                )
            processes = tuple(self.processes[rank] for rank in ranks)
            survivors = NamedMembership(self.token, processes, ranks.index(self.rank))
            new = None
            try:
                new = survivors._connect(comm, tuple(replace(peers[old], rank=rank) for rank, old in enumerate(ranks)))
                return new, survivors, _gather_reports(new, report)
            except CollectivesError as error:  # a rank died, or hasn't connected yet
                if new is not None and not new.closed:
                    new.abort()
                if time.monotonic() < deadline:
                    continue
                late = [ranks[peer] for peer in error.peers] if isinstance(error, CollectiveTimeout) else []
                who = format_ranks(late) if late else "some ranks"
                raise NotEnoughRanks(f"{who} live, and did not come within {seconds:g} s to go on: {error}") from error

    def _connect(self, old: Communicator, peers: tuple) -> Communicator:
        """Connect the members."""
        engine = old.engine
        name = json.dumps([self.token, self.processes])
        try:
            return open_communicator(
                Rendezvous(engine.library.named_unique_id(name.encode()), peers, self.rank, self.rank, len(peers)),
                engine, device=old.device, seconds=_ATTEMPT_SECONDS, timeout=old.timeout,
                deterministic=old.deterministic,
            )  # fmt: skip
        finally:
            engine.library.set_init_timeout(_INIT_SECONDS)


def find_membership(comm: Communicator, peers, gather: Callable[[list], list]) -> Membership:
    """Return the membership of the job's present ranks; a collective call of all ranks.

    ``gather``: returns all ranks' values of one that JSON has. Raises `InvalidUsage` on all ranks
    where they can't go on without one of them: without an elastic launcher they must be on one node,
    in one process namespace, on the host engine.
    """
    if (joined := world.current_round()) is not None:
        return RoundMembership(joined)
    if comm.engine.name != "host":
        raise InvalidUsage(
            f"the engine is {comm.engine.name}: without {LAUNCHERS} it takes the host engine"
        )
    rows = gather([this_process(), secrets.token_hex(16)])
    processes, tokens = zip(*rows, strict=True)
    namespaces = {process.rsplit("|", 2)[0] for process in processes}  # each with its node
    if len(namespaces) > 1 or len({peer.node for peer in peers}) > 1:
        raise InvalidUsage(
            "the ranks don't see each other's processes: they are in several containers or machines, which takes "
            + LAUNCHERS
        )
    return NamedMembership(tokens[0], tuple(processes), comm.rank)


def _gather_reports(comm: Communicator, report: Report) -> list[Report]:
    """Return all ranks' reports."""
    text = None if report.error is None else report.error[:_MAX_REPORT]
    return [Report(*row) for row in all_gather_object(comm, (text, report.resets, report.commits))]
