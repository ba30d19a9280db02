"""Negotiation: the ranks agree on each collective, by an all-reduce of 80 bytes, before they make it.

Ranks need not run the same units. Before a collective each rank announces the one that it has
reached:

- all ranks have reached the same one: they make it.
- some want an all-gather: all ranks take part in that of the lowest unit, and those that didn't
  want it drop the result.
- some end a forward: they go on.
- some step an optimizer of whole parameters, or make another call of all ranks: that is an error.
- otherwise there are reductions of different units: these are deferred to the end of the backward.
- at the end of its backward a rank takes part in the others' all-gathers until all ranks have ended
  theirs. All ranks then reduce the gradients that still wait on any of them; ranks without
  gradients send zeros.
- a rank has left an iteration before its end, by an exception or without one: the others raise.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable

import numpy

from ..comm.agree import all_gather_object
from ..comm.communicator import Communicator
from ..errors import InvalidUsage, RemoteError
from .schedule import Pass
from .unit_registry import (
    BARRIER,
    CREATE,
    END,
    GATHER,
    KIND_SHIFT,
    REDUCE,
    STEP,
    UnitRegistry,
    gathers_masters,
    kind_of,
)

__all__ = [
    "AGREED", "BEHIND", "DEFERRED", "FAILED", "INTERRUPTED", "PARTIAL", "RESUMED", "SKIPPED", "Mark", "Negotiation",
    "known_to_all", "remote_error",
]  # fmt: skip

DEFERRED, AGREED, PARTIAL, RESUMED = range(4)
_COUNT = 20  # bits below
_NONE = -(1 << 62)
_UNCLEAN = 1  # the key of a pass that not all ranks are in
_DIFFERENT_MODULES = (
    "the ranks don't shard the same modules",
    "build the same model, and give all ranks the same wrap policy and arguments",
)
_DIFFERENT_CALLS = ("the ranks don't make the same call", "all ranks must make it, at the same place of the training")
# Texts of `remote_error`.
FAILED = "rank {} could not go on, in its forward or its optimizer's step, and raised the reason there"
INTERRUPTED = (
    "a forward or backward was interrupted by an exception {} and not on all ranks: their gradients would be of "
    "different batches; all ranks lose this iteration, and can go on with the next one"
)
SKIPPED = (
    "{} has begun another forward, or ended, before the backward of this iteration, as where an exception has ended it "
    "between them: the gradients would be of different batches; all ranks lose this iteration, and can go on with the "
    "next one"
)
BEHIND = (
    "the iteration before was interrupted by an exception {}, after its last collective, and other ranks have "
    "completed it: if it has trained, their optimizers may have made a step that is missing there, so go back to a "
    "checkpoint; all ranks lose this iteration"
)


def known_to_all(error: Exception) -> Exception:
    """Mark an error that all ranks raise. It must not be kept: its traceback holds the model, among
    others.
    """
    error.known_to_all = True
    return error


def remote_error(text: str, rank: int, *peers: int) -> RemoteError:
    """Return an error that all ranks raise because of one rank's failure."""
    return known_to_all(RemoteError(text, op="fully_shard", rank=rank, peers=peers))


class Mark(enum.IntEnum):
    """What a rank has done with the iteration before the collective that it has reached: ended it,
    begun another forward before its backward, or left it by an exception.
    """

    ENDED, UNFINISHED, INTERRUPTED = range(3)


