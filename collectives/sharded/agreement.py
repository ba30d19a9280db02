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
- a rank is interrupted by an exception, or begins a forward where the others are in the backward of
  the one before: they raise `RemoteError` in the same iteration, and that rank goes on with its next
  one. Where they have completed the iteration, since it had no collective left, all ranks raise in
  the next one.
- a rank's process ends, or the communicator's time limit passes: an error that names the rank.

Where ranks need not run the same at all, they negotiate before each collective as long as `uneven`
lasts. So do ranks on several nodes, which have no memory in common.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator

import numpy

from ..comm.communicator import Communicator
from ..environment import read_switch
from ..errors import CollectivesError, Mismatch
from ..rendezvous.progress_board import Status, open_board
from .follower import Follower
from .negotiation import AGREED, BEHIND, DEFERRED, RESUMED, Mark, Negotiation, remote_error
from .unit import Unit
from .unit_registry import (
    BARRIER,
    CREATE,
    DONE,
    END,
    KIND_SHIFT,
    REMOTE,
    UnitRegistry,
    gather_code,
    reduce_code,
    step_code,
)

__all__ = ["Agreement"]

_END, _DONE = END << KIND_SHIFT, DONE << KIND_SHIFT


class Agreement:
    """Agrees on the collectives of a communicator's units; see the module.

    `control`: a communicator of the same ranks on host memory, which `close` closes; None: no
    other rank to agree with. `join`: a function that takes part in the collective of a code, for
    the others. `reset`: one that drops the forward or backward in progress; it is called before an
    error.
    """

    def __init__(
        self, comm: Communicator, control: Communicator | None, units: UnitRegistry, join: Callable[[int], None],
        reset: Callable[[], None],
    ):  # fmt: skip
        self.comm = comm
        self.control = control
        self._units = units
        self._reset = reset
        self._is_dynamic = False  # set_static_graph(False) was called
        self._checks = read_switch("COLLECTIVES_CHECK")
        board = None if self.control is None else open_board(self.control, lambda: comm.timeout)
        self._join = join
        self.follower = Follower(board, comm.rank, units, self._join_collective, reset, self.fail)
        self._negotiation = None
        if self.control is not None:
            self._negotiation = Negotiation(self.control, units, self.follower.join, reset)

    def close(self) -> None:
        """Close the control communicator and the board."""
        if self.control is not None:
            self.control.close()
            if self.follower.board is not None:
                self.follower.board.close()

    def end_pass(self) -> bool:
        """End a pass that has no gradients to agree on: take part in what is left of it. Return
        whether its schedule was followed.
        """
        if self.follower.current is None:
            return False
        if self._reach(_END) == AGREED:
            return self.follower.end_pass()
        self.follower.current = None
        return False

    # ---- Collectives.

    def gather(self, unit: Unit, *, post_forward: bool = False, masters: bool = False) -> bool:
        """Agree on a unit's all-gather; return whether all ranks make it, and `post_forward` if any
        does.
        """
        return self._reach(gather_code(unit, post_forward=post_forward, masters=masters)) == AGREED

    def reduce(self, unit: Unit) -> bool:
        """Agree on a unit's reduction; return False where it must wait for the end of the backward."""
        if unit.index in self.follower.reduced:
            self.follower.raise_reduced(unit)
        return self._reach(reduce_code(unit)) != DEFERRED

    def reduce_at_end(self, unit: Unit) -> None:
        """Note that all ranks reduce a unit now, after the end of a backward."""
        if self.follower.is_following and self.follower.current is not None:
            self.follower.enter(reduce_code(unit), True)
        elif self.follower.current is not None:
            self.follower.current.record(reduce_code(unit), True)

    def _reach(self, code: int, described: str = "") -> int:
        """Agree on the collective that this rank has reached, as `Negotiation.negotiate`."""
        if self.control is None:
            return AGREED
        if self.follower.was_interrupted:
            self.resume()
        if self.follower.is_following:
            outcome = self.follower.follow(code)
            if outcome is not None:
                return outcome
        return self._negotiate(code, described)

    def _negotiate(self, code: int, described: str = "") -> int:
        try:
            outcome = self._negotiation.negotiate(
                code, self.follower.current, described, iteration=self._compared_iteration
            )
        except CollectivesError as error:
            if getattr(error, "known_to_all", False):
                self.follower.follow_again(after_error=True)  # all ranks raise it in one round
            raise
        if outcome == AGREED and self.follower.current is None and self._negotiation.are_idle:
            self.follower.follow_again()
        return outcome

    @property
    def _compared_iteration(self) -> int:
        return self.follower.iteration if self.follower.compares_iterations else 0

    def resume(self) -> None:
        """Have the others raise where this rank has left an iteration that was negotiated, and they
        haven't. To be called before a forward.

        Raises `RemoteError` where they have completed it: all ranks lose the next one.
        """
        follower = self.follower
        if self.control is None or follower.is_following:
            return
        mark = Mark.INTERRUPTED if follower.was_interrupted else Mark.ENDED
        if mark is Mark.ENDED and follower.is_unfinished and follower.compares_iterations:
            mark = Mark.UNFINISHED
        if mark is Mark.ENDED:
            return
        iteration = self._compared_iteration
        if self._negotiation.negotiate(_END, None, mark=mark, iteration=iteration) == RESUMED:
            self._reset()
            follower.follow_again(after_error=True)
            if iteration < self._negotiation.newest_iteration:
                raise remote_error(BEHIND.format(f"on rank {self.comm.rank}"), self.comm.rank)

    # ---- The end of a backward.

    def reach_end(self) -> None:
        """Take part in the collectives before the end of a backward that this rank leaves out."""
        schedule = self.follower.schedule
        if schedule is not None and schedule.flags is not None:
            self.follower.skip(schedule.end, _DONE)

    def end_backward(self, flags: numpy.ndarray) -> numpy.ndarray:
        """Return the element-wise maximum of all ranks' flags at the end of a backward.

        `flags`: of units that wait to be reduced, then of parameters: 1 for one that is reduced,
        plus 2 for one with a gradient; as they are after `reach_end`. All ranks then call
        `reduce_at_end` for the units with a flag, and `finish_backward`.
        """
        if self.control is None:
            return flags
        late = sorted({int(index) for index in numpy.flatnonzero(flags[: len(self._units)])} & self.follower.reduced)
        if late:
            self.follower.raise_reduced(self._units.get(late[0]))
        known = self._units.flags_of_used_units(flags)
        found = self.follower.end_backward(known) if self.follower.is_following else None
        if found is None:
            self._negotiate(_DONE)
            found = flags
            self.control.all_reduce(found, "max")
            made = self.follower.current
            if made is not None:
                made.flags, made.own_flags = self._units.flags_of_used_units(found), known
        self.follower.reduced.clear()
        return found

    def finish_backward(self) -> bool:
        """End the pass of a backward, after its last reduction; return whether its schedule was
        followed.
        """
        if self._checks and self.follower.schedule is not None:
            self._check_order()
        return self.follower.end_pass()

    # ---- Steps of optimizers of whole parameters.

    def begin_step(self, number: int, has_grad: tuple[bool, ...], describe: Callable[[], str]) -> None:
        """Begin the pass of a step of the `FullParamOptimizer` of a number.

        `has_grad`: which of its parameters have a gradient. Raises `InvalidUsage` on all ranks where
        they don't make the same step now; `describe`: a function that returns this rank's text for it.
        """
        if self.control is None:
            return
        code = step_code(number, zlib.crc32(bytes(has_grad)))
        self.follower.begin_pass(("step", number, has_grad), code)
        self.follower.record_plan(has_grad)
        self._reach(code, describe() if self._will_negotiate else "")

    @property
    def _will_negotiate(self) -> bool:
        return not self.follower.is_following or self.follower.schedule is None

    def share_failure(self, failed: bool) -> int | None:
        """Return the last rank on which a step has failed; None where it has on none. A collective on
        the host, which blocks.
        """
        if self.control is None:
            return None
        found = numpy.array([(self.comm.rank + 1) * failed], dtype=numpy.int64)
        self.control.all_reduce(found, "max")
        return int(found[0]) - 1 if found[0] else None

    def raise_failed_step(self, rank: int) -> None:
        """Raise `RemoteError`, since a rank has announced its failure in `share_failure`, as all other
        ranks do now.
        """
        self.fail(REMOTE << KIND_SHIFT | rank << 1)
        raise remote_error(
            f"rank {rank} could not make its part of the step of a FullParamOptimizer, and raised the reason there: "
            "optimizers of other ranks have made theirs, so go back to a checkpoint",
            self.comm.rank, rank,
        )  # fmt: skip

    def _join_collective(self, code: int) -> None:
        if code == _DONE and self._checks:
            self._check_order()
        self._join(code)

    def _check_order(self) -> None:
        """Raise `Mismatch` unless all ranks have made the same collectives in this backward."""
        digest = zlib.crc32(numpy.array(self.follower.current.codes, dtype=numpy.int64).tobytes())
        if not self.same_number(digest):
            raise Mismatch(
                "the ranks have made other collectives, or in another order, in this backward", op="fully_shard",
                rank=self.comm.rank,
            )  # fmt: skip

    # ---- Calls of all ranks between passes.

    def create(self, unit: Unit, described: str) -> None:
        """Register a unit. Raises `InvalidUsage` on all ranks where they don't make the same one
        now.
        """
        self._reach(CREATE << KIND_SHIFT | zlib.crc32(described.encode()) << 1, f"shards {described}")
        if not self.follower.in_pass:  # all ranks are here: a forward without a backward was another module's
            self.follower.is_unfinished = False
        self.follower.book.clear()
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
        self.barrier("uneven")
        self.follower.uneven_blocks += 1
        self.follower.is_following, self.follower.current = False, None

    def end_uneven(self) -> None:
        """End what `begin_uneven` has begun, once all ranks do. A collective, which blocks."""
        self.barrier("the end of uneven")
        self.follower.uneven_blocks -= 1
        self.follower.follow_again()

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Negotiate before each collective inside the block. A collective, at both ends.

        Where an exception ends it and not those of all ranks, the others raise `RemoteError` in
        their next calls, and this rank goes on. An error of all ranks ends it, too.
        """
        self.begin_uneven()
        errors = self.follower.errors
        try:
            yield
        except BaseException:
            if self.control is not None and self.follower.errors == errors:
                self.follower.uneven_blocks -= 1
                self.follower.was_interrupted = True
            raise
        if self.follower.errors == errors:
            self.end_uneven()

    def set_static_graph(self, static_graph: bool) -> None:
        """Set whether schedules are followed outside of `uneven`. A collective, which blocks."""
        if static_graph and self._is_dynamic:
            self.end_uneven()
            self.follower.lasting_blocks -= 1
        elif not static_graph and not self._is_dynamic:
            self.begin_uneven()
            self.follower.lasting_blocks += 1
        self._is_dynamic = not static_graph

    # ---- Leaving the schedule, and errors.

    def fail(self, reason: int = 0) -> None:
        """Announce to the others, in their next calls, that this rank can't go on, and reset.

        `reason`: a code, for their errors.
        """
        if self.control is None:
            pass
        elif self.follower.is_following:
            self.follower.announce(Status.FAILED, reason)
        else:
            self._negotiation.fail()
            self.follower.follow_again(after_error=True)
        self._reset()

    def interrupt(self, computes_gradients: bool) -> None:
        """Note that an exception has ended a forward or a backward: the others raise in their next
        calls, unless one has ended theirs.
        """
        if self.control is None:
            return
        if not self.follower.is_following:
            self.follower.was_interrupted |= computes_gradients
            self.follower.current = None
        elif self.follower.failed is None and (computes_gradients or self.follower.current is not None):
            self.follower.announce(Status.INTERRUPTED, 0)
