"""Store of a communicator over several nodes: addresses and ids while it opens, then errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ... import errors
from ...errors import CollectivesError, RemoteError, TransportError
from ...json_records import parse_json, parse_numbers, parse_text
from ...secret import seal, unseal
from ..liveness import exit_reason
from ..waiting import RankWait, call_with_timeout, first_line, raise_ended

__all__ = ["ErrorStore", "ParentFailed", "StoreGone"]

_FETCH_S = 1.0  # how long a rank that only knows of a lost connection waits for the cause from another rank
_FOLLOW_S = 2.0  # by which the ranks of a chain of waits run out of time one after the other
_POLL_S = 0.002
_ANSWER_S = 1.5  # in which a store that lives answers, as a rule
_OPENING_ANSWER_S = 30.0  # while ranks connect, where it may answer late: torch's pauses for 5 or 10 s now and then
_NOTICE_S = 0.05  # in which a lost connection is noticed
_CHECK_S = 0.2  # between looks for the cause of a wait

_PURPOSE = "to connect the machines"

T = TypeVar("T")


def _purpose(key: str) -> str:
    return f"nodes/{key}"


class _NoAnswer(TransportError):
    """The store doesn't answer: its process is stopped, or a network drops what is sent."""


class StoreGone(RemoteError):
    """The store is gone; the error is about no rank of the communicator that is being opened."""


class ParentFailed(RemoteError):
    """The communicator from which this one is split has failed on another rank; ``posted``: its error, in the
    parent's numbers.
    """

    def __init__(self, posted: CollectivesError):
        super().__init__(posted.message, op=posted.op, rank=posted.rank, peers=posted.peers)
        self.posted = posted


