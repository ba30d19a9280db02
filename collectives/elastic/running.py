"""Elastic `run`: calls a training again, with the ranks that are there, after ranks have died or
joined.
"""

from __future__ import annotations

import functools
import gc
import logging
from typing import Any

from ..comm.agree import all_gather_object
from ..comm.barrier import barrier
from ..comm.communicator import Communicator
from ..comm.waiting import format_ranks
from ..errors import Aborted, CollectivesError, CollectiveTimeout, InvalidArgument, InvalidUsage, RemoteError
from ..rendezvous import world
from .interrupt import HostsUpdatedInterrupt
from .membership import Membership, NotEnoughRanks, Report, find_membership
from .process_group import ProcessGroup

__all__ = ["ElasticTraining", "run"]

_LOG = logging.getLogger("collectives.elastic")
_TIMEOUT = 600.0  # seconds for the ranks that are alive to connect
_POST_ERROR_SECONDS = 30.0  # in which a rank that ends the job connects to the others, to post its error
_MAX_RETRIES = 3  # consecutive recoveries to one commit in which no rank has died


def run(
    func=None, *, reset_limit: int | None = None, min_ranks: int | None = None, timeout: float | None = None,
    process_group: str | None = None,
):  # fmt: skip
    """Make a training ``func(state, ...)`` elastic; a decorator.

    The call opens the job's communicator, as `collectives.init` does, syncs the state from rank 0
    and calls ``func``. When ranks die, an operation of the others raises `RemoteError`. The others
    then restore the state of the last commit, become ranks 0 to n - 1 of a smaller job in their old
    order, call `State.on_reset`, sync, and call ``func`` again. Under ``python -m collectives.run
    --elastic`` ranks that were started again, or new ones, join at the next commit: it raises
    `HostsUpdatedInterrupt`, which ``func`` must let pass, and ``func`` is called again with all of
    them. It returns on all ranks together: a rank that is done waits for the others.

    Any other exception ends the job: the rank that has it raises it, and the others raise
    `RemoteError` that names it. The job also ends with too few ranks, after too many recoveries,
    and at the third failure in a row in which no rank has died and nothing was committed.

    Without that launcher it works for the ranks of one node on the host engine, under a launcher
    that doesn't end the surviving ranks, and no rank joins later.

    Args:
        func: The training. None: the call returns the decorator.
        reset_limit: The largest number of recoveries. None: no limit.
        min_ranks: The least number of ranks. None: the launcher's, or 1.
        timeout: How long ranks that are alive are waited for, in seconds. None: 600.
        process_group: The backend of a default group of torch.distributed, which is opened anew
            before each call, for DDP; it takes the elastic launcher. None: no group.
    """
    _check_count(reset_limit, "reset_limit", 0)
    _check_count(min_ranks, "min_ranks", 1)
    if func is None:
        return functools.partial(
            run, reset_limit=reset_limit, min_ranks=min_ranks, timeout=timeout, process_group=process_group
        )

    @functools.wraps(func)
    def training(state, *args, **kwargs):
        seconds = _TIMEOUT if timeout is None else timeout
        return ElasticTraining(state, reset_limit, min_ranks or 1, seconds, process_group).call(func, args, kwargs)

    return training


