"""Store of a communicator over several nodes: addresses and ids while it opens, then errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ... import errors
from ...errors import CollectivesError, RemoteError, TransportError
from ...json_records import parse_json, parse_numbers, parse_text
from ...secret import seal, unseal
from ..liveness import exit_reason
from ..waiting import RankWait, call_with_timeout, first_line

__all__ = ["ErrorStore", "StoreGone"]

_FETCH_S = 1.0  # how long a rank that only knows of a lost connection waits for the cause from another rank
_POLL_S = 0.002
_ANSWER_S = 3.0  # in which a store that lives answers

T = TypeVar("T")


def _purpose(key: str) -> str:
    return f"nodes/{key}"


class StoreGone(RemoteError):
    """The store is gone; the error is about no rank of the communicator that is being opened."""


class ErrorStore:
    """A torch store that lives as long as the communicator, with the first error that a rank posts.

    ``host``: name or address of the store as this rank reaches it, "" where that isn't known;
    ``processes``: the ranks' processes, as `liveness.this_process` names them.
    """

    def __init__(self, store: dist.Store, host: str, rank: int, processes: Sequence[str] = ()):
        self.store = store
        self.processes = processes
        self.host = host
        self.rank = rank
        self._unreachable = False  # the process that served it has ended: torch prints a stack for each further try

    def with_prefix(self, prefix: str, rank: int, processes: Sequence[str]) -> ErrorStore:
        """Return a part of this store for a communicator in which this process is ``rank``.

        ``processes``: those of its ranks.
        """
        return ErrorStore(dist.PrefixStore(prefix, self.store), self.host, rank, processes)

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value. Raises `RemoteError` where the store can't be reached."""
        try:
            data = value.encode() if isinstance(value, str) else value
            self._call(lambda: self.store.set(key, seal(data, _purpose(key))))
        except RuntimeError as error:
            raise self._unreachable_error(error) from error

    def get(self, key: str, deadline: float, peer: int) -> bytes:
        """Block until ``peer`` has set a value and return it.

        ``deadline``: on ``time.monotonic``'s clock. Raises `CollectiveTimeout` past it, and
        `RemoteError` if the peer has ended or the store can't be reached.
        """
        seconds = max(0.0, deadline - time.monotonic())
        size = max(2, len(self.processes))
        wait = RankWait(
            "to connect the machines", self.rank, size, seconds, deadline=deadline, exit_reason=self._exit_reason,
            op="init",
        )  # fmt: skip
        pause = _POLL_S
        while True:
            try:
                found = self._call(lambda: self.store.get(key) if self.store.check([key]) else None)
            except RuntimeError as error:
                raise self._unreachable_error(error) from error
            if found is not None:
                return unseal(found, _purpose(key))
            wait.check(lambda: [peer])
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _exit_reason(self, peer: int) -> str:
        return exit_reason(self.processes[peer]) if peer < len(self.processes) else ""

    def post_error(self, error: CollectivesError) -> None:
        """Post the cause of a failure to all ranks, unless a rank has posted one before.

        Does nothing where the store can't be reached.
        """
        text = error.message[:8000].replace(" (this rank)", "")
        posted = {"kind": type(error).__name__, "text": text, "peers": list(error.peers) or [self.rank], "op": error.op}
        if self._unreachable:
            return

        def post():
            if not self.store.check(["failed"]):
                self.store.set("failed", seal(json.dumps(posted).encode(), _purpose("failed")))

        try:
            self._call(post)
        except RuntimeError:
            self._unreachable = True

    def fetch_error(self) -> CollectivesError | None:
        """Return the error that a rank has posted; None if there is none after a second."""
        if self._unreachable:
            return None
        until = time.monotonic() + _FETCH_S

        def fetch():
            while not self.store.check(["failed"]):
                if time.monotonic() >= until:
                    return None
                time.sleep(0.01)
            return self.store.get("failed")

        try:
            found = self._call(fetch)
            if found is None:
                return None
            posted = parse_json(unseal(found, _purpose("failed")))
            kind, op, peers = posted["kind"], posted["op"], parse_numbers(posted["peers"])
            kind = getattr(errors, kind) if kind in errors.__all__ else RemoteError
            return kind(parse_text(posted["text"]), op=op and parse_text(op), rank=self.rank, peers=peers)
        except (ValueError, KeyError, TypeError, TransportError):  # not what `post_error` writes
            return None
        except RuntimeError:
            self._unreachable = True
            return None

    def _call(self, function: Callable[[], T]) -> T:
        """Call the store, in a thread: a server that is stopped answers nothing, and torch waits for it
        for minutes. Raises ``RuntimeError`` past `_ANSWER_S` as where the server has ended.
        """
        return call_with_timeout(
            lambda _: function(), time.monotonic() + _ANSWER_S, lambda: TransportError("it does not answer")
        )

    def _unreachable_error(self, error: BaseException) -> CollectivesError:
        """Return the error of a store that is gone; its server is rank 0 of the whole job."""
        self._unreachable = True
        return StoreGone(
            f"the store by which the ranks of several machines connect is gone ({first_line(error)}): the process that "
            "has served it, the job's first rank or the launcher's agent, has ended or does not answer",
            op="init", rank=self.rank,
        )  # fmt: skip
