"""Store of a communicator over several nodes: addresses and ids while it opens, then errors."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from ... import errors
from ...errors import CollectivesError, RemoteError
from ..liveness import exit_reason
from ..waiting import RankWait, first_line

__all__ = ["ErrorStore"]

_FETCH_S = 1.0  # how long a rank that only knows of a lost connection waits for the cause from another rank
_POLL_S = 0.002


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
            self.store.set(key, value)
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
                if self.store.check([key]):
                    return self.store.get(key)
            except RuntimeError as error:
                raise self._unreachable_error(error) from error
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
        posted = {"kind": type(error).__name__, "text": text, "peers": list(error.peers), "op": error.op}
        if self._unreachable:
            return
        with contextlib.suppress(RuntimeError):
            if not self.store.check(["failed"]):
                self.store.set("failed", json.dumps(posted))

    def fetch_error(self) -> CollectivesError | None:
        """Return the error that a rank has posted; None if there is none after a second."""
        until = time.monotonic() + _FETCH_S
        try:
            while not self.store.check(["failed"]):
                if time.monotonic() >= until:
                    return None
                time.sleep(0.01)
            posted = json.loads(self.store.get("failed"))
            kind = getattr(errors, posted["kind"]) if posted["kind"] in errors.__all__ else RemoteError
            peers = [int(peer) for peer in posted["peers"]]
            return kind(str(posted["text"]), op=posted["op"], rank=self.rank, peers=peers)
        except (ValueError, KeyError, TypeError):  # not what `post_error` writes
            return None
        except RuntimeError:
            self._unreachable = True
            return None

    def _unreachable_error(self, error: BaseException) -> CollectivesError:
        return RemoteError(
            f"the store by which the ranks of several machines meet is gone ({first_line(error)}): the process that "
            "has served it, rank 0's or the launcher's agent, has ended",
            op="init", rank=self.rank, peers=(0,) if self.rank else (),
        )  # fmt: skip
