"""CommonReads: when units may lie in the ranks' shards themselves, and the waits of the ranks around that.

On one host the ranks' shards lie in one memory that all of them map. A unit whose full parameters view it copies
nothing. No rank may write to its shards meanwhile, so all ranks wait for each other before the first read of an
outermost forward, at the forward's end, and at the backward's end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..comm import is_on_one_host
from ..comm.communicator import Communicator
from ..comm.tags import make_tag, tagged
from ..errors import InvalidUsage
from ..torch_compat import is_transformed

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["CommonReads"]

_COPIED_STEPS = 3  # of a unit, before it reads the ranks' shards where they are
_FORWARD_TAG = make_tag("the end of a forward")


class CommonReads:
    """The reads of one communicator's units, whose order is the same on all ranks.

    `readers`: the units that have read since the last outermost forward began.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._is_possible = comm.size > 1 and is_on_one_host(comm)
        self._steps = 0  # backwards that all ranks have ended together
        self._first_steps: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()  # when they were made
        # Of the shards, when the outermost forward in progress has begun.
        self._versions: weakref.WeakKeyDictionary[Unit, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self.readers: weakref.WeakSet[Unit] = weakref.WeakSet()
        self._is_open = False  # ranks may read, in the forward or backward in progress

    def add(self, unit: Unit) -> None:
        """Add a new unit."""
        self._first_steps[unit] = self._steps

    def may_read(self, unit: Unit) -> bool:
        """Whether a unit that is gathered now may read the other ranks' shards; the same on all ranks.

        In its first steps it copies: by then a program has shown whether it writes to parameters inside of a
        forward. A unit that stays gathered between forwards copies, too: ranks may make different numbers of these.
        """
        if not self._is_possible:
            return False
        stays = unit.reshard_after_forward is False or not unit.reshard_after_backward
        is_new = self._steps - self._first_steps[unit] < _COPIED_STEPS
        return not (stays or is_new or unit.writes_inside or is_transformed())

    def begin_forward(self, units: Iterable[Unit]) -> None:
        """Begin an outermost forward. What was read before is dropped: ranks may have written to their shards since."""
        for unit in list(self.readers):
            if not unit.stays_gathered:
                unit.reshard()
                self.readers.discard(unit)
        self._is_open = False
        if self._is_possible:
            for unit in units:
                self._versions[unit] = unit.read_versions()

    def note_writes(self, unit: Unit) -> bool:
        """Have a unit copy from now on if its shards were written to inside of the outermost forward; return that."""
        is_written = self._is_possible and self._versions.get(unit) != unit.read_versions()
        unit.writes_inside = unit.writes_inside or is_written
        return is_written

    def begin(self, unit: Unit, *, in_forward: bool) -> None:
        """Note that a unit reads. The first one of an outermost forward waits until all ranks have begun theirs."""
        is_first = in_forward and not self._is_open
        self.readers.add(unit)
        self._is_open = True
        if is_first:
            with tagged(unit.tag, self._comm):
                self._comm.barrier()

    def note_backward(self, unit: Unit) -> None:
        """Note that a backward uses a unit that has stayed gathered."""
        self._is_open = self._is_open or unit.reads_common

    def end(self, tag: int) -> None:
        """Wait for all ranks where they may still read this rank's shards."""
        if self._is_open:
            self._is_open = False
            with tagged(tag, self._comm):
                self._comm.barrier()

    def end_forward(self, units: Iterable[Unit]) -> None:
        """End an outermost forward of some units.

        Raises:
            InvalidUsage: Parameters were written to after they had been read.
        """
        self.end(_FORWARD_TAG)
        for unit in units:
            if self.note_writes(unit) and unit in self.readers:
                raise InvalidUsage(
                    f"parameters of {unit.name} were written to inside of a forward, after it had read them where the "
                    "ranks write: do it before or after the forward, or from the first step on, so that the ranks copy "
                    "the parameters",
                    op="forward", rank=self._comm.rank,
                )  # fmt: skip

    def end_step(self) -> None:
        """Note that all ranks have waited for each other at the end of a backward."""
        self._is_open = False
        self._steps += 1
