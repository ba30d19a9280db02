"""Agents of an elastic job under torchrun: which of them live, and what they have agreed on.

There is one on each node, and any of them may end, or come, at any time. They know of each other
by the job's store. Each has a number, the lowest that is free, and writes a record again and again
while it lives. One whose record stays the same for too long counts as dead, and its workers with it:
its node may be gone, so that nobody else can report that.

Keys, below ``agents``: ``terms``: the first agent's; ``N/owner``: the token of the agent that has
number N, empty where it is free again; ``record/TOKEN``: its record.

Where the job's store has moved to another place the agents enter that one. Members of the newest
round that are no agent's workers then count as dead after the same time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..environment import read_label
from ..errors import InvalidArgument, TransportError
from ..rendezvous.launcher_store import LauncherStore
from ..rendezvous.rounds import Rounds
from ..secret import seal, unseal

__all__ = ["Agents", "Record"]

_LOG = logging.getLogger("collectives.elastic")


@dataclass(frozen=True)
class Record:
    """An agent's record: its name for messages, how many of its workers run or are started, those
    workers as `liveness.identify_process` names them, and a count that grows.
    """

    name: str
    ranks: int
    workers: tuple[str, ...] = ()
    beats: int = 0


class Agents:
    """The agents of one job, as one of them knows them.

    ``rounds``: of the job; ``most``: how many there may be; ``ranks``: workers of each; ``interval``:
    seconds between two records; ``limit``: seconds after which an unchanged one is a dead agent's.
    All methods raise `TransportError` where the store is gone, and `StoreMoved` where it has moved:
    then call `renew`.
    """

    def __init__(self, store: LauncherStore, rounds: Rounds, most: int, ranks: int, interval: float, limit: float):
        self._store = store
        self._rounds, self._most = rounds, most
        self._interval, self._limit = interval, limit
        self.number: int | None = None
        self._token = ""
        self._record = Record(f"{read_label('COLLECTIVES_HOST_ID') or socket.gethostname()}:{os.getpid()}", ranks)
        self._ranks = ranks
        self._written = self._watched = 0.0
        self._known = 0  # numbers that have ever been taken
        self._changes: dict[str, tuple[bytes, float]] = {}  # of each token: its record, and since when
        self._terms: dict[str, object] = {}
        self._strays_due: float | None = None

    def agree(self, terms: Mapping[str, object]) -> None:
        """Compare this agent's terms with the first one's. Raises `InvalidArgument` where they differ."""
        self._terms = dict(terms)
        mine = seal(json.dumps(dict(terms)).encode(), "agents/terms").hex()
        found = bytes.fromhex(self._call("compare_set", "terms", "", mine).decode())
        first = json.loads(unseal(found, "agents/terms"))
        wrong = [f"{name} {own} and not {first.get(name)}" for name, own in terms.items() if own != first.get(name)]
        if wrong:
            raise InvalidArgument(f"this torchrun has {', '.join(wrong)} as the job's first one")

    def renew(self, workers: Sequence[str]) -> None:
        """Enter a store to which the job's has moved, with the number from before where that is free."""
        number, self.number = self.number, None
        self._known, self._changes = 0, {}
        self.agree(self._terms)
        if self.enter(number):
            self._write(len(workers), tuple(workers))
        self._strays_due = time.monotonic() + self._limit

    def enter(self, first: int | None = None) -> bool:
        """Take the lowest free number, or the ``first`` one; return False where there is none."""
        token = secrets.token_hex(8)
        for number in [*([] if first is None else [first]), *range(self._most)]:
            if self._call("compare_set", f"{number}/owner", "", token).decode() == token:
                self.number, self._token = number, token
                self._write(self._ranks, ())
                return True
        return False

    def keep_alive(self, workers: Sequence[str] | None = None) -> bool:
        """Write the record again and look after other agents, where it is time for that.

        ``workers``: those that run; None: they are still to be started. Returns False where other
        agents have counted this one as dead.
        """
        now, workers = time.monotonic(), None if workers is None else tuple(workers)
        if self.number is not None and self._is_due(workers, now):
            if self._token_of(self.number) != self._token:
                self.number = None
                return False
            self._write(self._ranks if workers is None else len(workers), workers or ())
        if now - self._watched >= self._interval:
            self._watched = now
            self._watch(now)
            if self._strays_due is not None and now >= self._strays_due:
                self._report_strays(workers or ())
        return True

    def others(self) -> list[Record]:
        """Return the records of the other agents."""
        found = [self._read(token) for number, token in self._taken_numbers() if number != self.number]
        return [_parse_record(raw) for raw in found if raw is not None]

    def leave(self) -> None:
        """Give the number back."""
        if self.number is not None:
            number, self.number = self.number, None
            self._call("compare_set", f"{number}/owner", self._token, "")

    # ---- The parts.

    def _is_due(self, workers: tuple[str, ...] | None, now: float) -> bool:
        return now - self._written >= self._interval or (workers is not None and workers != self._record.workers)

    def _write(self, ranks: int, workers: tuple[str, ...]) -> None:
        self._record = Record(self._record.name, ranks, workers, self._record.beats + 1)
        key = f"record/{self._token}"
        self._call("set", key, seal(json.dumps(asdict(self._record)).encode(), f"agents/{key}"))
        self._written = time.monotonic()

    def _watch(self, now: float) -> None:
        """Look for dead agents, from the next number on to the first one that lives."""
        owners = self._taken_numbers()
        start = -1 if self.number is None else self.number
        owners.sort(key=lambda each: (each[0] <= start, each[0]))
        for number, token in owners:
            if number == start:
                continue
            raw = self._read(token) or b""
            before = self._changes.get(token)
            if before is None or before[0] != raw:
                self._changes[token] = raw, now
            elif now - before[1] >= self._limit:
                self._bury(number, token, raw)
                continue
            if self.number is not None:  # it looks after the next one itself
                break

    def _bury(self, number: int, token: str, raw: bytes) -> None:
        """Report the workers of an agent that is dead, and free its number."""
        record = _parse_record(raw)
        for worker in record.workers:
            self._rounds.report_death(worker)
        if self._call("compare_set", f"{number}/owner", token, "").decode() == "":
            _LOG.warning(
                "collectives: agent %d (%s) has not been heard of for %g s: it and its %d workers count as dead",
                number, record.name, self._limit, len(record.workers),
            )  # fmt: skip

    def _report_strays(self, own: tuple[str, ...]) -> None:
        """Report the members of the newest round whose agent has not come to the new store."""
        members = self._rounds.newest_processes()
        if members is None:
            return
        self._strays_due = None
        strays = set(members).difference(own, *(record.workers for record in self.others()))
        for process in strays:
            self._rounds.report_death(process)
        if strays:
            _LOG.warning("collectives: %d ranks have no agent any more, and count as dead", len(strays))

    def _taken_numbers(self) -> list[tuple[int, str]]:
        """Return the numbers that are taken, and their tokens."""
        while self._known < self._most and self._call("check", [f"{self._known}/owner"]):
            self._known += 1
        owners = [(number, self._token_of(number)) for number in range(self._known)]
        return [(number, token) for number, token in owners if token]

    def _token_of(self, number: int) -> str:
        return self._call("get", f"{number}/owner").decode("utf-8", "replace")

    def _read(self, token: str) -> bytes | None:
        """Return an agent's record; None where it isn't written yet, or is none of this job's."""
        key = f"record/{token}"
        raw = self._call("get", key) if self._call("check", [key]) else b""
        try:
            return unseal(raw, f"agents/{key}") or None
        except TransportError:
            return None

    def _call(self, method: str, *arguments):
        return self._store.call("agents", method, *arguments)


def _parse_record(raw: bytes) -> Record:
    """Return an agent's record; an empty one where it is none, or has not been written yet."""
    try:
        values = json.loads(raw)
        workers = tuple(map(str, values["workers"]))
        return Record(str(values["name"]), int(values["ranks"]), workers, int(values["beats"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Record("unknown", 0)