class Negotiation:
    """Negotiates the collectives of a communicator's units; see the module.

    `control`: a communicator of the same ranks on host memory. `join`: a function that takes part
    in the collective of a code. `reset`: one that is called before an error.
    """

    def __init__(
        self, control: Communicator, units: UnitRegistry, join: Callable[[int], None], reset: Callable[[], None]
    ):
        self.control = control
        self._rank = control.rank
        self._units = units
        self._join = join
        self._reset = reset
        self.newest_iteration = 0  # of all ranks, in the last round
        self.are_idle = False  # in the last round no rank was in a pass
        self._row = numpy.zeros(10, dtype=numpy.int64)

    def negotiate(
        self, code: int, current: Pass | None, described: str = "", *, mark: Mark = Mark.ENDED, iteration: int = 0
    ) -> int:
        """Announce the collective that this rank has reached, and take part in others' until all
        ranks can make it. Record them in the pass in progress.

        Returns `AGREED`: all ranks make it. `PARTIAL`: an all-gather in which some ranks only take
        part, or keep other parts, or the end of a forward that not all have reached. `DEFERRED`: a
        reduction that must wait for the end of the backward. `RESUMED`: the others raise, since this
        rank has left an iteration, or all ranks have. `described`: the call, for errors; `iteration`:
        this rank's.
        """
        kind, row = kind_of(code), self._row
        wish = -(code & (1 << KIND_SHIFT) - 2) if kind == GATHER else _NONE  # without the last bit, post_forward
        count = mark << _COUNT | self._rank
        while True:
            key = 0 if current is None else current.key if current.clean else _UNCLEAN
            left_out = iteration if mark is Mark.UNFINISHED else 0
            row[:] = (code, -code, wish, count, -count, 0, key, -key, iteration, left_out)
            self.control.all_reduce(row, "max")
            most, least, lowest, last, first, failed, highest_key, lowest_key, newest, left_out = row.tolist()
            self.newest_iteration = newest
            if failed:
                self._reset()
                raise remote_error(FAILED.format(failed - 1), self._rank, failed - 1)
            if last >> _COUNT:
                worst = Mark(last >> _COUNT)
                if worst is Mark.UNFINISHED and left_out < newest:  # others have begun that forward, too
                    if mark is Mark.UNFINISHED:
                        return PARTIAL
                    continue
                if worst is Mark.INTERRUPTED or -first >> _COUNT == Mark.ENDED:
                    if mark is Mark.ENDED:
                        self._raise_interrupted(worst, last & (1 << _COUNT) - 1)
                    return RESUMED
            self.are_idle = highest_key == lowest_key == 0
            if current is not None:
                current.clean = current.clean and highest_key == -lowest_key
            if most == -least:
                self._record(current, code, True)
                return AGREED
            if kind_of(most) == CREATE:
                self._raise_mismatch(described or self._units.describe(code), _DIFFERENT_MODULES)
            if lowest != _NONE:
                self._record(current, GATHER << KIND_SHIFT | -lowest, wish == lowest)
                if wish == lowest:
                    return PARTIAL
                self._join(GATHER << KIND_SHIFT | -lowest)
            elif kind_of(-least) == END:
                if kind == END:
                    return PARTIAL
            elif kind_of(most) in (BARRIER, STEP):
                self._raise_mismatch(described or self._units.describe(code), _DIFFERENT_CALLS)
            elif kind == REDUCE:
                return DEFERRED

    @staticmethod
    def _record(current: Pass | None, code: int, mine: bool) -> None:
        if current is not None:
            current.record(code, mine)
            current.clean = current.clean and not (kind_of(code) == GATHER and gathers_masters(code))

    def fail(self) -> None:
        """Announce to the others, in their next calls, that this rank can't go on."""
        self._row[:] = (0, 0, _NONE, 0, 0, self._rank + 1, 0, 0, 0, 0)
        self.control.all_reduce(self._row, "max")

    # ---- Errors that all ranks raise in one round.

    def _raise_interrupted(self, mark: Mark, rank: int) -> None:
        self._reset()
        where = f"rank {rank}"
        text = SKIPPED.format(where) if mark is Mark.UNFINISHED else INTERRUPTED.format(f"on {where}")
        raise remote_error(text, self._rank, rank)

    def _raise_mismatch(self, described: str, what: tuple[str, str]) -> None:
        """Raise an error that says which ranks do what."""
        parts = [each.split("; ") for each in all_gather_object(self.control, described)]
        at = next(i for i, rows in enumerate(itertools.zip_longest(*parts)) if len(set(rows)) > 1)
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(parts):
            shown = "; ".join([each[0], *each[max(1, at) : at + 1]])
            ranks.setdefault(shown[:200], []).append(rank)
        found = " | ".join(f"rank {', '.join(map(str, who[:8]))} {what}" for what, who in ranks.items())
        self._reset()
        raise known_to_all(InvalidUsage(f"{what[0]} ({found}): {what[1]}", op="fully_shard", rank=self._rank))
