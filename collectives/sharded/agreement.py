"""Agreement: the ranks make the same collectives in the same order, without a message once their
passes repeat themselves.

The first passes of each kind are negotiated (`negotiation`) and recorded (`schedule`). From then on
each rank follows the recorded schedule. A rank that doesn't need what comes next takes part in it,
an all-gather whose result it drops or a reduction to which it adds zeros, since it knows what the
others make. So the steady state has no communication but the data's own, and no rank's host waits
for another one.

What isn't next in the schedule is decided on the progress board, memory that the ranks share. A
rank that reaches it leaves the schedule there, and waits until each other rank has either left at
the same place, too, or has entered the collective at that place:

- all have left, as with an evaluation between two steps, a frozen layer or another input path: the
  ranks follow the schedule of what they all begin, if they have one. Otherwise they negotiate until
  the pass ends, and its schedule is a new one.
- others have gone on, and this rank needs less than before: it takes part in what it leaves out. A
  rank that has left it out before doesn't even wait.
- others have gone on, and this rank needs something that isn't in the schedule: it raises
  `InvalidUsage`, which names it, and the others raise `RemoteError` in their next call. So does a
  rank that has a gradient which the others have already reduced.
- a rank is interrupted by an exception: the others raise `RemoteError` in their next call, and so
  does that rank in its next one, unless an exception has interrupted all of them there.
- a rank's process ends, or the communicator's time limit passes: an error that names the rank.

Where ranks need not run the same at all, they negotiate before each collective as long as `uneven`
lasts. So do ranks on several nodes, which have no memory in common.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from ..comm.communicator import Communicator
from ..environment import read_switch
from ..errors import CollectivesError, InvalidUsage, Mismatch, RemoteError
from ..rendezvous.control import open_control
from ..rendezvous.progress_board import Status, open_board
from .negotiation import AGREED, DEFERRED, Negotiation, known_to_all
from .schedule import Pass, ScheduleBook
from .unit import Unit
from .unit_registry import (
    BARRIER,
    CREATE,
    DONE,
    END,
    KIND_SHIFT,
    REDUCE,
    REMOTE,
    UnitRegistry,
    gather_code,
    is_post_forward,
    kind_of,
    reduce_code,
)

__all__ = ["Agreement"]

_END, _DONE = END << KIND_SHIFT, DONE << KIND_SHIFT


class Agreement:
    """Agrees on the collectives of a communicator's units; see the module.

    `join`: a function that takes part in the collective of a code, for the others. `reset`: one
    that drops the forward or backward in progress; it is called before an error.
    """

    def __init__(
        self, comm: Communicator, units: UnitRegistry, join: Callable[[int], None], reset: Callable[[], None]
    ):
        self.comm = comm
        self.control = open_control(comm)
        self._units = units
        self._join_collective = join
        self._reset = reset
        self._book = ScheduleBook()
        self._pass: Pass | None = None
        self._reduced: set[int] = set()  # units that this rank has reduced because the others did
        self._failed: Status | None = None  # how this rank has failed, until all ranks have recovered
        self._is_dynamic = False  # set_static_graph(False) was called
        self._checks = read_switch("COLLECTIVES_CHECK")
        if self.control is None:
            return
        self._board = open_board(self.control, lambda: comm.timeout)
        self._negotiation = Negotiation(self.control, units, self._join, reset)
        self._uneven = int(self._board is None)  # blocks in which the ranks negotiate each collective
        self._follows = self._board is not None  # between passes, or in one that is followed

    def close(self) -> None:
        """Close the control communicator and the board."""
        if self.control is not None:
            self.control.close()
            if self._board is not None:
                self._board.close()

    @property
    def in_pass(self) -> bool:
        """Whether a pass is in progress; always where the ranks negotiate each collective."""
        return self._pass is not None or self.control is None or self._uneven > 0

    # ---- Passes.

    def begin_pass(self, kind: tuple, code: int) -> None:
        """Begin a pass, whose kind all ranks should give alike. `code`: for errors."""
        if self.control is None or self._uneven:
            return
        self._recover()
        self._reduced.clear()
        key = self._book.number(kind)
        if not self._follows:
            self._pass = Pass(key, None, clean=False)
            return
        schedule = self._book.find(key)
        if schedule is None or self._book.next != key:
            wants = self._leave(key, code)
            if wants is None:
                self._raise_divergence(code)
            if any(want != key for want in wants):
                self._follows, self._pass = False, Pass(key, None, clean=False)
                return
            self._follows = schedule is not None
        self._book.begin(key)
        self._pass = Pass(key, schedule)

    @property
    def plan(self) -> Any:
        """The plan with which the schedule was recorded that is followed; None where none is."""
        return None if self._pass is None or self._pass.schedule is None else self._pass.schedule.plan

    def record_plan(self, plan: Any) -> None:
        """Keep a plan with the schedule of the pass in progress, if that is recorded."""
        if self._pass is not None:
            self._pass.plan = plan

    def end_pass(self) -> bool:
        """End a pass that has no gradients to agree on: take part in what is left of it. Return
        whether its schedule was followed.
        """
        if self.control is None or self._uneven or self._pass is None:
            return False
        if self._reach(_END) == AGREED:
            return self._finish_pass()
        self._pass = None
        return False

    def _finish_pass(self) -> bool:
        """Record the pass, at whose end all ranks are; return whether its schedule was followed."""
        made, self._pass = self._pass, None
        if self._follows:
            return made is not None
        if made is not None and made.clean:
            self._book.store(made)
            self._follows = True
        else:
            self._follow_again()
        return False

    def _follow_again(self, *, after_error: bool = False) -> None:
        """Go back to following schedules: all ranks are between passes, and have made other ones."""
        self._pass = None
        if after_error:  # the ranks may have begun other passes
            self._book.forget()
        if not self._uneven:
            self._follows = True
            self._book.begin()

    # ---- Collectives.

    def gather(self, unit: Unit, *, post_forward: bool = False, masters: bool = False) -> bool:
        """Agree on a unit's all-gather; return whether all ranks make it, and `post_forward` if any
        does.
        """
        return self._reach(gather_code(unit, post_forward=post_forward, masters=masters)) == AGREED

    def reduce(self, unit: Unit) -> bool:
        """Agree on a unit's reduction; return False where it must wait for the end of the backward."""
        if unit.index in self._reduced:
            self._raise_reduced(unit)
        return self._reach(reduce_code(unit)) != DEFERRED

    def reduce_at_end(self, unit: Unit) -> None:
        """Note that all ranks reduce a unit now, after the end of a backward."""
        code = reduce_code(unit)
        if self._pass is None or self.control is None:
            return
        if self._follows:
            self._enter()
        self._pass.record(code, True)

    def _reach(self, code: int, described: str = "") -> int:
        """Agree on the collective that this rank has reached, as `Negotiation.negotiate`."""
        if self.control is None:
            return AGREED
        if self._follows:
            outcome = self._follow(code)
            if outcome is not None:
                return outcome
        return self._negotiate(code, described)

    def _negotiate(self, code: int, described: str = "") -> int:
        try:
            outcome = self._negotiation.negotiate(code, self._pass, described)
        except CollectivesError as error:
            if getattr(error, "known_to_all", False):
                self._follow_again(after_error=True)  # all ranks raise it in one round
            raise
        if outcome == AGREED and self._pass is None and self._negotiation.are_idle and not self._uneven:
            self._follow_again()
        return outcome

    def _follow(self, code: int) -> int | None:
        """Make the schedule's collectives up to that of this code; None: all ranks have left the
        schedule, and negotiate.
        """
        current = self._pass
        if current is None or current.schedule is None:
            self._recover()
            if self._leave(code, code) is None:
                self._raise_divergence(code)
            self._follows = False
            return None
        schedule = current.schedule
        at = len(current.codes)
        if at > schedule.end or schedule.codes[at] != code or not schedule.mine[at]:
            to = schedule.find(code, at)
            if to is None:
                if schedule.reduces_at_end(code):
                    return DEFERRED
                if self._leave(code, code) is None:
                    self._raise_divergence(code)
                self._negotiate_rest()
                return None
            if not self._skip(to, code):
                return None
        self._enter()
        current.record(code, True)
        return AGREED

    def _skip(self, to: int, code: int) -> bool:
        """Take part in the schedule's collectives before the one at `to`, where the others make
        them. False: no rank does, and all have left the schedule.
        """
        schedule, made = self._pass.schedule, self._pass.codes
        for at in range(len(made), to):
            if schedule.mine[at]:
                if self._leave(code, code) is not None:
                    self._negotiate_rest()
                    return False
                unit = self._units.of(schedule.codes[at])
                if is_post_forward(schedule.codes[at]) and (unit is None or not unit.is_sharded_post_forward):
                    self._raise_divergence(code)
            self._enter()
            self._take_part()
        return True

    def _take_part(self) -> None:
        """Take part in the schedule's next collective, which this rank has entered."""
        code = self._pass.schedule.codes[len(self._pass.codes)]
        self._pass.record(code, False)
        self._join(code)

    def _join(self, code: int) -> None:
        if kind_of(code) in (END, DONE):
            return
        unit = self._units.of(code)
        if unit is None:
            raise InvalidUsage(
                f"another rank gathers unit {self._units.index_of(code)}, of a module that is gone here: keep it as "
                "long as the others do",
                op="fully_shard", rank=self.comm.rank,
            )  # fmt: skip
        if kind_of(code) == REDUCE:
            if reduce_code(unit) != code:
                self._raise_divergence(code)
            self._reduced.add(unit.index)
        self._join_collective(code)

    def _negotiate_rest(self) -> None:
        """Negotiate the rest of the pass, and record it: all ranks have left its schedule."""
        self._follows = False
        self._pass.schedule = None
        self._pass.departed = True

    # ---- The end of a backward.

    def reach_end(self) -> None:
        """Take part in the collectives before the end of a backward that this rank leaves out."""
        schedule = self._pass.schedule if self.control is not None and self._pass is not None else None
        if schedule is not None and schedule.flags is not None:
            self._skip(schedule.end, _DONE)

    def end_backward(self, flags: numpy.ndarray) -> numpy.ndarray:
        """Return the element-wise maximum of all ranks' flags at the end of a backward.

        `flags`: of units that wait to be reduced, then of parameters: 1 for one that is reduced,
        plus 2 for one with a gradient; as they are after `reach_end`. All ranks then call `reduce_at_end` for the units with a
        flag, and `finish_backward`.
        """
        if self.control is None:
            return flags
        late = sorted({int(index) for index in numpy.flatnonzero(flags[: len(self._units)])} & self._reduced)
        if late:
            self._raise_reduced(self._units.get(late[0]))
        known = self._flags_of_used_units(flags)
        found = self._follow_to_end(known) if self._follows else None
        if found is None:
            self._negotiate(_DONE)
            found = flags
            self.control.all_reduce(found, "max")
            if self._pass is not None:
                self._pass.flags, self._pass.own_flags = self._flags_of_used_units(found), known
        self._reduced.clear()
        return found

    def _follow_to_end(self, flags: numpy.ndarray) -> numpy.ndarray | None:
        """End the backward by the schedule; return its flags. None: all ranks have left it."""
        schedule = None if self._pass is None else self._pass.schedule
        if schedule is None or schedule.flags is None:
            self._follow(_DONE)
            return None
        if not numpy.array_equal(flags, schedule.own_flags):
            if self._leave(_DONE, _DONE) is not None:
                self._negotiate_rest()
                return None
            if len(flags) != len(schedule.flags) or (flags > schedule.flags).any():
                self._raise_new_gradients(flags, schedule.flags)
        self._enter()
        self._pass.record(_DONE, True)
        return schedule.flags.copy()

    def finish_backward(self) -> bool:
        """End the pass of a backward, after its last reduction; return whether its schedule was
        followed.
        """
        if self.control is None or self._uneven:
            return False
        if self._checks and self._follows and self._pass is not None:
            self._check_order()
        return self._finish_pass()

    def _check_order(self) -> None:
        """Raise `Mismatch` unless all ranks have made the same collectives in this backward."""
        digest = zlib.crc32(numpy.array(self._pass.codes, dtype=numpy.int64).tobytes())
        ends = numpy.array([digest, -digest], dtype=numpy.int64)
        self.control.all_reduce(ends, "max")
        if ends[0] != -ends[1]:
            raise Mismatch(
                "the ranks have made other collectives, or in another order, in this backward", op="fully_shard",
                rank=self.comm.rank,
            )  # fmt: skip

    def _flags_of_used_units(self, flags: numpy.ndarray) -> numpy.ndarray:
        """Return the flags with zeros for units without gradients.

        The modules of such units may have been collected on some ranks and not yet on others.
        """
        count = len(self._units)
        units = numpy.array(self._units.unit_of_param, dtype=numpy.int64)
        used = numpy.zeros(count, dtype=bool)
        used[units[flags[count:] >= 2]] = True
        kept = flags.copy()
        kept[count:][~used[units]] = 0
        return kept

    # ---- Calls of all ranks between passes.

    def create(self, unit: Unit, described: str) -> None:
        """Register a unit. Raises `InvalidUsage` on all ranks where they don't make the same one
        now.
        """
        if self.control is not None:
            self._reach(CREATE << KIND_SHIFT | zlib.crc32(described.encode()) << 1, f"shards {described}")
            self._book.clear()
        self._units.add(unit)

    def barrier(self, described: str) -> None:
        """Wait for all ranks to make the same call; take part in the all-gathers that they make
        before it.

        Raises `InvalidUsage` on all ranks where one ends a backward or makes another call.
        """
        self._reach(BARRIER << KIND_SHIFT | zlib.crc32(described.encode()) << 1, described)

    def same_number(self, number: int) -> bool:
        """Return whether all ranks have the same number, a signed one of 64 bits. A collective."""
        if self.control is None:
            return True
        ends = numpy.array([number, -number], dtype=numpy.int64)
        self.control.all_reduce(ends, "max")
        return bool(ends[0] == -ends[1])

    def begin_uneven(self) -> None:
        """Negotiate before each collective from now on. A collective, which blocks."""
        if self.control is not None:
            self.barrier("uneven")
            self._uneven += 1
            self._follows, self._pass = False, None

    def end_uneven(self) -> None:
        """End what `begin_uneven` has begun, once all ranks do. A collective, which blocks."""
        if self.control is not None:
            self.barrier("the end of uneven")
            self._uneven -= 1
            self._follow_again()

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Negotiate before each collective inside the block. A collective, at both ends."""
        self.begin_uneven()
        try:
            yield
        except BaseException:  # the others may not have one: they learn it in their next call
            if self.control is not None:
                self._uneven -= 1
            raise
        self.end_uneven()

    def set_static_graph(self, static_graph: bool) -> None:
        """Set whether schedules are followed outside of `uneven`. A collective, which blocks."""
        if static_graph and self._is_dynamic:
            self.end_uneven()
        elif not static_graph and not self._is_dynamic:
            self.begin_uneven()
        self._is_dynamic = not static_graph

    # ---- Leaving the schedule, and errors.

    def _enter(self) -> None:
        failed = self._board.enter()
        if failed is not None:
            self._raise_remote(failed)

    def _leave(self, want: int, code: int) -> list[int] | None:
        """Leave the schedule; return what each rank wants where all ranks do, else None."""
        try:
            wants, failed = self._board.leave(want, code)
        except CollectivesError:  # a rank is dead or late
            self._board.fail(Status.FAILED, code)
            self._failed, self._pass = Status.FAILED, None
            self._reset()
            raise
        if failed is not None:
            self._raise_remote(failed)
        return wants

    def fail(self, reason: int = 0) -> None:
        """Announce to the others, in their next calls, that this rank can't go on, and reset.

        `reason`: a code, for their errors.
        """
        if self.control is None:
            pass
        elif self._follows:
            self._fail(Status.FAILED, reason)
        else:
            self._negotiation.fail()
            self._follow_again(after_error=True)
        self._reset()

    def interrupt(self, computes_gradients: bool) -> None:
        """Note that an exception has ended a forward or a backward: the others raise, too, in their
        next calls, unless one has ended theirs.
        """
        if self.control is None:
            return
        if not self._follows:
            self._negotiation.interrupted += computes_gradients
            self._pass = None
        elif self._failed is None and (computes_gradients or self._pass is not None):
            self._fail(Status.INTERRUPTED, 0)

    def _fail(self, status: Status, reason: int) -> None:
        """Take part in what the others have entered already; they enter no more."""
        self._failed = status
        self._board.fail(status, reason)
        while self._board.is_needed():
            while self._pass is None or len(self._pass.codes) == len(self._pass.schedule.codes):
                key = self._book.next  # others have begun the passes that all expected
                self._book.begin(key)
                self._pass = Pass(key, self._book.find(key))
            self._take_part()
        self._pass = None

    def _recover(self) -> None:
        """Go on after an error, once all ranks have had theirs."""
        if self._failed is None:
            return
        while (found := self._board.recover()) is None:
            self._fail(self._failed, 0)
        failed, self._failed = self._failed, None
        self._follow_again(after_error=True)
        if failed is Status.INTERRUPTED and Status.FAILED in found:
            raise known_to_all(
                RemoteError(
                    "a forward or backward was interrupted by an exception here and not on all ranks: their gradients "
                    "would be of different batches; catch exceptions on all ranks, or on none",
                    op="fully_shard", rank=self.comm.rank,
                )
            )  # fmt: skip

    def _raise_remote(self, rank: int) -> None:
        """Raise the error of another rank's failure."""
        status, reason = self._board.reason_of(rank)
        if kind_of(reason) == REMOTE:
            rank = self._units.index_of(reason)
            status, reason = self._board.reason_of(rank)
        if status is Status.INTERRUPTED:
            text = (
                f"a forward or backward was interrupted by an exception on rank {rank} and not on all ranks: their "
                "gradients would be of different batches; catch exceptions on all ranks, or on none"
            )
        elif reason:
            text = (
                f"rank {rank} {self._units.describe(reason)}, which the others don't, and raised an error there: "
                "their gradients would be of different steps"
            )
        else:
            text = f"rank {rank} could not go on, in its forward, and raised the reason there"
        self.fail(REMOTE << KIND_SHIFT | rank << 1)
        raise known_to_all(RemoteError(text, op="fully_shard", rank=self.comm.rank, peers=(rank,)))

    def _raise_divergence(self, code: int, what: str = "") -> None:
        """Raise `InvalidUsage`, and have the others raise, where this rank alone has left the
        schedule.
        """
        what = what or f"this rank {self._units.describe(code)} where the others do what all ranks did before"
        self.fail(code)
        raise known_to_all(
            InvalidUsage(
                f"{what}: once passes have repeated themselves the ranks don't ask each other; give all ranks the same "
                "units in the same order, or put what differs (an evaluation on one rank, generate() of other lengths, "
                "other numbers of micro-batches) into a `with collectives.sharded.uneven(model):` block, which all "
                "ranks enter",
                op="fully_shard",
                rank=self.comm.rank,
            )  # fmt: skip
        )

    def _raise_reduced(self, unit: Unit) -> None:
        self._raise_divergence(
            reduce_code(unit), f"{unit!r} has gradients here, and the others have reduced it before"
        )

    def _raise_new_gradients(self, flags: numpy.ndarray, expected: numpy.ndarray) -> None:
        count = len(self._units)
        names = []
        for at in numpy.flatnonzero(flags[count:] > expected[count:])[:4].tolist():
            unit = self._units.get(self._units.unit_of_param[at])
            names += [] if unit is None else [f"{unit.params[at - unit.first_param].name} of {unit!r}"]
        self._raise_divergence(
            _DONE, f"this rank has gradients that no rank had before, of {', '.join(names) or 'other parameters'}"
        )
