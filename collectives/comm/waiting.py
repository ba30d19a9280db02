"""Waits for other ranks: time limits, errors for ended ranks, and log lines that name them."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..errors import CollectivesError, CollectiveTimeout, RemoteError
from .error_ranks import renumber

__all__ = [
    "LOG_AFTER_S", "RankWait", "call_with_timeout", "first_line", "format_ranks", "log_while_waiting", "raise_ended",
]  # fmt: skip

LOG_AFTER_S = 5.0  # a wait is logged after it, and again each time that the wait has become twice as long
_CHECK_S = 0.2  # interval of the checks for missing ranks; longer where a check takes long
_MAX_RANKS_CHECKED = 256  # at once

_STOP_S = 2.0  # how long an interrupted call_with_timeout waits for its thread to stop

_log = logging.getLogger("collectives")
T = TypeVar("T")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2"; of more than 16 ranks the number of the others only."""
    ranks = sorted(ranks)
    text = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def raise_ended(
    ranks: Iterable[int], exit_reason: Callable[[int], str], purpose: str, *, op: str | None, rank: int
) -> None:
    """Raise `RemoteError` where any of the ranks has ended; the arguments are those of `RankWait`."""
    ended = {peer: how for peer in ranks if (how := exit_reason(peer))}
    if ended:
        how = "; ".join(f"rank {peer}: {text}" for peer, text in list(ended.items())[:8])
        raise RemoteError(
            f"{format_ranks(ended)} will not come {purpose}: {how}", op=op, rank=rank, peers=sorted(ended)
        )


class RankWait:
    """One wait of rank `rank` of `size` for others. The caller polls, and calls `check` each time.

    `purpose`: what the others are waited for, "to open ..."; `seconds`: the limit, for messages;
    `deadline`: its end on ``time.monotonic``'s clock, None: `seconds` from now; `exit_reason`: a
    function that returns how a rank has ended, "" while it lives; `op`: the operation's name, for
    errors; `logged_ranks`: by which numbers the log names the ranks, and those in `purpose`, None: by
    their own.
    """

    def __init__(
        self, purpose: str, rank: int, size: int, seconds: float, *, deadline: float | None = None,
        exit_reason: Callable[[int], str] | None = None, op: str | None = None,
        logged_ranks: Sequence[int] | None = None,
    ):  # fmt: skip
        self.purpose = purpose
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.op = op
        self._exit_reason, self._logged_ranks = exit_reason, logged_ranks
        self._began = time.monotonic()
        self.deadline = self._began + seconds if deadline is None else deadline
        self._log_at = self._began + LOG_AFTER_S
        self._check_at = self._began

    def check(self, find_missing: Callable[[], list[int]]) -> None:
        """Raise `CollectiveTimeout` past the limit, `RemoteError` if a missing rank has ended.

        `find_missing`: returns the missing ranks; it is called now and then. Where it returns none,
        nothing happens.
        """
        now = time.monotonic()
        if now < min(self._check_at, self.deadline, self._log_at):
            return
        ranks = find_missing()
        if not ranks:
            return
        if self._exit_reason is not None:
            raise_ended(ranks[:_MAX_RANKS_CHECKED], self._exit_reason, self.purpose, op=self.op, rank=self.rank)
        if now >= self.deadline:
            raise CollectiveTimeout(
                f"{format_ranks(ranks)} of {self.size} did not come within {self.seconds:g} s {self.purpose}",
                op=self.op, rank=self.rank, peers=ranks,
            )  # fmt: skip
        if now >= self._log_at:
            until = self._began + self.seconds if self.deadline == math.inf else self.deadline
            _log_wait(self.rank, now - self._began, ranks, self.purpose, until - now, self._logged_ranks)
            self._log_at = now + max(LOG_AFTER_S, now - self._began)
        self._check_at = now + max(_CHECK_S, 20 * (time.monotonic() - now))


@contextlib.contextmanager
def log_while_waiting(
    purpose: str, rank: int, seconds: float | None, find_missing: Callable[[], Iterable[int]] | None = None
) -> Iterator[None]:
    """Log, now and then, that the ``with`` block still waits inside of a library.

    `seconds`: the library's time limit, None for none; `find_missing`: returns the missing ranks,
    None where this rank can't know.
    """
    done = threading.Event()
    began = time.monotonic()

    def log_periodically() -> None:
        pause = LOG_AFTER_S
        while not done.wait(pause):
            waited = time.monotonic() - began
            try:
                ranks = list(find_missing()) if find_missing is not None else []
            except CollectivesError:  # the communicator was closed meanwhile
                ranks = []
            if not done.is_set():
                _log_wait(rank, waited, ranks, purpose, None if seconds is None else seconds - waited)
            pause = max(LOG_AFTER_S, waited)

    threading.Thread(target=log_periodically, name="collectives-wait", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _log_wait(
    rank: int, waited: float, ranks: list[int], purpose: str, remaining: float | None,
    logged_ranks: Sequence[int] | None = None,
) -> None:  # fmt: skip
    whom = format_ranks(ranks) if ranks else "other ranks"
    limit = "with no limit" if remaining is None else f"for at most {max(0.0, remaining):.0f} s more"
    text = f"rank {rank} has waited {waited:.0f} s for {whom} {purpose}; it goes on {limit}"
    _log.warning("%s", text if logged_ranks is None else renumber(text, logged_ranks))


def call_with_timeout(
    function: Callable[[threading.Event], T], deadline: float, timeout_error: Callable[[], CollectivesError],
    check: Callable[[], None] | None = None,
) -> T:  # fmt: skip
    """Call a function that may block inside torch, with a time limit; Ctrl-C ends the call.

    ``deadline``: on ``time.monotonic``'s clock, in seconds; past it, the error that
    ``timeout_error`` returns is raised. ``check``: called now and then meanwhile; what it raises
    ends the call. The function runs in a thread and gets an event that asks
    it to stop; a thread that doesn't return keeps running as a daemon.
    """
    stop, ended = threading.Event(), threading.Event()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def target():
        try:
            outcome.append((function(stop), None))
        except BaseException as error:  # raised below, in the caller's thread
            outcome.append((None, error))
        ended.set()  # no join: after a signal has interrupted one, it takes the thread for ended (Python 3.11)

    thread = threading.Thread(target=target, name="collectives-limited-call", daemon=True)
    thread.start()
    try:
        while check is not None and not ended.wait(min(_CHECK_S, max(0.0, deadline - time.monotonic()))):
            check()
            if time.monotonic() >= deadline:
                break
        ended.wait(max(0.0, deadline - time.monotonic()))
    except CollectivesError:  # of `check`
        raise
    except BaseException:  # Ctrl-C: the interpreter may end next, and a thread inside torch would abort that
        stop.set()
        ended.wait(_STOP_S)
        raise
    finally:
        stop.set()
    if not outcome:
        raise timeout_error()
    thread.join(_STOP_S)  # it has nothing left to do, and a program that counts its threads must not find it
    result, error = outcome.pop()
    if error is not None:
        raise error
    return result


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: those of torch continue with a C++ stack."""
    return str(error).partition("\n")[0] or type(error).__name__