def _check_count(value, name: str, low: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise InvalidArgument(f"{name} must be an int from {low} up, not {value!r}", op="elastic.run")


class ElasticTraining:
    """A running elastic training over the job's communicator.

    A front end overrides how a job is opened, made current and aborted.

    Args:
        state: The state of the training.
        reset_limit: The largest number of recoveries. None: no limit.
        min_ranks: The least number of ranks.
        seconds: How long the ranks that are alive may take to connect.
        process_group: As in `run`.
    """

    failures: tuple = (RemoteError, Aborted, CollectiveTimeout)
    name = "collectives"
    least_name = "min_ranks"

    def __init__(
        self, state, reset_limit: int | None, min_ranks: int, seconds: float, process_group: str | None = None
    ):
        self.state = state
        self.reset_limit = reset_limit
        self.min_ranks = min_ranks
        self.seconds = seconds
        self.process_group = ProcessGroup(process_group)
        self.resets = 0
        self.comm: Communicator | None = None
        self.peers: tuple = ()
        self._retries = 0
        self._commits = 0
        self._membership: Membership | None = None
        self._not_elastic: CollectivesError | None = None

    # ---- What a front end overrides.

    def open(self) -> tuple[Communicator, tuple]:
        """Return the communicator of the job and its `PeerInfo`."""
        comm = world.init()
        return comm, tuple(comm.peers or ())

    def activate(self) -> None:
        """Make `comm` the front end's current one, after ranks have changed."""

    def abort(self, cause: BaseException) -> None:
        """End what is in flight, so that ranks that wait for this one get an error."""
        self.comm.abort()

    def gather(self, value: list) -> list:
        """Return all ranks' values."""
        return all_gather_object(self.comm, value)

    def wait_for_all(self) -> None:
        """Wait until all ranks are done."""
        barrier(self.comm)

    def make_error(self, text: str) -> Exception:
        """Return the error that ends the job on this rank."""
        return RemoteError(text, op="elastic.run", rank=self.comm.rank)

    # ---- The training.

    def call(self, func, args, kwargs) -> Any:
        """Call the training until it returns; return its result."""
        self._begin()
        changed, skip_sync = False, False
        while True:
            if changed:
                gc.collect()  # DDP objects of the call before: their hooks on parameters would stay
            try:
                self.process_group.open(self.comm, self._membership, self.seconds)
                if changed:
                    self.state.on_reset()
                if not skip_sync:
                    self.state.sync()
                skip_sync, changed = False, True
                result = func(self.state, *args, **kwargs)
                self.wait_for_all()
                return result
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
                if interrupt.joins:
                    self._recover(interrupt)
                else:
                    self._count_reset(self.resets, interrupt)
            except self.failures as error:
                self._restore()
                self._recover(error)
            except Exception as error:
                if self.process_group.backend is not None and self._is_of_a_death(error):
                    self._restore()
                    self._recover(error)
                else:
                    self._post_error(error)
                    raise
            changed = True

    def _begin(self) -> None:
        self.comm, self.peers = self.open()
        if self.comm.size < self.min_ranks:
            raise InvalidArgument(
                f"{self.least_name}={self.min_ranks}, and the job has {self.comm.size} ranks", op="elastic.run"
            )
        try:
            self._membership = find_membership(self.comm, self.peers, self.gather)
        except InvalidUsage as error:  # the same on all ranks
            self._not_elastic = error

    def _is_of_a_death(self, error: Exception) -> bool:
        """Return whether an error of torch.distributed's own calls follows from a rank's death."""
        if not isinstance(error, RuntimeError) or self._membership is None:
            return False
        return len(self._membership.alive_ranks()) < len(self._membership.processes)

    def _count_reset(self, resets: int, cause: BaseException) -> None:
        if self.reset_limit is not None and resets >= self.reset_limit:
            raise self.make_error(f"the job has gone on {resets} times, its reset_limit: {cause}") from cause
        self.resets = resets + 1

    def _restore(self) -> None:
        try:
            self.state.restore()
        except Exception as error:
            self._post_error(error)
            raise

    def _recover(self, cause: BaseException) -> None:
        """Make a job of the ranks that are left, and of those that have come."""
        if self._membership is None:
            raise self.make_error(f"{cause} (and it can't be gone on: {self._not_elastic})") from cause
        before, joins = self._membership, isinstance(cause, HostsUpdatedInterrupt)
        while True:
            self.abort(cause)
            self.process_group.abort()
            try:
                reports = self._rejoin(Report(None, self.resets, self._count_commits()), self.seconds)
            except NotEnoughRanks as failure:
                raise self.make_error(f"{cause} (and it can't be gone on: {failure})") from cause
            ended = [(rank, report.error) for rank, report in enumerate(reports) if report.error is not None]
            if ended:
                rank, text = ended[0]
                peer = before.processes.index(self._membership.processes[rank])
                failure = self.make_error(f"rank {peer} has ended the job by an error of its own: {text}")
                raise failure from RemoteError(text, op="elastic.run", rank=before.rank, peers=(peer,))
            if not joins:
                self._count_reset(max(report.resets for report in reports), cause)
            try:
                self.activate()
                break
            except CollectivesError as error:  # another rank died
                cause = error
        world.replace_world(self.comm)  # collectives.init() returns it
        dead = [rank for rank, process in enumerate(before.processes) if process not in self._membership.processes]
        new = [rank for rank, process in enumerate(self._membership.processes) if process not in before.processes]
        commits = self._count_commits()
        self._retries = 0 if dead or new or commits > self._commits else self._retries + 1
        self._commits = commits
        if self._retries >= _MAX_RETRIES:
            text = f"{cause} (nobody has died, and this was number {_MAX_RETRIES} with nothing committed between)"
            raise self.make_error(text) from cause
        who = f"{format_ranks(dead)} died" if dead else "nobody died"
        come = f", {format_ranks(new)} joined" if new else ""
        _LOG.warning(
            "%s [rank %d]: %s%s; going on from the last commit with %d ranks, this one as rank %d: %s",
            self.name, before.rank, who, come, self.comm.size, self.comm.rank, cause,
        )  # fmt: skip

    def _count_commits(self) -> int:
        return getattr(self.state, "_commits", 0)

    def _post_error(self, error: Exception) -> None:
        """Post the error by which this rank ends the job to the others."""
        if self._membership is None or len(self._membership.alive_ranks()) == 1:
            return
        text = f"{type(error).__name__}: {error}"
        _LOG.error("%s [rank %d]: the job ends by an error of this rank: %s", self.name, self._membership.rank, text)
        self.abort(error)
        try:
            self._rejoin(Report(text, self.resets), _POST_ERROR_SECONDS)
        except (NotEnoughRanks, CollectivesError) as failure:
            _LOG.error("%s [rank %d]: not all others were notified: %s", self.name, self._membership.rank, failure)

    def _rejoin(self, report: Report, seconds: float) -> list[Report]:
        self.comm, self._membership, reports = self._membership.rejoin(
            self.comm, self.peers, report, min_ranks=self.min_ranks, seconds=seconds
        )
        self.peers = tuple(self.comm.peers or ())
        return reports
