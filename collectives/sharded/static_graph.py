"""Rounds: what the ranks agree on from the end of one backward to the end of the next, and follow once it repeats.

A round is the codes of gathers and reductions in their order. Where it was the same on all ranks, and the same as one
before, the next round is expected to be so, too: a rank that comes to what the round has next goes on at once. It posts
a row of the ranks' all-reduce, and doesn't wait for it; what it learns from the rows, it learns a little later, and at
the latest a round later.
"""

from __future__ import annotations

from collections import deque

import numpy

__all__ = ["FOLLOWS", "Rounds"]

FOLLOWS = 1  # as a rank's wish; others' wishes are not above 0
_LONGEST = 1 << 16  # codes of a round; a process that evaluates alone ends none
_KNOWN = 8  # rounds that were followed before and are followed again as soon as they come


class Rounds:
    """The round under way, and the one that is followed.

    `post`: a function that begins the all-reduce of a row, and gives its Work. `has_failed`: a function of a row
    that has come back; whether its sender must not go on alone.
    """

    def __init__(self, post, has_failed):
        self._post = post
        self._has_failed = has_failed
        self._round: list[int] = []
        self._alike = True  # so far all ranks have had this round
        self._last: list[int] | None = None
        self._known: deque[list[int]] = deque(maxlen=_KNOWN)
        self._flags: numpy.ndarray | None = None  # of gradients, on all ranks, at the end of the round that is followed
        self._followed: list[int] | None = None
        self._at = 0
        self._stopped = False
        self._posted: deque[tuple[int, object, numpy.ndarray]] = deque()
        self._count = 0  # rounds followed

    # ---- Following.

    @property
    def next(self) -> int | None:
        """The code that the followed round has next; None where none is followed."""
        return None if self._followed is None else self._followed[self._at]

    def follow(self, code: int, row: numpy.ndarray, flags: numpy.ndarray | None = None) -> bool:
        """Go on with what the followed round has next, if that is `code`, and `flags` those of its end; tell whether.

        `row`: this rank's, of which a copy is posted. Raises what a row has failed with: a rank is gone, or late by
        more than a round and the time limit.
        """
        if self._followed is None:
            return False
        self._look()
        if self._stopped or self.next != code or (flags is not None and not self.ends_with(flags)):
            return False
        row = row.copy()
        self._posted.append((self._count, self._post(row), row))
        self.advance()
        return True

    def ends_with(self, flags: numpy.ndarray) -> bool:
        """Tell whether the followed round has ended with these flags."""
        return numpy.array_equal(flags, self._flags)

    def covers(self, flags: numpy.ndarray) -> bool:
        """Tell whether the followed round has ended with all of these flags, and maybe more."""
        return len(flags) == len(self._flags) and bool((flags <= self._flags).all())

    def end_flags(self) -> numpy.ndarray:
        """Give the flags with which the followed round has ended."""
        return self._flags

    def advance(self) -> None:
        """Note that this rank has done what was next."""
        self._at += 1
        if self._at == len(self._followed):
            self._at = 0
            self._count += 1

    def _look(self) -> None:
        """Read the rows that have come back; wait for those of the round before the last one."""
        while self._posted:
            count, work, row = self._posted[0]
            if count >= self._count - 1 and not work.done():
                return
            try:
                work.wait()
            except BaseException:
                self.leave()
                raise
            self._posted.popleft()
            self._stopped = self._stopped or self._has_failed(row)

    def leave_if_followed(self) -> None:
        """`leave`, where a round is followed."""
        if self._followed is not None:
            self.leave()

    def leave(self) -> None:
        """Follow no round; what is left of this one isn't one that can be followed."""
        self._followed = None
        self._at = 0
        self._stopped = False
        self._alike = False
        for _, work, _ in self._posted:
            work.exception()  # it's no news any more
        self._posted.clear()

    # ---- Finding a round to follow.

    def note(self, code: int, alike: bool) -> None:
        """Note what the ranks have agreed on; `alike`: all did the same, and can do so again with no word."""
        self._alike = self._alike and alike and len(self._round) < _LONGEST
        if self._alike:
            self._round.append(code)

    def end(self, flags: numpy.ndarray, alike: bool) -> None:
        """End a round with what all ranks had of gradients; `alike`: each of them had all of that."""
        made, self._round = self._round, []
        alike, self._alike = self._alike and alike, True
        if not alike:
            self._last = None
            return
        if made == self._last or made in self._known:
            if made not in self._known:
                self._known.append(made)
            self._followed, self._at, self._flags = made, 0, flags.copy()
        self._last = made
