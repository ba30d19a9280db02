"""Elastic `run`: calls a training again, with the surviving ranks, after ranks have died."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from ...comm.waiting import format_ranks
from ...errors import Aborted, CollectivesError, CollectiveTimeout, InvalidArgument, InvalidUsage, RemoteError
from ...rendezvous import world as job
from ..basics import World, activate, current
from ..exceptions import HorovodInternalError, HostsUpdatedInterrupt
from ..operations import barrier
from .membership import Membership, NotEnoughRanks, Report

__all__ = ["run"]

_LOG = logging.getLogger("collectives.horovod")
_TIMEOUT = 600.0  # seconds for the ranks that are alive to connect; HOROVOD_ELASTIC_TIMEOUT replaces it
_POST_ERROR_SECONDS = 30.0  # in which a rank that ends the job connects to the others, to post its error
_MAX_RETRIES = 3  # consecutive recoveries to one commit in which no rank has died
_FAILURES = (HorovodInternalError, RemoteError, Aborted, CollectiveTimeout)


def run(func=None, *, reset_limit: int | None = None, min_np: int | None = None):
    """Make a training ``func(state, ...)`` elastic; a decorator.

    Each call syncs the state from rank 0 and calls ``func``. When ranks die, an operation of the
    others raises `HorovodInternalError`. The other ranks then restore the state of the last commit,
    become ranks 0 to n - 1 of a smaller job in their old order, call `State.on_reset`, sync, and
    call ``func`` again. It returns on all ranks together: a rank that is done waits for the others.
    Process sets other than the global one end with the old job.

    Any other exception ends the job: the rank that has it raises it, and the others raise
    `HorovodInternalError` that names it. The job also ends with fewer than ``min_np`` ranks
    (HOROVOD_ELASTIC_MIN_NP, default 1), after more than ``reset_limit`` recoveries
    (HOROVOD_ELASTIC_RESET_LIMIT, default no limit), and at the third failure in a row in which no
    rank has died and nothing was committed. Ranks that are alive are waited for
    HOROVOD_ELASTIC_TIMEOUT seconds (600).

    It works for the ranks of one node on the host engine, under a launcher that doesn't end the
    surviving ranks. No rank joins later. With other engines, or several nodes, the first failure is
    raised as it is. See docs/elastic.md.
    """
    _check_count(reset_limit, "reset_limit", 0)
    _check_count(min_np, "min_np", 1)
    if func is None:
        return functools.partial(run, reset_limit=reset_limit, min_np=min_np)

    @functools.wraps(func)
    def training(state, *args, **kwargs):
        return _ElasticTraining(state, reset_limit, min_np).call(func, args, kwargs)

    return training


def _check_count(value, name: str, low: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise InvalidArgument(f"{name} must be an int from {low} up, not {value!r}", op="elastic.run")


def _read_variable(name: str, low: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit() or int(text) < low:
        raise InvalidArgument(f"{name}={text}: it must be a whole number from {low} up", op="elastic.run")
    return int(text)


class _ElasticTraining:
    """A running elastic training; limits that are None are those of the environment."""

    def __init__(self, state, reset_limit: int | None, min_np: int | None):
        self.state = state
        self.reset_limit = reset_limit
        if reset_limit is None:
            self.reset_limit = _read_variable("HOROVOD_ELASTIC_RESET_LIMIT", 0)
        self.min_ranks = min_np or _read_variable("HOROVOD_ELASTIC_MIN_NP", 1) or 1
        self.seconds = float(_read_variable("HOROVOD_ELASTIC_TIMEOUT", 1) or _TIMEOUT)
        self.resets = 0
        self._retries = 0
        self._commits = 0
        self._membership: Membership | None = None
        self._world: World | None = None
        self._not_elastic: CollectivesError | None = None

    def call(self, func, args, kwargs) -> Any:
        """Call the training until it returns; return its result."""
        self._gather_membership()
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
                self._recover(error)
            except HostsUpdatedInterrupt as interrupt:
                self._count_reset(self.resets, interrupt)
                skip_sync = interrupt.skip_sync
            except Exception as error:
                self._post_error(error)
                raise
            changed = True

    def _gather_membership(self) -> None:
        self._world = world = current()
        if world.size < self.min_ranks:
            raise InvalidArgument(f"min_np={self.min_ranks}, and the job has {world.size} ranks", op="elastic.run")
        if world.comm.engine.name != "host":
            self._not_elastic = InvalidUsage(f"the engine is {world.comm.engine.name}, and it takes the host engine")
            return
        try:
            self._membership = Membership.gather(world)
        except InvalidUsage as error:  # the same on all ranks
            self._not_elastic = error

    def _count_reset(self, resets: int, cause: BaseException) -> None:
        if self.reset_limit is not None and resets >= self.reset_limit:
            raise HorovodInternalError(f"the job has gone on {resets} times, its reset_limit: {cause}") from cause
        self.resets = resets + 1

    def _restore(self) -> None:
        try:
            self.state.restore()
        except Exception as error:
            self._post_error(error)
            raise

    def _recover(self, cause: BaseException) -> None:
        """Make a job of the ranks that are left."""
        if self._membership is None:
            raise HorovodInternalError(f"{cause} (and it can't be gone on: {self._not_elastic})") from cause
        before = self._membership
        while True:
            self._abort_world(cause)
            try:
                reports = self._rebuild_world(Report(None, self.resets), self.seconds)
            except NotEnoughRanks as failure:
                raise HorovodInternalError(f"{cause} (and it can't be gone on: {failure})") from cause
            ended = [(rank, report.error) for rank, report in enumerate(reports) if report.error is not None]
            if ended:
                rank, text = ended[0]
                peer = before.processes.index(self._membership.processes[rank])
                failure = HorovodInternalError(f"rank {peer} has ended the job by an error of its own: {text}")
                raise failure from RemoteError(text, op="elastic.run", rank=before.rank, peers=(peer,))
            self._count_reset(max(report.resets for report in reports), cause)
            try:
                activate(self._world)
                break
            except CollectivesError as error:  # another rank died
                cause = error
        job._world = self._world.comm  # collectives.init() returns it
        dead = [rank for rank, process in enumerate(before.processes) if process not in self._membership.processes]
        commits = getattr(self.state, "_commits", 0)
        self._retries = 0 if dead or commits > self._commits else self._retries + 1
        self._commits = commits
        if self._retries >= _MAX_RETRIES:
            text = f"{cause} (nobody has died, and this was number {_MAX_RETRIES} with nothing committed between)"
            raise HorovodInternalError(text) from cause
        who = f"{format_ranks(dead)} died" if dead else "nobody died"
        _LOG.warning(
            "hvd [rank %d]: %s; going on from the last commit with %d ranks, this one as rank %d: %s",
            before.rank, who, self._world.size, self._world.rank, cause,
        )  # fmt: skip

    def _post_error(self, error: Exception) -> None:
        """Post the error by which this rank ends the job to the others."""
        if self._membership is None or len(self._membership.alive_ranks()) == 1:
            return
        text = f"{type(error).__name__}: {error}"
        _LOG.error("hvd [rank %d]: the job ends by an error of this rank: %s", self._membership.rank, text)
        self._abort_world(error)
        try:
            self._rebuild_world(Report(text, self.resets), _POST_ERROR_SECONDS)
        except (NotEnoughRanks, CollectivesError) as failure:
            _LOG.error("hvd [rank %d]: not all others could be told: %s", self._membership.rank, failure)

    def _abort_world(self, cause: BaseException) -> None:
        """Abort the old world, so that ranks that wait for this one get an error."""
        self._world.abort(cause)
        self._world.comm.abort()

    def _rebuild_world(self, report: Report, seconds: float) -> list[Report]:
        self._world, self._membership, reports = self._membership.rebuild_world(
            self._world, report, min_ranks=self.min_ranks, seconds=seconds
        )
        return reports
