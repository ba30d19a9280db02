"""`run`: call a training again from the last commit, with the ranks that are left, each time that some die."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from ...comm.waiting import format_ranks
from ...errors import Aborted, CollectivesError, CollectiveTimeout, InvalidArgument, InvalidUsage, RemoteError
from ...rendezvous import world as job
from ..basics import World, current, enter
from ..exceptions import HorovodInternalError, HostsUpdatedInterrupt
from ..operations import barrier
from .membership import Gone, Membership, Report

__all__ = ["run"]

_LOG = logging.getLogger("collectives.horovod")
_WAIT = 600.0  # seconds for those who live to come; HOROVOD_ELASTIC_TIMEOUT replaces it
_TELL = 30.0  # seconds in which a rank that ends the job looks for others to tell
_VAIN = 3  # times in a row that all ranks go on from one commit, and nobody has died
_FAILURES = (HorovodInternalError, RemoteError, Aborted, CollectiveTimeout)


def run(func=None, *, reset_limit: int | None = None, min_np: int | None = None):
    """Make a training ``func(state, ...)`` elastic; a decorator.

    Each call syncs the state from rank 0 and calls ``func``. When ranks die, which the others see as
    `HorovodInternalError` out of an operation, the rest restore the state of the last commit, become ranks 0 to n - 1
    of a smaller job in their old order, call `State.on_reset`, sync, and call ``func`` again. It returns on all ranks
    together: a rank that is done waits for the others. Process sets other than the global one end with the old job.

    Any other exception ends the job: it is raised on the rank that has it, and `HorovodInternalError` naming it on the
    others. So do too few ranks: fewer than ``min_np`` (HOROVOD_ELASTIC_MIN_NP, default 1), more than ``reset_limit``
    times (HOROVOD_ELASTIC_RESET_LIMIT, default no limit) of going on, or the third failure in a row in which nobody
    has died and nothing was committed. Ranks that live are waited for HOROVOD_ELASTIC_TIMEOUT seconds (600).

    It is for the ranks of one machine on the host engine, and works where the launcher lets the rest live; nobody joins
    later. With other engines, or several machines, the first failure is raised as it is. See docs/elastic.md.
    """
    limits = _Limits(reset_limit, min_np)
    if func is None:
        return lambda function: _elastic(function, limits)
    return _elastic(func, limits)


def _elastic(func, limits: _Limits):
    @functools.wraps(func)
    def training(state, *args, **kwargs):
        return _Running(state, limits).call(func, args, kwargs)

    return training


class _Limits:
    """``reset_limit`` and ``min_np`` as given, or as the environment has them when a training begins."""

    def __init__(self, reset_limit: int | None, min_np: int | None):
        self._reset_limit = _count(reset_limit, "reset_limit", 0)
        self._min_np = _count(min_np, "min_np", 1)

    def read(self) -> tuple[int | None, int, float]:
        """Give the limit of resets, the least number of ranks, and the seconds to wait."""
        resets = self._reset_limit
        if resets is None:
            resets = _variable("HOROVOD_ELASTIC_RESET_LIMIT", 0)
        least = self._min_np or _variable("HOROVOD_ELASTIC_MIN_NP", 1) or 1
        return resets, least, float(_variable("HOROVOD_ELASTIC_TIMEOUT", 1) or _WAIT)


def _count(value, name: str, low: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise InvalidArgument(f"{name} must be an int from {low} up, not {value!r}", op="elastic.run")
    return value


def _variable(name: str, low: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit() or int(text) < low:
        raise InvalidArgument(f"{name}={text}: it must be a whole number from {low} up", op="elastic.run")
    return int(text)


class _Running:
    """One elastic training under way."""

    def __init__(self, state, limits: _Limits):
        self.state = state
        self.reset_limit, self.least, self.seconds = limits.read()
        self.resets = 0
        self._vain = 0
        self._commits = 0
        self._membership: Membership | None = None
        self._world: World | None = None
        self._why_not: CollectivesError | None = None

    def call(self, func, args, kwargs) -> Any:
        """Call the training until it ends."""
        self._begin()
        changed, skip_sync = False, False
        while True:
            try:
                if changed:
                    self.state.on_reset()
                if not skip_sync:
                    self.state.sync()
                skip_sync, changed = False, True
                result = func(self.state, *args, **kwargs)
                barrier()
                return result
            except _FAILURES as error:
                self._restore()
                self._go_on(error)
            except HostsUpdatedInterrupt as interrupt:
                self._count(self.resets, interrupt)
                skip_sync = interrupt.skip_sync
            except Exception as error:
                self._end(error)
                raise
            changed = True

    def _begin(self) -> None:
        self._world = world = current()
        if world.size < self.least:
            raise InvalidArgument(f"min_np={self.least}, and the job has {world.size} ranks", op="elastic.run")
        if world.comm.engine.name != "host":
            self._why_not = InvalidUsage(f"the engine is {world.comm.engine.name}, and it takes the host engine")
            return
        try:
            self._membership = Membership.of(world)
        except InvalidUsage as error:  # the same on all ranks
            self._why_not = error

    def _count(self, resets: int, cause: BaseException) -> None:
        if self.reset_limit is not None and resets >= self.reset_limit:
            raise HorovodInternalError(f"the job has gone on {resets} times, its reset_limit: {cause}") from cause
        self.resets = resets + 1

    def _restore(self) -> None:
        try:
            self.state.restore()
        except Exception as error:
            self._end(error)
            raise

    def _go_on(self, cause: BaseException) -> None:
        """Make a job of those who are left."""
        if self._membership is None:
            raise HorovodInternalError(f"{cause} (and it can't be gone on: {self._why_not})") from cause
        before = self._membership
        while True:
            self._leave(cause)
            try:
                reports = self._meet(Report(None, self.resets), self.seconds)
            except Gone as gone:
                raise HorovodInternalError(f"{cause} (and it can't be gone on: {gone})") from cause
            ended = [(rank, report.error) for rank, report in enumerate(reports) if report.error is not None]
            if ended:
                rank, text = ended[0]
                peer = before.members.index(self._membership.members[rank])
                failure = HorovodInternalError(f"rank {peer} has ended the job by an error of its own: {text}")
                raise failure from RemoteError(text, op="elastic.run", rank=before.rank, peers=(peer,))
            self._count(max(report.resets for report in reports), cause)
            try:
                enter(self._world)
                break
            except CollectivesError as error:  # one more died
                cause = error
        job._world = self._world.comm  # for collectives.init()
        lost = [rank for rank, member in enumerate(before.members) if member not in self._membership.members]
        commits = getattr(self.state, "_commits", 0)
        self._vain = 0 if lost or commits > self._commits else self._vain + 1
        self._commits = commits
        if self._vain >= _VAIN:
            text = f"{cause} (nobody has died, and this was number {_VAIN} with nothing committed between)"
            raise HorovodInternalError(text) from cause
        who = f"{format_ranks(lost)} died" if lost else "nobody died"
        _LOG.warning(
            "hvd [rank %d]: %s; going on from the last commit with %d ranks, this one as rank %d: %s",
            before.rank, who, self._world.size, self._world.rank, cause,
        )  # fmt: skip

    def _end(self, error: Exception) -> None:
        """Tell the others that the job ends."""
        if self._membership is None or len(self._membership.alive()) == 1:
            return
        told = f"{type(error).__name__}: {error}"
        _LOG.error("hvd [rank %d]: the job ends by an error of this rank: %s", self._membership.rank, told)
        self._leave(error)
        try:
            self._meet(Report(told, self.resets), _TELL)
        except (Gone, CollectivesError) as gone:
            _LOG.error("hvd [rank %d]: not all others could be told: %s", self._membership.rank, gone)

    def _leave(self, cause: BaseException) -> None:
        """End all that is under way in the world that there was, so that those who wait for this rank notice."""
        self._world.abort(cause)
        self._world.comm.abort()

    def _meet(self, report: Report, seconds: float) -> list[Report]:
        self._world, self._membership, reports = self._membership.meet(
            self._world, report, least=self.least, seconds=seconds
        )
        return reports
