"""Static graph: the sequence of collectives of one iteration, replayed without negotiation once it
repeats.

An iteration goes from the end of one backward to the end of the next. It is recorded as the codes
of its all-gathers and reductions, in order. Where it was the same on all ranks, and the same as one
before, the next one is expected to be the same, too. A rank that reaches the collective that the
iteration has next goes on at once. It posts a row of the controller's all-reduce and doesn't wait
for it. It reads the rows later, at the latest one iteration later.
"""

from __future__ import annotations

from collections import deque

import numpy

__all__ = ["REPLAYS", "StaticGraph"]

REPLAYS = 1  # as a rank's wish; all other wishes are at most 0
_LONGEST = 1 << 16  # codes of an iteration; a process that only evaluates ends none
_KNOWN = 8  # iterations replayed before, which are replayed again when they come once


class StaticGraph:
    """The iteration in progress, and the one that is replayed.

    `post`: a function that begins the all-reduce of a row and returns its Work. `has_failed`: a
    function of a row that has come back; whether its rank can't go on.
    """

    def __init__(self, post, has_failed):
        self._post = post
        self._has_failed = has_failed
        self._iteration: list[int] = []
        self._same_on_all_ranks = True  # so far all ranks have made the same calls
        self._last: list[int] | None = None
        self._known: deque[list[int]] = deque(maxlen=_KNOWN)
        self._flags: numpy.ndarray | None = None  # of gradients, on all ranks, at the end of the replayed iteration
        self._replayed: list[int] | None = None
        self._at = 0
        self._stopped = False
        self._posted: deque[tuple[int, object, numpy.ndarray]] = deque()
        self._count = 0  # iterations replayed

    # ---- Replaying.

    @property
    def next(self) -> int | None:
        """The code that the replayed iteration has next; None where none is replayed."""
        return None if self._replayed is None else self._replayed[self._at]

    def replay(self, code: int, row: numpy.ndarray, flags: numpy.ndarray | None = None) -> bool:
        """Replay the next collective, if it is `code`, and if `flags` are those of the iteration's
        end; return whether it was.

        `row`: this rank's; a copy is posted. Raises the error of a row that failed: a rank is dead,
        or late by more than an iteration and the time limit.
        """
        if self._replayed is None:
            return False
        self._read_rows()
        if self._stopped or self.next != code or (flags is not None and not self.ends_with(flags)):
            return False
        row = row.copy()
        self._posted.append((self._count, self._post(row), row))
        self.advance()
        return True

    def ends_with(self, flags: numpy.ndarray) -> bool:
        """Whether the replayed iteration ended with these flags."""
        return numpy.array_equal(flags, self._flags)

    def covers(self, flags: numpy.ndarray) -> bool:
        """Whether the replayed iteration ended with all of these flags, and maybe more."""
        return len(flags) == len(self._flags) and bool((flags <= self._flags).all())

    def end_flags(self) -> numpy.ndarray:
        """Return the flags with which the replayed iteration ended."""
        return self._flags

    def advance(self) -> None:
        """Note that this rank has made the next collective."""
        self._at += 1
        if self._at == len(self._replayed):
            self._at = 0
            self._count += 1

    def _read_rows(self) -> None:
        """Read the rows that have come back; wait for those of the iteration before the last one."""
        while self._posted:
            count, work, row = self._posted[0]
            if count >= self._count - 1 and not work.done():
                return
            try:
                work.wait()
            except BaseException:
                self.stop_replay()
                raise
            self._posted.popleft()
            self._stopped = self._stopped or self._has_failed(row)

    def stop_replay_if_any(self) -> None:
        """Stop replaying, where an iteration is replayed."""
        if self._replayed is not None:
            self.stop_replay()

    def stop_replay(self) -> None:
        """Stop replaying. The rest of this iteration is not recorded."""
        self._replayed = None
        self._at = 0
        self._stopped = False
        self._same_on_all_ranks = False
        for _, work, _ in self._posted:
            work.exception()  # mark as read
        self._posted.clear()

    # ---- Recording an iteration to replay.

    def record(self, code: int, same_on_all_ranks: bool) -> None:
        """Record a negotiated collective. `same_on_all_ranks`: all ranks made the same, and can
        make it again without negotiation.
        """
        self._same_on_all_ranks = self._same_on_all_ranks and same_on_all_ranks and len(self._iteration) < _LONGEST
        if self._same_on_all_ranks:
            self._iteration.append(code)

    def end(self, flags: numpy.ndarray, same_on_all_ranks: bool) -> None:
        """End the iteration, with the flags of gradients of all ranks. `same_on_all_ranks`: each
        rank had all of these gradients.
        """
        made, self._iteration = self._iteration, []
        same_on_all_ranks, self._same_on_all_ranks = self._same_on_all_ranks and same_on_all_ranks, True
        if not same_on_all_ranks:
            self._last = None
            return
        if made == self._last or made in self._known:
            if made not in self._known:
                self._known.append(made)
            self._replayed, self._at, self._flags = made, 0, flags.copy()
        self._last = made
