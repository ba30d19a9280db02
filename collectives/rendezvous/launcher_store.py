"""Store of an elastic job, which a launcher serves, and those that may take its place.

A job can have several places, in an order that all its processes have from the start. The first one
is used as long as its server lives. Where that can't be reached any more, each process by itself
goes on with the next one, which knows nothing of what was before. Its key ``moved`` says that a job
uses it; the first place's store is used without.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..comm.waiting import first_line
from ..errors import TransportError

__all__ = ["LauncherStore", "StoreMoved", "connect", "open_store"]

_SECONDS = 60.0  # of the store's own calls, and to connect at the start
_TRY_S = 1.0  # to connect at the start, to one of several places
_PROBE_PAUSE = 0.1
_AGAIN_S = 5.0  # to connect to a place after the connection has ended


class StoreMoved(TransportError):
    """The job's store is another one from now on, in which nothing is written yet."""


class LauncherStore:
    """A connection to the store of an elastic job.

    ``store``: of the place ``places[index]``, each HOST:PORT; with none it can't be connected again.
    ``moves``: how often the place has changed.
    """

    def __init__(self, store: dist.Store, places: Sequence[str] = (), index: int = 0):
        self.places, self.index, self.moves = tuple(places), index, 0
        self._use(store)
        self._identity = _identify(store)

    @property
    def place(self) -> str:
        """HOST:PORT of the present store."""
        return self.places[self.index]

    @property
    def has_moved(self) -> bool:
        """Whether the job has used another store before this one."""
        return self.call("", "check", ["moved"])

    def prefixed(self, prefix: str) -> dist.PrefixStore:
        """Return a part of the present store."""
        if prefix not in self._parts:
            self._parts[prefix] = dist.PrefixStore(prefix, self._store) if prefix else self._store
        return self._parts[prefix]

    def connect_again(self) -> dist.Store:
        """Return another connection to the present store: one has one call at a time, waits included."""
        return open_store(self.place, False)

    def call(self, prefix: str, method: str, *arguments):
        """Call a method of a part of the store; connect again where the connection has ended.

        Raises `StoreMoved` where another place is used from now on, and `TransportError` where no
        place can be reached.
        """
        try:
            return getattr(self.prefixed(prefix), method)(*arguments)
        except RuntimeError as error:
            self._connect_again(error)
        try:
            return getattr(self.prefixed(prefix), method)(*arguments)
        except RuntimeError as error:
            raise _store_gone(error) from error

    def _use(self, store: dist.Store) -> None:
        self._store = store
        self._parts: dict[str, dist.Store] = {}

    def _connect_again(self, cause: RuntimeError) -> None:
        for index in range(self.index, len(self.places)):
            try:
                store = open_store(self.places[index], False, _AGAIN_S)
                identity = _identify(store)
                if index > self.index:
                    store.set("moved", "1")
            except RuntimeError:  # its server is gone, too
                continue
            if index == self.index and identity != self._identity:
                continue  # another job's, at the same address
            moved, self.index, self._identity = index != self.index, index, identity
            self._use(store)
            if moved:
                self.moves += 1
                raise StoreMoved(f"the job's store is now that at {self.place}", op="init") from cause
            return
        raise _store_gone(cause) from cause


def _identify(store: dist.Store) -> bytes:
    """Return what distinguishes a store from a later one at the same address."""
    return store.compare_set("identity", "", secrets.token_hex(8))


def _store_gone(error: BaseException) -> TransportError:
    return TransportError(
        f"the launcher's store of the elastic job is gone ({first_line(error)}): the launcher has ended", op="init"
    )


def open_store(place: str, serves: bool, seconds: float = _SECONDS) -> dist.TCPStore:
    """Open a store at HOST:PORT: serve it (port 0: any), or connect to it.

    Raises `TransportError` where that isn't possible; it waits ``seconds`` for one that is not served
    yet.
    """
    host, _, port = place.rpartition(":")
    if not serves:
        _wait_for_server(host, int(port), seconds)
    try:
        store = dist.TCPStore(
            "localhost" if serves else host, int(port), None, serves, timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        what = "served" if serves else "reached"
        raise TransportError(
            f"the elastic job's store at {place} can't be {what}: {first_line(error)}", op="init"
        ) from error
    store.set_timeout(timedelta(seconds=_SECONDS))
    return store


def _wait_for_server(host: str, port: int, seconds: float) -> None:
    """Wait until a server listens: torch's client would wait for up to twice the time, and print stacks."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            socket.create_connection((host, port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"the elastic job's store at {host}:{port} can't be reached: {error}", op="init"
                ) from error
        time.sleep(min(_PROBE_PAUSE, left))


def connect(places: Sequence[str]) -> LauncherStore:
    """Connect to the store that a job uses. Raises `TransportError` where none is reached in a minute."""
    deadline = time.monotonic() + _SECONDS
    while True:
        failure = None
        for index, place in enumerate(places):
            try:
                store = open_store(place, False, _SECONDS if len(places) == 1 else _TRY_S)
                if index == 0 or store.check(["moved"]):
                    return LauncherStore(store, places, index)
            except RuntimeError as error:
                failure = failure or error
        if time.monotonic() >= deadline:
            raise failure or TransportError(f"the elastic job has no store at {places[0]}", op="init")
        time.sleep(0.1)
