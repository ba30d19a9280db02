"""Elastic `run` with Horovod's arguments, variables and errors."""

from __future__ import annotations

import functools
import os

from ...comm.agree import all_gather_object
from ...elastic import ElasticTraining
from ...errors import Aborted, CollectiveTimeout, InvalidArgument, RemoteError
from ..basics import World, activate, current
from ..exceptions import HorovodInternalError
from ..functions import NegotiatedComm
from ..operations import barrier
from ..process_sets import global_process_set

__all__ = ["run"]

_TIMEOUT = 600.0  # seconds for the ranks that are alive to connect; HOROVOD_ELASTIC_TIMEOUT replaces it


def run(func=None, *, reset_limit: int | None = None, min_np: int | None = None):
    """Make a training ``func(state, ...)`` elastic; a decorator.

    Each call syncs the state from rank 0 and calls ``func``. When ranks die, an operation of the
    others raises `HorovodInternalError`. The other ranks then restore the state of the last commit,
    become ranks 0 to n - 1 of a smaller job in their old order, call `State.on_reset`, sync, and
    call ``func`` again. Under ``python -m collectives.run --elastic`` ranks that were started again
    join at the next commit. It returns on all ranks together: a rank that is done waits for the
    others. Process sets other than the global one end with the old job.

    Any other exception ends the job: the rank that has it raises it, and the others raise
    `HorovodInternalError` that names it. The job also ends with too few ranks, after too many
    recoveries, and at the third failure in a row in which no rank has died and nothing was
    committed. Ranks that are alive are waited for HOROVOD_ELASTIC_TIMEOUT seconds (600).

    Without that launcher it works for the ranks of one node on the host engine, under a launcher
    that doesn't end the surviving ranks, and no rank joins later. With other engines, or several
    nodes, the first failure is then raised as it is.

    Args:
        func: The training. None: the call returns the decorator.
        reset_limit: The largest number of recoveries. None: HOROVOD_ELASTIC_RESET_LIMIT, else no
            limit.
        min_np: The least number of ranks. None: HOROVOD_ELASTIC_MIN_NP, else 1.
    """
    _check_count(reset_limit, "reset_limit", 0)
    _check_count(min_np, "min_np", 1)
    if func is None:
        return functools.partial(run, reset_limit=reset_limit, min_np=min_np)

    @functools.wraps(func)
    def training(state, *args, **kwargs):
        limit = _read_variable("HOROVOD_ELASTIC_RESET_LIMIT", 0) if reset_limit is None else reset_limit
        least = min_np or _read_variable("HOROVOD_ELASTIC_MIN_NP", 1) or 1
        seconds = float(_read_variable("HOROVOD_ELASTIC_TIMEOUT", 1) or _TIMEOUT)
        return HorovodTraining(state, limit, least, seconds).call(func, args, kwargs)

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


class HorovodTraining(ElasticTraining):
    """A running elastic training of Horovod's current world."""

    failures = (HorovodInternalError, RemoteError, Aborted, CollectiveTimeout)
    name = "hvd"
    least_name = "min_np"

    def open(self):
        self._world = current()
        return self._world.comm, tuple(self._world.peers)

    def activate(self) -> None:
        self._world = World(self.comm, list(self.comm.peers), owns=True, settings=self._world.settings)
        activate(self._world)

    def abort(self, cause: BaseException) -> None:
        self._world.abort(cause)
        self.comm.abort()

    def gather(self, value: list) -> list:
        return all_gather_object(NegotiatedComm(global_process_set), value)

    def wait_for_all(self) -> None:
        barrier()

    def make_error(self, text: str) -> Exception:
        return HorovodInternalError(text)