class ErrorStore:
    """A torch store that lives as long as the communicator, with the first error that a rank posts.

    ``host``: name or address of the store as this rank reaches it, "" where that isn't known;
    ``processes``: the ranks' processes, as `liveness.this_process` names them; ``parent``: the store of
    the communicator that is split, while this one opens, with ``parent_ranks``, the ranks' numbers in it.
    """

    def __init__(
        self, store: dist.Store, host: str, rank: int, processes: Sequence[str] = (), parent: ErrorStore | None = None,
        parent_ranks: Sequence[int] = (), watch: Callable[[ErrorStore], None] | None = None,
    ):  # fmt: skip
        self.store = store
        self.processes = processes
        self.host = host
        self.rank = rank
        self.parent, self._parent_ranks, self._watch = parent, parent_ranks, watch
        self._checked_at = 0.0
        self._unreachable = False  # the process that served it has ended: torch prints a stack for each further try

    def with_prefix(self, prefix: str, rank: int, processes: Sequence[str]) -> ErrorStore:
        """Return a part of this store for a communicator in which this process is ``rank``.

        ``processes``: those of its ranks.
        """
        store = dist.PrefixStore(prefix, self.store)
        return ErrorStore(store, self.host, rank, processes, self.parent, self._parent_ranks, self._watch)

    def forget_parent(self) -> None:
        """Look at the parent no more: the communicator is open."""
        self.parent = self._watch = None

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value. Raises `RemoteError` where the store can't be reached."""
        try:
            data = value.encode() if isinstance(value, str) else value
            self._call(lambda: self.store.set(key, seal(data, _purpose(key))), _OPENING_ANSWER_S)
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
            _PURPOSE, self.rank, size, seconds, deadline=deadline, exit_reason=self._exit_reason, op="init",
        )  # fmt: skip
        pause = _POLL_S
        while True:
            try:
                left = max(_ANSWER_S, min(_OPENING_ANSWER_S, deadline - time.monotonic()))
                found = self._call(lambda: self.store.get(key) if self.store.check([key]) else None, left)
            except RuntimeError as error:
                raise self._unreachable_error(error) from error
            if found is not None:
                return unseal(found, _purpose(key))
            self.check_ranks()
            wait.check(lambda: [peer])
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def find_missing(self, keys: Sequence[str]) -> list[int]:
        """Return the places of the keys that nobody has set; of all keys where the store can't be reached."""
        try:
            return self._call(lambda: [at for at, key in enumerate(keys) if not self.store.check([key])])
        except RuntimeError:
            return list(range(len(keys)))

    def check_ranks(self) -> None:
        """Raise why the communicator can't be opened: the cause that a rank has posted, or `RemoteError`
        where the process of any rank has ended that this one can know of, or the store is gone.
        Cheap: looks now and then.
        """
        now = time.monotonic()
        if now < self._checked_at + _CHECK_S:
            return
        self._checked_at = now
        if (posted := self.fetch_error(seconds=0.0)) is not None:
            raise posted
        if self.parent is not None and (posted := self.parent.fetch_error(seconds=0.0)) is not None:
            raise ParentFailed(posted)
        if self._unreachable:
            raise self._unreachable_error(ConnectionError("its connection was lost"))
        raise_ended(range(len(self.processes)), self._exit_reason, _PURPOSE, op="init", rank=self.rank)
        if self._watch is not None:
            self._watch(self)

    def find_cause(self, error: CollectivesError) -> CollectivesError:
        """Return why ranks can't connect, where this one only knows that it can't: ``error``."""
        try:
            if self._watch is not None:
                time.sleep(_NOTICE_S)
                self._watch(self)
        except CollectivesError as found:
            return found
        return self.fetch_error(2 * _FETCH_S) or error

    def have_ended(self, peers: Sequence[int]) -> bool:
        """Return whether the processes of some ranks are known to have ended: all of them, on this machine."""
        return bool(peers) and all(map(self._exit_reason, peers))

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

    def fetch_error(self, seconds: float = _FETCH_S, peers: Sequence[int] = ()) -> CollectivesError | None:
        """Return the error that a rank has posted; None if there is none after some seconds.

        ``peers``: ranks that may look for the cause now, in `follow_waits`; they are waited for.
        """
        if self._unreachable:
            return None
        began = time.monotonic()

        def fetch():
            while not self.store.check(["failed"]):
                spent = time.monotonic() - began
                follows = any(self.store.check([f"waits/{peer}"]) for peer in peers)
                if spent >= seconds + (_FOLLOW_S if follows else 0.0):
                    return None
                time.sleep(0.01)
            return self.store.get("failed")

        try:
            self._call(lambda: self.store.check(["failed"]))  # whether it answers at all
            found = self._call(fetch, _ANSWER_S + seconds + _FOLLOW_S)
            if found is None:
                return None
            posted = parse_json(unseal(found, _purpose("failed")))
            kind, op, peers = posted["kind"], posted["op"], parse_numbers(posted["peers"])
            kind = getattr(errors, kind) if kind in errors.__all__ else RemoteError
            return kind(parse_text(posted["text"]), op=op and parse_text(op), rank=self.rank, peers=peers)
        except _NoAnswer:
            self._unreachable = seconds > 0.0  # else a look while ranks connect, which comes again
            return None
        except (ValueError, KeyError, TypeError, TransportError):  # not what `post_error` writes
            return None
        except RuntimeError:
            self._unreachable = True
            return None

    def follow_waits(self, peers: Sequence[int]) -> list[int]:
        """Return the ranks at the end of the chain of waits that begins with this rank's for ``peers``.

        Ranks that wait in a chain run out of time together. Each posts its ``peers``, and follows the
        others' for at most 2 s, or until the cause of a failure is posted, or one of them waits in an
        operation of the parent. Returns ``peers`` where the chain is a circle, or the store can't be
        reached.
        """
        if self._unreachable:
            return list(peers)
        seen, ends = {self.rank}, set(peers)

        def post():
            key = f"waits/{self.rank}"
            self.store.set(key, seal(json.dumps(list(peers)).encode(), _purpose(key)))
            self.store.check([key])  # `set` does not wait for the server

        def follow():
            until = time.monotonic() + _FOLLOW_S
            while not ends <= seen and time.monotonic() < until and not self.store.check(["failed"]):
                if self._waits_in_parent(ends - seen):
                    return
                for peer in sorted(ends - seen):
                    key = f"waits/{peer}"
                    if self.store.check([key]):
                        seen.add(peer)
                        ends.update(parse_numbers(parse_json(unseal(self.store.get(key), _purpose(key)))))
                time.sleep(0.01)

        try:
            self._call(post)
            self._call(follow, _ANSWER_S + _FOLLOW_S)
        except _NoAnswer:
            self._unreachable = True
        except (ValueError, TransportError):  # what was posted is no such list
            return list(peers)
        except RuntimeError:
            self._unreachable = True
        return sorted(ends - seen) or list(peers)

    def waits_in_parent(self, ranks: Iterable[int]) -> bool:
        """Return whether any of some ranks has not come since it waits in an operation of the parent."""
        try:
            return self._call(lambda: self._waits_in_parent(ranks))
        except RuntimeError:
            return False

    def _waits_in_parent(self, ranks: Iterable[int]) -> bool:
        parent = self.parent
        known = [self._parent_ranks[each] for each in ranks if each < len(self._parent_ranks)]
        return parent is not None and any(parent.store.check([f"waits/{each}"]) for each in known)

    def _call(self, function: Callable[[], T], seconds: float = _ANSWER_S) -> T:
        """Call the store, in a thread: a server that is stopped answers nothing, and torch waits for it
        for minutes. Raises ``RuntimeError`` past the limit as where the server has ended.
        """
        return call_with_timeout(
            lambda _: function(), time.monotonic() + seconds, lambda: _NoAnswer("it does not answer")
        )

    def _unreachable_error(self, error: BaseException) -> CollectivesError:
        """Return the error of a store that is gone; its server is rank 0 of the whole job."""
        self._unreachable = True
        return StoreGone(
            f"the store by which the ranks of several machines connect is gone ({first_line(error)}): the process that "
            "has served it, the job's first rank or the launcher's agent, has ended or does not answer",
            op="init", rank=self.rank,
        )  # fmt: skip
