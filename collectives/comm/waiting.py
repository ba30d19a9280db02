"""A wait for other ranks, whatever for: it ends in time, notices ranks that have ended, and says who is missing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..errors import CollectivesError, CollectiveTimeout, RemoteError

__all__ = ["SAY_AFTER_S", "Wait", "call_with_limit", "first_line", "name_ranks", "said"]

SAY_AFTER_S = 5.0  # after it, and then each time that a wait has become twice as long, a line goes to the log
_LOOK_S = 0.2  # how often ranks that are missing are looked for; seldomer where that takes long
_MOST_LOOKED_AT = 256  # ranks at once

_GIVE_UP_S = 2.0  # how long an interrupted call_with_limit waits for its thread to give up

_log = logging.getLogger("collectives")
T = TypeVar("T")


def name_ranks(ranks: Iterable[int]) -> str:
    """Write "rank 3" or "ranks 0, 1, 2"; after 16 only how many more."""
    ranks = sorted(ranks)
    text = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class Wait:
    """One wait of rank `rank` of `size` for others, in a loop of the caller's, which calls `look` in each round.

    `purpose`: what the others are to do, "to open ..."; `seconds`: the limit, for messages, and `deadline`: its end
    on ``time.monotonic``'s clock, None: `seconds` from now; `fate`: gives how a rank has ended, "" while it lives.
    """

    def __init__(
        self, purpose: str, rank: int, size: int, seconds: float, *, deadline: float | None = None,
        fate: Callable[[int], str] | None = None, op: str | None = None,
    ):  # fmt: skip
        self.purpose = purpose
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.op = op
        self._fate = fate
        self._began = time.monotonic()
        self.deadline = self._began + seconds if deadline is None else deadline
        self._say_at = self._began + SAY_AFTER_S
        self._look_at = self._began

    def look(self, missing: Callable[[], list[int]]) -> None:
        """Raise `CollectiveTimeout` past the limit and `RemoteError` where one of the missing ranks has ended.

        `missing`: gives them; it is called now and then. Where it gives none, nothing happens.
        """
        now = time.monotonic()
        if now < min(self._look_at, self.deadline, self._say_at):
            return
        ranks = missing()
        if not ranks:
            return
        if self._fate is not None:
            ended = {rank: how for rank in ranks[:_MOST_LOOKED_AT] if (how := self._fate(rank))}
            if ended:
                how = "; ".join(f"rank {rank}: {text}" for rank, text in list(ended.items())[:8])
                raise RemoteError(
                    f"{name_ranks(ended)} will not come {self.purpose}: {how}",
                    op=self.op, rank=self.rank, peers=sorted(ended),
                )  # fmt: skip
        if now >= self.deadline:
            raise CollectiveTimeout(
                f"{name_ranks(ranks)} of {self.size} did not come within {self.seconds:g} s {self.purpose}",
                op=self.op, rank=self.rank, peers=ranks,
            )  # fmt: skip
        if now >= self._say_at:
            _say(self.rank, now - self._began, ranks, self.purpose, self.deadline - now)
            self._say_at = now + max(SAY_AFTER_S, now - self._began)
        self._look_at = now + max(_LOOK_S, 20 * (time.monotonic() - now))


@contextlib.contextmanager
def said(
    purpose: str, rank: int, seconds: float | None, missing: Callable[[], Iterable[int]] | None = None
) -> Iterator[None]:
    """Say on the log that the block waits, where it does: for a wait inside of a library, which has a limit of its own.

    `seconds`: that limit, None for none; `missing`: gives the ranks that have not come, None where nobody here knows.
    """
    done = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        pause = SAY_AFTER_S
        while not done.wait(pause):
            waited = time.monotonic() - began
            try:
                ranks = list(missing()) if missing is not None else []
            except CollectivesError:  # closed meanwhile: nobody knows any more
                ranks = []
            if not done.is_set():
                _say(rank, waited, ranks, purpose, None if seconds is None else seconds - waited)
            pause = max(SAY_AFTER_S, waited)

    threading.Thread(target=watch, name="collectives-wait", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _say(rank: int, waited: float, ranks: list[int], purpose: str, left: float | None) -> None:
    whom = name_ranks(ranks) if ranks else "other ranks"
    limit = "with no limit" if left is None else f"for at most {max(0.0, left):.0f} s more"
    _log.warning("rank %d has waited %.0f s for %s %s; it goes on %s", rank, waited, whom, purpose, limit)


def call_with_limit(function: Callable[[threading.Event], T], until: float, late: Callable[[], CollectivesError]) -> T:
    """Run a function that may wait inside torch, so that its time limit and Ctrl-C hold in any case.

    ``until``: on ``time.monotonic``'s clock, in seconds; past it, what ``late`` gives is raised. The function runs in a
    thread and gets an event that says "give up"; a thread that doesn't come back is left behind, as a daemon.
    """
    stop, ended = threading.Event(), threading.Event()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def target():
        try:
            outcome.append((function(stop), None))
        except BaseException as error:  # raised below, in the caller's thread
            outcome.append((None, error))
        ended.set()  # an event: a join that a signal interrupts takes the thread for ended from then on (Python 3.11)

    threading.Thread(target=target, name="collectives-limited-call", daemon=True).start()
    try:
        ended.wait(max(0.0, until - time.monotonic()))
    except BaseException:  # Ctrl-C: the interpreter may end next, and a thread inside torch would abort that
        stop.set()
        ended.wait(_GIVE_UP_S)
        raise
    finally:
        stop.set()
    if not outcome:
        raise late()
    result, error = outcome.pop()
    if error is not None:
        raise error
    return result


def first_line(error: BaseException) -> str:
    """Give an error's first line: torch's go on with a C++ stack."""
    return str(error).partition("\n")[0] or type(error).__name__
