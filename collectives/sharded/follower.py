"""Follower: begins and records passes, makes the collectives of recorded schedules, and finds out on
the progress board what the others do where this rank can't; see `agreement`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from ..errors import CollectivesError, InvalidUsage
from ..rendezvous.progress_board import ProgressBoard, Status
from .negotiation import AGREED, BEHIND, DEFERRED, FAILED, INTERRUPTED, SKIPPED, known_to_all, remote_error
from .schedule import Pass, Schedule, ScheduleBook
from .unit import Unit
from .unit_registry import (
    DONE,
    END,
    KIND_SHIFT,
    REDUCE,
    REMOTE,
    STEP,
    UnitRegistry,
    is_post_forward,
    kind_of,
    reduce_code,
)

__all__ = ["Follower"]

_DONE = DONE << KIND_SHIFT
_SKIP = 1  # reason of an interruption: no exception was seen, and the rest of an iteration was left out


class Follower:
    """Holds the pass in progress, and follows schedules. `board`: None where the ranks share no
    memory; it follows none then.

    `join`: a function that takes part in the collective of a code, for the others; of DONE: in what
    follows the last reduction of a backward. `reset`: one that is called before an error.
    `fail_all`: one that announces this rank's failure, whose reason is a code, to the others.
    """

    def __init__(
        self, board: ProgressBoard | None, rank: int, units: UnitRegistry, join: Callable[[int], None],
        reset: Callable[[], None], fail_all: Callable[[int], None],
    ):  # fmt: skip
        self.board = board
        self.book = ScheduleBook()
        self.current: Pass | None = None  # the pass in progress
        self.reduced: set[int] = set()  # units that this rank has reduced because the others did
        self.failed: Status | None = None  # how this rank has failed, until all ranks have recovered
        self.uneven_blocks = int(board is None)  # in which the ranks negotiate each collective
        self.lasting_blocks = self.uneven_blocks  # of these, those that an error of all ranks doesn't end
        self.errors = 0  # of all ranks so far
        self.iteration = 0  # forwards, and backwards after them, that this rank has begun since all ranks were in step
        self.is_unfinished = False  # a forward that computes gradients has ended, and no backward has begun
        self.was_interrupted = False  # an exception has ended a pass that was negotiated
        self.after_error: Callable[[], None] = lambda: None  # called once all ranks have raised
        self._begins_iteration = False
        self._reason = 0  # of `failed`
        self.is_following = board is not None  # between passes, or in one whose schedule is followed
        self._rank = rank
        self._units = units
        self._join_collective = join
        self._reset = reset
        self._fail_all = fail_all

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that is followed now."""
        return None if self.current is None else self.current.schedule

    # ---- Iterations.

    def begin_iteration(self) -> None:
        """Count an iteration: a forward, and those that share its backward.

        Raises `RemoteError` where the others have completed the iteration that an exception has
        interrupted on this rank: all ranks lose this one.
        """
        self.recover()
        self.iteration += 1
        self._begins_iteration = True

    @property
    def compares_iterations(self) -> bool:
        """Whether all ranks make the same iterations; not in `uneven`."""
        return self.uneven_blocks == int(self.board is None)

    def _progress(self, begins_forward: bool = False) -> int:
        """Return this rank's progress, for the others: the iteration, whether its backward is still to
        come, and whether a forward begins in place of that.
        """
        return self.iteration << 2 | self.is_unfinished << 1 | (begins_forward and self.is_unfinished)

    # ---- Passes.

    @property
    def in_pass(self) -> bool:
        """Whether a pass is in progress; always where the ranks negotiate each collective."""
        return self.current is not None or self.uneven_blocks > 0

    def begin_pass(self, kind: tuple, code: int) -> bool:
        """Begin a pass, whose kind must be the same on all ranks. `code`: for errors.

        Returns False where this rank has skipped the rest of an iteration, which the others then lose,
        too: begin the pass again, whose kind may be another one now.
        """
        begins_iteration, self._begins_iteration = self._begins_iteration, False
        is_forward = kind[0] == "forward"
        self.recover()
        if self.uneven_blocks:
            return True
        self.reduced.clear()
        key = self.book.number(kind)
        if not self.is_following:
            self.current = Pass(key=key, clean=False)
            return True
        schedule = self.book.find(key)
        if schedule is None or self.book.next != key:
            wants = self._leave(key, code, self._progress(is_forward))
            differ = wants is None or any(want != key for want in wants)
            if differ and is_forward and self._has_skipped(wants):
                self._announce_skip(self.iteration - begins_iteration)
                return False
            if wants is None:
                self.raise_divergence(code)
            if differ:
                self.is_following, self.current = False, Pass(key=key, clean=False)
                return True
            self.is_following = schedule is not None
        self.book.begin(key)
        self.current = Pass(key=key, schedule=schedule)
        return True

    def _has_skipped(self, wants: list[int] | None) -> bool:
        """Return whether this rank begins a forward where others are in the backward of the one
        before. Raises `RemoteError` where another rank does.
        """
        return self.is_unfinished and (wants is None or not all(each & 2 for each in self.board.progress))

    def _announce_skip(self, iteration: int) -> None:
        """Have the others raise in an iteration whose rest this rank has skipped, and wait for that."""
        self.iteration = iteration
        self.announce(Status.INTERRUPTED, _SKIP)
        self._reset()
        self.recover()

    @property
    def plan(self) -> Any:
        """The plan with which the schedule was recorded that is followed; None where none is."""
        schedule = self.schedule
        return None if schedule is None else schedule.plan

    def record_plan(self, plan: Any) -> None:
        """Keep a plan with the schedule of the pass in progress, if that is recorded."""
        if self.current is not None:
            self.current.plan = plan

    def end_pass(self) -> bool:
        """Record the pass, at whose end all ranks are; return whether its schedule was followed."""
        made, self.current = self.current, None
        if self.is_following:
            return made is not None
        if made is not None and made.clean:
            self.book.store(made)
            self.is_following = True
        else:
            self.follow_again()
        return False

    # ---- Collectives.

    def follow(self, code: int) -> int | None:
        """Make the schedule's collectives up to that of this code; None: all ranks have left the
        schedule, and negotiate.
        """
        current = self.current
        if current is None or current.schedule is None:
            self.recover()
            while self._leave(code, code, self._progress()) is None:
                if current is not None or not self.is_unfinished:
                    self.raise_divergence(code)
                self._announce_skip(self.iteration)
            self.is_following = False
            return None
        schedule = current.schedule
        at = len(current.codes)
        if at > schedule.end or schedule.codes[at] != code or not schedule.mine[at]:
            to = schedule.find(code, at)
            if to is None:
                if schedule.reduces_at_end(code):
                    return DEFERRED
                if self._leave(code, code) is None:
                    self.raise_divergence(code)
                self._negotiate_rest()
                return None
            if not self.skip(to, code):
                return None
        self.enter(code, True)
        return AGREED

    def skip(self, to: int, code: int) -> bool:
        """Take part in the schedule's collectives before the one at `to`, where the others make
        them. False: no rank does, and all have left the schedule.
        """
        schedule, made = self.current.schedule, self.current.codes
        for at in range(len(made), to):
            if schedule.mine[at]:
                if self._leave(code, code) is not None:
                    self._negotiate_rest()
                    return False
                unit = self._units.of(schedule.codes[at])
                if is_post_forward(schedule.codes[at]) and (unit is None or not unit.is_sharded_post_forward):
                    self.raise_divergence(
                        schedule.codes[at],
                        f"this rank has left {unit!r} out in its forward, and the others gather what each rank keeps "
                        "after one (an int as reshard_after_forward)",
                    )
            self.enter(schedule.codes[at], False)
            self.join(schedule.codes[at])
        return True

    def join(self, code: int) -> None:
        """Take part in a collective for the others."""
        if kind_of(code) in (END, DONE):
            return
        if kind_of(code) == STEP:
            self._join_collective(code)
            return
        unit = self._units.of(code)
        if unit is None:
            raise InvalidUsage(
                f"another rank gathers unit {self._units.index_of(code)}, of a module that is gone here: keep it as "
                "long as the others do",
                op="fully_shard", rank=self._rank,
            )  # fmt: skip
        if kind_of(code) == REDUCE:
            if reduce_code(unit) != code:
                self.raise_divergence(code)
            self.reduced.add(unit.index)
        self._join_collective(code)

    def _negotiate_rest(self) -> None:
        """Negotiate the rest of the pass, and record it: all ranks have left its schedule."""
        self.is_following = False
        self.current.schedule = None
        self.current.departed = True

    def enter(self, code: int, mine: bool) -> None:
        """Enter the schedule's next collective, and record it."""
        failed = self.board.enter()
        if failed is not None:
            self._raise_remote(failed)
        self.current.record(code, mine)

    def _leave(self, want: int, code: int, progress: int = 0) -> list[int] | None:
        """Leave the schedule; return what each rank wants where all ranks do, else None. `progress`:
        as of `_progress`.
        """
        try:
            wants, failed = self.board.leave(want, code, progress)
        except CollectivesError:  # a rank is dead or late
            self.board.fail(Status.FAILED, code, self._progress())
            self.failed, self.current = Status.FAILED, None
            self._reset()
            raise
        if failed is not None:
            self._raise_remote(failed)
        if wants is not None and not self.is_unfinished and len(set(wants)) > 1:
            for rank in [rank for rank, each in enumerate(self.board.progress) if each & 1]:
                self._fail_all(REMOTE << KIND_SHIFT | rank << 1)
                raise remote_error(SKIPPED.format(f"rank {rank}"), self._rank, rank)
        return wants

    def follow_again(self, *, after_error: bool = False) -> None:
        """Go back to following schedules: all ranks are between passes, and have made other ones."""
        self.current, self.iteration = None, 0
        if after_error:  # the ranks may have begun other passes, and left other blocks
            self.is_unfinished = self.was_interrupted = False
            self.book.forget()
            self.errors += 1
            self.uneven_blocks = self.lasting_blocks
            self.after_error()
        if not self.uneven_blocks:
            self.is_following = True
            self.book.begin()

    def end_backward(self, flags: numpy.ndarray) -> numpy.ndarray | None:
        """End the backward by the schedule; return its flags. None: all ranks have left it."""
        schedule = self.schedule
        if schedule is None or schedule.flags is None:
            self.follow(_DONE)
            return None
        if not numpy.array_equal(flags, schedule.own_flags):
            if self._leave(_DONE, _DONE) is not None:
                self._negotiate_rest()
                return None
            if len(flags) != len(schedule.flags) or (flags > schedule.flags).any():
                self._raise_new_gradients(flags, schedule.flags)
        self.enter(_DONE, True)
        return schedule.flags.copy()

    # ---- Errors.

    def announce(self, status: Status, reason: int) -> None:
        """Take part in what the others have entered already; they enter no more."""
        self.failed, self._reason = status, reason
        self.board.fail(status, reason, self._progress())
        while self.board.is_needed():
            while self.current is None or len(self.current.codes) == len(self.current.schedule.codes):
                key = self.book.next  # others have begun the passes that all expected
                self.book.begin(key)
                self.current = Pass(key=key, schedule=self.book.find(key))
            code = self.current.schedule.codes[len(self.current.codes)]
            self.current.record(code, False)
            self.join(code)
            schedule = self.current.schedule
            if schedule.flags is not None and len(self.current.codes) == len(schedule.codes):
                self._join_collective(_DONE)  # what follows the last reduction
        self.current = None

    def recover(self) -> None:
        """Go on after an error, once all ranks have had theirs. Raises `RemoteError` where this rank
        was interrupted in an iteration that the others have completed.
        """
        if self.failed is None:
            return
        while (statuses := self.board.recover()) is None:
            self.announce(self.failed, self._reason)
        diverged = self.failed is Status.FAILED and kind_of(self._reason) != REMOTE
        self.failed, iteration = None, self.iteration
        self.follow_again(after_error=True)
        if Status.INTERRUPTED in statuses and not diverged and iteration < max(self.board.progress) >> 2:
            first = statuses.index(Status.INTERRUPTED)
            raise remote_error(BEHIND.format(f"on rank {first}"), self._rank, first)

    def _raise_remote(self, rank: int) -> None:
        """Raise the error of another rank's failure."""
        status, reason = self.board.reason_of(rank)
        if kind_of(reason) == REMOTE:
            rank = self._units.index_of(reason)
            status, reason = self.board.reason_of(rank)
        if status is Status.INTERRUPTED and self.board.progress_of(rank) >> 2 < self.iteration:
            text = BEHIND.format(f"on rank {rank}")
        elif status is Status.INTERRUPTED:
            text = SKIPPED.format(f"rank {rank}") if reason else INTERRUPTED.format(f"on rank {rank}")
        elif reason:
            text = (
                f"rank {rank} {self._units.describe(reason)}, which the others don't, and raised an error there: "
                "their gradients would be of different steps"
            )
        else:
            text = FAILED.format(rank)
        self._fail_all(REMOTE << KIND_SHIFT | rank << 1)
        raise remote_error(text, self._rank, rank)

    def raise_divergence(self, code: int, what: str = "") -> None:
        """Raise `InvalidUsage`, and have the others raise, where this rank alone has left the
        schedule.
        """
        what = what or f"this rank {self._units.describe(code)} where the others do what all ranks did before"
        self._fail_all(code)
        raise known_to_all(
            InvalidUsage(
                f"{what}: once passes have repeated themselves the ranks don't ask each other; give all ranks the same "
                "units in the same order, or put what differs (an evaluation on one rank, generate() of other lengths, "
                "other numbers of micro-batches) into a `with collectives.sharded.uneven(model):` block, which all "
                "ranks enter",
                op="fully_shard",
                rank=self._rank,
            )  # fmt: skip
        )

    def raise_reduced(self, unit: Unit) -> None:
        self.raise_divergence(reduce_code(unit), f"{unit!r} has gradients here, and the others have reduced it before")

    def _raise_new_gradients(self, flags: numpy.ndarray, expected: numpy.ndarray) -> None:
        count = len(self._units)
        names = []
        for at in numpy.flatnonzero(flags[count:] > expected[count:])[:4].tolist():
            unit = self._units.get(self._units.unit_of_param[at])
            names += [] if unit is None else [f"{unit.params[at - unit.first_param].name} of {unit!r}"]
        self.raise_divergence(
            _DONE, f"this rank has gradients that no rank had before, of {', '.join(names) or 'other parameters'}"
        )
