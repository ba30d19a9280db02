"""Schedules: the recorded order of the collectives of each kind of pass.

A pass is a forward of an outermost unit, a backward, or an all-gather that a user calls. Its kind
is a key of what a rank knows by itself, as the unit, the grad mode and the trainable parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy

from .unit_registry import DONE, KIND_SHIFT

__all__ = ["Pass", "Schedule", "ScheduleBook"]

_FOLLOWED_AFTER = 2  # records of a kind: the first one is made with no order to prefetch in
_KINDS = 64  # that are kept
_HISTORY = 512  # passes that are kept, in which the next one is looked up
_ANY = 0  # in the history: passes that were not the same on all ranks


@dataclasses.dataclass
class Schedule:
    """The collectives of a pass on all ranks, in order.

    `mine`: which of them this rank has needed; it only takes part in the others. `flags`: those of
    all ranks at a backward's end; `own_flags`: this rank's. `plan`: what made this rank take this
    order, for the scheduler.
    """

    codes: list[int] = dataclasses.field(default_factory=list)
    mine: list[bool] = dataclasses.field(default_factory=list)
    flags: numpy.ndarray | None = None
    own_flags: numpy.ndarray | None = None
    plan: Any = None

    def record(self, code: int, mine: bool) -> None:
        """Note a collective that was made. `mine`: this rank needed it."""
        self.codes.append(code)
        self.mine.append(mine)

    @functools.cached_property
    def end(self) -> int:
        """Position of a recorded pass's last collective, before the reductions at a backward's end."""
        return self.codes.index(DONE << KIND_SHIFT) if self.flags is not None else len(self.codes) - 1

    def find(self, code: int, begin: int) -> int | None:
        """Return where this rank makes a collective, from `begin` to the pass's end; None: nowhere."""
        found = [at for at in range(begin, self.end + 1) if self.codes[at] == code]
        return next((at for at in found if self.mine[at]), found[0] if found else None)

    def reduces_at_end(self, code: int) -> bool:
        """Whether a reduction is one of those after the backward's end."""
        return code in self.codes[self.end + 1 :]


@dataclasses.dataclass(kw_only=True)
class Pass(Schedule):
    """The pass in progress: what was made of it so far.

    `schedule`: the one that is followed, if one is. `clean`: so far all ranks are in this pass, so
    that it can be recorded. `departed`: all ranks have left the schedule.
    """

    key: int
    schedule: Schedule | None = None
    clean: bool = True
    departed: bool = False


class ScheduleBook:
    """The schedules of all kinds of passes, and which kind comes next.

    All ranks make the same calls of `begin`, `store`, `forget` and `clear`, so that they predict the
    same.
    """

    def __init__(self):
        self._numbers: dict[tuple, int] = {}
        self.clear()

    def clear(self) -> None:
        """Drop all schedules."""
        self._schedules: dict[int, tuple[int, Schedule]] = {}  # key -> (times recorded, the last one)
        self.forget()

    def forget(self) -> None:
        """Forget which passes were made."""
        self._history: list[int] = []
        self._match: int | None = None  # where the history before was the same as it is now

    def number(self, kind: tuple) -> int:
        """Return the key of a kind of pass, which is the same on all ranks: from 2 to 2**62."""
        if kind not in self._numbers:
            if len(self._numbers) > 16 * _KINDS:
                self._numbers.clear()
            digest = hashlib.blake2b(repr(kind).encode(), digest_size=8).digest()
            self._numbers[kind] = 2 + (int.from_bytes(digest, "big") >> 3)
        return self._numbers[kind]

    def find(self, key: int) -> Schedule | None:
        """Return the schedule of a kind that was recorded often enough to be followed."""
        count, schedule = self._schedules.get(key, (0, None))
        return schedule if count >= _FOLLOWED_AFTER else None

    def store(self, made: Pass) -> None:
        """Record the pass that has ended."""
        count = self._schedules.pop(made.key, (0, None))[0]
        self._schedules[made.key] = 1 if made.departed else count + 1, made
        if len(self._schedules) > _KINDS:
            del self._schedules[next(iter(self._schedules))]

    # ---- Which kind comes next: that which came next when the passes before were the same.

    @property
    def next(self) -> int | None:
        """The kind that is expected next; None where none is."""
        return None if self._match is None else self._history[self._match]

    def begin(self, key: int = _ANY) -> None:
        """Note that a pass of this kind begins."""
        history, expected = self._history, self.next
        history.append(key)
        if len(history) > 2 * _HISTORY:
            del history[:_HISTORY]
            self._match = None if self._match is None or self._match < _HISTORY else self._match - _HISTORY
        if expected is not None and expected == key and self._match is not None:
            self._match += 1
        else:
            self._match = self._find_match()

    def _find_match(self) -> int | None:
        """Return the place after the longest part of the history that its end repeats; the oldest
        one of these, so that it is right for longer.
        """
        newest = self._history[::-1]
        best = longest = begin = end = 0
        lengths = [0] * len(newest)  # of the part from each place on that is also at the beginning (the Z-function)
        for at in range(1, len(newest)):
            length = min(end - at, lengths[at - begin]) if at < end else 0
            while at + length < len(newest) and newest[length] == newest[at + length]:
                length += 1
            if at + length > end:
                begin, end = at, at + length
            lengths[at] = length
            if length >= longest:
                best, longest = at, length
        return len(newest) - best if longest else None
