"""Rounds: the memberships of an elastic job, one after the other, agreed on in a store.

The store is the launcher's, so that it outlives every rank. Processes that take part in a round
register in it. A round is closed, once, with the list of its members. It can be closed when each
member of the round before it has registered or has died. So ranks that were started again, or new
ones, register and wait until the members of the present round come: after a failure, or at their
next commit. Deaths during that wait are found, and those after the round was closed lead to the next
one. A process that a round has left out, since it was late, can only come as a new one.

Where the job's store has moved to another place, each process writes its own round into it, as the one
before the next.

Keys, below ``elastic``: ``newest``: the newest round that is closed; ``N/count``, ``N/member/K`` and
``N/closed``: of round N; ``dead/PROCESS``: the launcher writes it; ``done``: the job has ended.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from ..comm.liveness import has_ended, this_process
from ..comm.waiting import format_ranks
from ..errors import Aborted, CollectiveTimeout, InvalidArgument, TransportError
from ..json_records import parse_json, parse_numbers
from ..secret import seal, unseal
from .failure_record import print_without_traceback
from .launcher_store import LauncherStore, StoreMoved, connect

__all__ = ["RANKS_VARIABLE", "STORE_VARIABLE", "Member", "Round", "Rounds", "find_rounds"]

STORE_VARIABLE, RANKS_VARIABLE = "COLLECTIVES_ELASTIC_STORE", "COLLECTIVES_ELASTIC_RANKS"
_LEAST_PAUSE, _MOST_PAUSE = 2e-3, 5e-2
_MAX_MEMBERS = 1 << 16
_RESTORED = 1 << 15  # the first slot of members that are written into a new store
_MAX_ABSENT = 1024  # registered one after the other, none with a record
_log = logging.getLogger("collectives.elastic")


@dataclass(frozen=True)
class Member:
    """A process in a round.

    ``process``: as `liveness.this_process` names it; ``old``: its round before, None for a new
    process; ``old_rank``: its rank there; ``commits``: how often it has committed;
    ``launched_as``: the rank that its launcher has given it; ``report``: what it has to say to the
    others, JSON.
    """

    process: str
    old: int | None = None
    old_rank: int | None = None
    commits: int = 0
    launched_as: int = 0
    report: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """A closed round: its number, its members by rank, and this process's rank."""

    number: int
    members: tuple[Member, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    def joined(self) -> list[int]:
        """Return the ranks of the members that were not in the round before."""
        return [rank for rank, member in enumerate(self.members) if member.old != self.number - 1]

    def lost(self, before: Round) -> list[int]:
        """Return the ranks of the round before that are no members any more."""
        here = {member.process for member in self.members}
        return [rank for rank, member in enumerate(before.members) if member.process not in here]


class Rounds:
    """The rounds of one job.

    ``store``: of the job; ``start``: ranks of the first round; ``least``, ``most``: members
    that a round may have.
    """

    def __init__(self, store: LauncherStore, start: int, least: int, most: int):
        self.launcher_store = store
        self.start, self.least, self.most = start, least, most
        self._last: Round | None = None
        self._warned: set[tuple[int, int]] = set()

    @property
    def store(self) -> dist.Store:
        """The rounds' part of the present store."""
        return self.launcher_store.prefixed("elastic")

    # ---- Taking part.

    def join(
        self, before: Round | None, seconds: float, *, commits: int = 0, report: dict | None = None,
        least: int | None = None,
    ) -> Round:  # fmt: skip
        """Register for the next round and wait until it is closed; return it.

        ``before``: the round that this process is in, None for a new process; ``seconds``: limit of
        the wait for members of the round before that don't come; ``least``: members that the round
        needs, if more than the job's. A new process waits without a limit. Raises
        `CollectiveTimeout` where too few come in time, `Aborted` where the job has ended, and
        `TransportError` where the store is gone.
        """
        least = max(self.least, least or 0)
        old = (None, None) if before is None else (before.number, before.rank)
        mine = Member(this_process(), *old, commits, _launched_as(), report or {})
        number = None
        while True:
            try:
                number = self._first(before, seconds) if number is None else number
                slot = self._register(number, mine)
                order = self._wait(number, before, seconds, least)
                if slot in order:
                    members = tuple(self._member(number, each) for each in order)
                    if len({each.process for each in members}) < len(members):
                        raise _invalid(number)
                    self._last = Round(number, members, order.index(slot))
                    return self._last
                number = max(number, self._newest()) + 1
            except StoreMoved as error:
                _log.warning("collectives: %s", error)
                self._restore()
                number = None

    def has_joiners(self, round_: Round) -> bool:
        """Return whether a process waits for the round after this one."""
        return self._settled(lambda: self._check(f"{round_.number + 1}/count"))

    def end(self) -> None:
        """Note that the job has ended: a process that still wants to join gets `Aborted`."""
        self._note("done")

    def has_ended(self) -> bool:
        """Return whether the job has ended."""
        return self._settled(lambda: self._check("done"))

    def has_begun(self) -> bool:
        """Return whether there was a round."""
        return self._settled(lambda: self._check("newest") or self.launcher_store.has_moved)

    def has_another_store(self, moves: int) -> bool:
        """Return whether the store has moved more than ``moves`` times. Raises `TransportError` where it is gone."""
        self.has_ended()
        return self.launcher_store.moves > moves

    def connect_part(self, name: str) -> dist.Store:
        """Return a part of the store, over a new connection. Raises `TransportError` where it is gone."""
        self.has_ended()  # goes on with another store, where that is due
        return dist.PrefixStore(f"elastic/{name}", self.launcher_store.connect_again())

    def newest_processes(self) -> list[str] | None:
        """Return the members of the newest round, as `liveness.this_process` names them; None where
        there is none in this store yet.
        """
        number = self._newest()
        order = self._closed(number)
        return None if order is None else [self._member(number, slot).process for slot in order]

    def report_death(self, process: str) -> None:
        """Note that a process has ended, for ranks on other nodes. The launcher calls it."""
        self._note(f"dead/{process}")

    def _note(self, key: str) -> None:
        """Set a key, and make sure that it is set: torch's store doesn't answer a `set`."""

        def set_and_check():
            self._set(key, b"1")
            self._check(key)

        self._settled(set_and_check)

    # ---- A store that has taken the place of another.

    def _settled(self, call):
        """Return what a call returns, where needed in a store that has moved."""
        while True:
            try:
                return call()
            except StoreMoved as error:
                _log.warning("collectives: %s", error)
                self._restore()

    def _restore(self) -> None:
        """Write this process's round into the store, unless another member has."""
        last = self._last
        while last is not None:
            try:
                for rank, member in enumerate(last.members):
                    self._set(f"{last.number}/member/{_RESTORED + rank}", json.dumps(vars(member)).encode())
                self._close(last.number, [_RESTORED + rank for rank in range(last.size)], self._newest() < last.number)
                return
            except StoreMoved as error:
                _log.warning("collectives: %s", error)

    def _first(self, before: Round | None, seconds: float) -> int:
        """Return the number of the first round that a process can join."""
        if before is not None:
            return before.number + 1
        deadline = time.monotonic() + seconds
        while (newest := self._newest()) < 0 and self.launcher_store.has_moved:
            if time.monotonic() >= deadline:
                raise TransportError(f"no rank of the elastic job came to its new store in {seconds:g} s", op="init")
            time.sleep(_MOST_PAUSE)
        return newest + 1

    # ---- One round.

    def _register(self, number: int, member: Member) -> int:
        slot = self._add(f"{number}/count", 1) - 1
        self._set(f"{number}/member/{slot}", json.dumps(vars(member)).encode())
        return slot

    def _members(self, number: int) -> dict[int, Member]:
        """Return the members that have registered, by slot."""
        if not self._check(f"{number}/count"):
            return {}
        count, found, absent = self._add(f"{number}/count", 0), {}, 0
        for slot in range(min(count, _MAX_MEMBERS)):
            if not self._check(f"{number}/member/{slot}"):  # it is about to write it, or died before it did
                absent += 1
                if absent > _MAX_ABSENT:  # the number is a stranger's
                    break
                continue
            absent = 0
            try:
                found[slot] = self._member(number, slot)
            except StoreMoved:
                raise
            except TransportError as error:  # a stranger's, which must not end the job
                if (number, slot) not in self._warned:
                    self._warned.add((number, slot))
                    _log.warning("a record in the store of the elastic job is left out: %s", error)
        return found

    def _member(self, number: int, slot: int) -> Member:
        if not self._check(f"{number}/member/{slot}"):  # `get` would wait for it
            raise _invalid(number)
        return _parse_member(self._get(f"{number}/member/{slot}"))

    def _wait(self, number: int, own: Round | None, seconds: float, least: int) -> list[int]:
        """Wait until the round is closed, and close it where that is this process's to do; return
        the slots of its members by rank. ``own``: the round that this process was in.

        A process that was not in the round before waits, without a limit, as long as a member of
        that one lives.
        """
        waits = number > 0 and (own is None or own.number != number - 1)
        expected = [self._member(number - 1, slot) for slot in self._closed(number - 1) or []]
        deadline, pause = time.monotonic() + seconds, _LEAST_PAUSE
        while True:
            if (order := self._closed(number)) is not None:
                return order
            if self._check("done"):
                ended = Aborted("the job has ended: there is nothing to join any more", op="init")
                print_without_traceback(ended)
                raise ended
            if self._check(f"dead/{this_process()}"):
                raise Aborted(
                    "this process counts as dead, since its launcher has ended or did not answer: the others go on "
                    "without it",
                    op="init",
                )
            late = time.monotonic() >= deadline
            order, missing = self._propose(number, expected, late and not waits)
            late = late and not (waits and missing)
            if order is not None and len(order) >= least and (number > 0 or late or len(order) >= self.start):
                self._close(number, order)
                continue
            if late:
                who = f"{format_ranks(missing)} of the round before" if missing else "others"
                have = 0 if order is None else len(order)
                raise CollectiveTimeout(
                    f"round {number} of the elastic job has {have} of at least {least} ranks after {seconds:g} s: "
                    f"{who} did not come",
                    op="init", peers=missing,
                )  # fmt: skip
            time.sleep(pause)
            pause = min(1.3 * pause, _MOST_PAUSE)

    def _propose(self, number: int, expected: list[Member], late: bool) -> tuple[list[int] | None, list[int]]:
        """Return the slots with which the round can be closed, None where it can't be yet, and the
        ranks of the round before that are missing.
        """
        members = self._members(number)
        living = {slot: member for slot, member in members.items() if not self._has_died(member.process)}
        here = {member.process for member in living.values()}
        missing = [
            rank for rank, member in enumerate(expected)
            if member.process not in here and not self._has_died(member.process)
        ]  # fmt: skip
        if missing and not late:
            return None, missing
        newest: dict[str, int] = {member.process: slot for slot, member in living.items()}  # of its registrations
        stayed = [slot for slot in newest.values() if living[slot].old == number - 1]
        stayed.sort(key=lambda slot: (-living[slot].commits, living[slot].old_rank))
        joined = [slot for slot in newest.values() if living[slot].old != number - 1]
        joined.sort(key=lambda slot: (living[slot].launched_as, slot))
        return (stayed + joined)[: self.most], missing

    def _has_died(self, process: str) -> bool:
        return has_ended(process) or self._check(f"dead/{process}")

    def _close(self, number: int, order: list[int], newest: bool = True) -> None:
        """Close a round, unless another process has. ``newest``: whether it is the newest one."""
        key, value = f"{number}/closed", json.dumps(order)
        self._call("compare_set", key, "", seal(value.encode(), f"elastic/{key}").hex())
        if newest:
            self._set("newest", str(number).encode())

    def _closed(self, number: int) -> list[int] | None:
        """Return the slots of a round's members by rank; None where it isn't closed."""
        if number < 0 or not self._check(f"{number}/closed"):
            return None
        raw = self._call("get", f"{number}/closed")
        try:
            order = parse_numbers(parse_json(unseal(bytes.fromhex(raw.decode()), f"elastic/{number}/closed")))
        except ValueError as error:
            raise _invalid(number) from error
        if len(set(order)) < len(order) or max(order, default=0) >= _MAX_MEMBERS:
            raise _invalid(number)
        return order

    def _newest(self) -> int:
        if not self._check("newest"):
            return -1
        text = self._get("newest")
        return int(text) if text.isdigit() and len(text) < 10 else -1

    # ---- The store.

    def _set(self, key: str, value: bytes) -> None:
        self._call("set", key, seal(value, f"elastic/{key}"))

    def _get(self, key: str) -> bytes:
        return unseal(self._call("get", key), f"elastic/{key}")

    def _check(self, key: str) -> bool:
        return self._call("check", [key])

    def _add(self, key: str, value: int) -> int:
        try:
            return self._call("add", key, value)
        except (ValueError, IndexError) as error:  # C++'s, of the text that is there
            raise TransportError(f"{key} of the elastic job is no number in the store", op="init") from error

    def _call(self, method: str, *arguments):
        return self.launcher_store.call("elastic", method, *arguments)


def _invalid(number: int) -> TransportError:
    return TransportError(f"round {number} of the elastic job has an invalid record", op="init")


def _launched_as() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() and len(text) < 8 else 0


def _parse_member(data: bytes) -> Member:
    """Return a member from its record. Raises `TransportError` where it is none."""
    try:
        values = parse_json(data)
        member = Member(**values)
        whole = all(each is None or (type(each) is int and each >= 0) for each in (member.old, member.old_rank))
        if not (whole and isinstance(member.process, str) and type(member.commits) is type(member.launched_as) is int):
            raise ValueError(values)
        if not (isinstance(member.report, dict) and member.process.isprintable()):
            raise ValueError(values)
        if (member.old is None) != (member.old_rank is None):
            raise ValueError(values)
        return member
    except (ValueError, TypeError) as error:
        raise TransportError("a member of the elastic job has an invalid record", op="init") from error


def find_rounds(environ: Mapping[str, str] | None = None) -> Rounds | None:
    """Return the rounds of the job whose elastic launcher has started this process; None without.

    Raises `InvalidArgument` for variables that can't be used, and `TransportError` where the
    launcher's store can't be reached.
    """
    environ = os.environ if environ is None else environ
    text, ranks = environ.get(STORE_VARIABLE), environ.get(RANKS_VARIABLE, "")
    if not text:
        return None
    places, numbers = text.split(","), ranks.split(":")
    whole = all(host and port.isdigit() for host, _, port in (place.rpartition(":") for place in places))
    if not whole or len(numbers) != 3 or not all(map(str.isdigit, numbers)):
        raise InvalidArgument(
            f"{STORE_VARIABLE}={text}, {RANKS_VARIABLE}={ranks}: they must be HOST:PORT and START:MIN:MAX"
        )
    start, least, most = map(int, numbers)
    if not 0 < least <= start <= most:
        raise InvalidArgument(f"{RANKS_VARIABLE}={ranks}: it takes 0 < MIN <= START <= MAX")
    return Rounds(connect(places), start, least, most)
