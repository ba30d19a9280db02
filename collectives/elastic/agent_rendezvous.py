"""Rendezvous of torchrun's agents by the store of an elastic job's rounds.

Unlike torch's own it only brings the agents together: their workers agree on ranks in rounds
(`rendezvous.rounds`). So an agent that comes or ends later doesn't change what the others have.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..comm.multinode.topology import find_route, is_loopback
from ..errors import InvalidArgument, TransportError
from ..rendezvous.launcher_store import LauncherStore, connect, open_store
from ..rendezvous.rounds import RANKS_VARIABLE, STORE_VARIABLE, Rounds
from .agents import Agents

__all__ = ["BACKEND", "AgentRendezvous"]

BACKEND = "collectives"
_DEFAULT_PORT = 29400  # of torch's c10d backend
_JOIN_SECONDS, _ALIVE_SECONDS, _ALIVE_ATTEMPTS = 600, 1, 10
_POLL_S = 0.05
_TRY_S = 1.0  # to connect to a store that may not be served


class AgentRendezvous(RendezvousHandler):
    """torchrun's handler for ``--rdzv-backend collectives``.

    ``params``: torchrun's. Of ``--rdzv-conf`` it takes ``is_host``, ``join_timeout``,
    ``keep_alive_interval`` and ``keep_alive_max_attempt`` with the meaning that they have for c10d;
    ``min_ranks``, and ``standby``: places of stores that take the first one's place, HOST:PORT, with
    "/" between several. ``ranks``, workers of this node, is set by the agent.
    """

    def __init__(self, params: RendezvousParameters):
        self._params = params
        self.least_nodes, self._most_nodes = params.min_nodes, params.max_nodes
        first = params.endpoint or ("localhost:0" if params.max_nodes == 1 else "")
        standby = filter(None, (params.get("standby") or "").split("/"))
        places = [parse_rendezvous_endpoint(each, _DEFAULT_PORT) for each in (first, *standby)]
        self._places = [f"{host}:{port}" for host, port in places]
        self._served: dict[str, object] = {}  # stores that this process serves, by their places
        self._join_seconds = self._read("join_timeout", _JOIN_SECONDS)
        interval = self._read("keep_alive_interval", _ALIVE_SECONDS)
        self.alive = interval, interval * self._read("keep_alive_max_attempt", _ALIVE_ATTEMPTS)
        self.ranks = 1
        self.late = False
        self.rounds: Rounds | None = None
        self.agents: Agents | None = None
        self.store: LauncherStore | None = None

    @property
    def serves(self) -> bool:
        """Whether this process serves the store that the job uses."""
        return self.store.place in self._served

    def _read(self, name: str, default: int) -> int:
        value = self._params.get_as_int(name, default)
        if value < 1:
            raise InvalidArgument(f"--rdzv-conf {name}={value}: it has to be from 1 up")
        return value

    # ---- What torch's agent calls.

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._params.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Enter the job: wait until there are enough agents, or at once where it runs already.

        Sets the variables by which the workers, which inherit this process's environment, find the
        job. Raises torch's errors of a rendezvous, and `InvalidArgument` where this agent's options
        don't fit those of the first one.
        """
        try:
            if self.agents is None:
                self._open()
            number = self._enter()
        except TransportError as error:
            raise RendezvousConnectionError(str(error)) from error
        os.environ[RANKS_VARIABLE] = f"{self.rounds.start}:{self.rounds.least}:{self.rounds.most}"
        host, port = self._set_places()
        size = max(number + 1, self.least_nodes)
        return RendezvousInfo(self.store.prefixed("agents"), number, size, RendezvousStoreInfo(host, int(port)))

    def renew(self, workers: Sequence[str]) -> None:
        """Enter the store to which the job's has moved. ``workers``: those that run."""
        self.agents.renew(workers)
        self._set_places()

    def _set_places(self) -> tuple[str, str]:
        """Set the variable by which workers that are started find the store; return its host and port."""
        os.environ[STORE_VARIABLE] = ",".join(self.store.places[self.store.index :])
        host, _, port = self.store.place.rpartition(":")
        return host, port

    def is_closed(self) -> bool:
        return self.rounds is not None and self.rounds.has_ended()

    def set_closed(self) -> None:
        if self.rounds is not None:
            self.rounds.end()

    def num_nodes_waiting(self) -> int:
        return 0  # workers join without a new rendezvous of the agents

    def shutdown(self) -> bool:
        return True  # the store ends with this process

    # ---- Entering.

    def _open(self) -> None:
        start = self.least_nodes * self.ranks
        least = self._read("min_ranks", start)
        if least > start:
            raise InvalidArgument(f"--rdzv-conf min_ranks={least}: {start} ranks start")
        self.store = self._open_store()
        self.rounds = Rounds(self.store, start, least, self._most_nodes * self.ranks)
        agents = Agents(self.store, self.rounds, self._most_nodes, self.ranks, *self.alive)
        agents.agree({
            "--rdzv-id": self.get_run_id(), "--nnodes": f"{self.least_nodes}:{self._most_nodes}",
            "--nproc-per-node": self.ranks, "min_ranks": least,
        })  # fmt: skip
        self.agents = agents

    def _open_store(self) -> LauncherStore:
        """Serve the job's stores whose places are on this node, and return the one that is used."""
        places = self._places
        for place in places[1:]:
            self._serve(place, asked=None)
        if len(places) > 1:  # a job that runs already may have left the first one
            for index, place in enumerate(places[1:], 1):
                with contextlib.suppress(TransportError):
                    store = LauncherStore(open_store(place, False, _TRY_S), places, index)
                    if store.has_moved:
                        return store
        if (port := self._serve(places[0], self._params.get_as_bool("is_host"))) is not None:
            places[0] = f"{places[0].rpartition(':')[0]}:{port}"
        return connect(places)

    def _serve(self, place: str, asked: bool | None) -> int | None:
        """Serve a store where this is its node and no other process does; return its port, else None."""
        if asked is None:
            own, there = find_route(place.rpartition(":")[0])
            if not there or (own != there and not is_loopback(there)):
                return None
        elif not asked:
            return None
        try:
            store = open_store(place, True)
        except TransportError:
            if asked:
                raise
            return None  # another agent of this machine serves it
        self._served[f"{place.rpartition(':')[0]}:{store.port}"] = store
        return store.port

    def _enter(self) -> int:
        agents, rounds = self.agents, self.rounds
        deadline = time.monotonic() + self._join_seconds
        self.late = rounds.has_begun()
        while True:
            if rounds.has_ended():
                # No error of torch's, whose traceback torchrun would print.
                sys.exit(f"torchrun: the elastic job at {self.store.place} has ended: nobody can join it")
            if agents.number is None:
                agents.enter()
            agents.keep_alive()
            if agents.number is not None and (rounds.has_begun() or 1 + len(agents.others()) >= self.least_nodes):
                return agents.number
            if time.monotonic() >= deadline:
                there, entered = len(agents.others()), agents.number is not None
                agents.leave()
                text = f"{there + 1} of at least {self.least_nodes} agents have" if entered else f"{there} others have"
                raise RendezvousTimeoutError(
                    f"{text} come to the elastic job at {self.store.place} after {self._join_seconds} s"
                    + ("" if entered else f", which are all that --nnodes {self.least_nodes}:{self._most_nodes} allows")
                )
            time.sleep(_POLL_S)
