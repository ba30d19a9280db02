"""Negotiation: the ranks agree on each collective, by an all-reduce of 64 bytes, before they make it.

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
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy

from ..comm.communicator import Communicator
from ..comm.consensus import all_gather_object
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

__all__ = ["AGREED", "DEFERRED", "FAILED", "INTERRUPTED", "PARTIAL", "Negotiation", "known_to_all", "remote_error"]

DEFERRED, AGREED, PARTIAL = range(3)
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
    "different batches; catch exceptions on all ranks, or on none"
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
        self.interrupted = 0  # forwards and backwards that an exception ended
        self.are_idle = False  # in the last round no rank was in a pass
        self._row = numpy.zeros(8, dtype=numpy.int64)

    def negotiate(self, code: int, current: Pass | None, described: str = "") -> int:
        """Announce the collective that this rank has reached, and take part in others' until all
        ranks can make it. Record them in the pass in progress.

        Returns `AGREED`: all ranks make it. `PARTIAL`: an all-gather in which some ranks only take
        part, or keep other parts, or the end of a forward that not all have reached. `DEFERRED`: a
        reduction that must wait for the end of the backward. `described`: the call, for errors.
        """
        kind, row = kind_of(code), self._row
        wish = -(code & (1 << KIND_SHIFT) - 2) if kind == GATHER else _NONE  # without the last bit, post_forward
        count = self.interrupted << _COUNT | self._rank
        while True:
            key = 0 if current is None else current.key if current.clean else _UNCLEAN
            row[:] = (code, -code, wish, count, -count, 0, key, -key)
            self.control.all_reduce(row, "max")
            most, least, lowest, newest, oldest, failed, highest_key, lowest_key = row.tolist()
            if failed:
                self._reset()
                raise remote_error(FAILED.format(failed - 1), self._rank, failed - 1)
            if newest >> _COUNT != -oldest >> _COUNT:
                self._raise_interrupted(newest)
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
        self._row[:] = (0, 0, _NONE, 0, 0, self._rank + 1, 0, 0)
        self.control.all_reduce(self._row, "max")

    # ---- Errors that all ranks raise in one round.

    def _raise_interrupted(self, newest: int) -> None:
        self._reset()
        self.interrupted = newest >> _COUNT
        ahead = newest & (1 << _COUNT) - 1
        where = "here" if ahead == self._rank else f"on rank {ahead}"
        raise remote_error(INTERRUPTED.format(where), self._rank, ahead)

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
