"""Agreement: what the ranks agree on before each gather and reduction, and at the end of a backward.

Ranks need not run the same units. Before a collective each tells, in one small all-reduce, which one it has come to:

- all the same: they do it.
- some want a gather: all take part in the one of the lowest unit; those that didn't want it let the result go.
- else reductions of different units: these wait for the end of the backward.
- at the end of its backward a rank helps with the others' gathers until all are there; what gradients still wait on
  any rank are then reduced, by all, with zeros from those that have none.

So branches, unused units, one rank that evaluates alone, or more micro-batches on one rank can't block the others for
ever. The price is one all-reduce of some 60 bytes a collective, and that a rank waits on the host for the others.

On GPUs the hosts run ahead, and must not wait for each other in each step. There a round, from the end of a backward to
the end of the next, that was the same on all ranks twice is followed (`rounds`): a rank that comes to what the round
has next posts its row and goes on with no wait. What then becomes of a rank that comes to something else:

- all ranks come to it, as to an evaluation between two steps: none follows, and they agree as above until a round
  repeats itself.
- other ranks have gone on with the round: this one takes part in what they do, one collective after the other, until
  the round comes to what it wants. So a unit that it doesn't use this time gets its zeros.
- it has gradients for a unit that the others have reduced by then, or other ranks have ended the round: their step is
  one of other gradients, and that can't be mended. It raises `InvalidUsage` that says what it came to, and the others
  `RemoteError` in what they do next. A host that waits for its GPU then, for a collective that this rank doesn't come
  to, is freed by the communicator's timeout, whose error names the operation and the ranks.
- it was interrupted by an exception, or can't go on: the others learn it from its row, in what they do next or a round
  later; until then they go on, and it with them, with zeros.
- it dies: the others' rows fail at once with an error that names it.

`ShardedModule.set_static_graph(False)` has the ranks agree before each collective on GPUs, too.
"""

from __future__ import annotations

import itertools
import weakref
import zlib

import numpy

from ..comm.communicator import Communicator
from ..errors import InvalidUsage, RemoteError
from ..rendezvous.control import control_of
from .rounds import FOLLOWS, Rounds
from .unit import Unit

__all__ = ["ALIKE", "DONE", "GATHER", "KINDS", "LATER", "MASTERS", "REDUCE", "Agreement", "known_to_all"]

DONE, REDUCE, GATHER, _MAKE, _MEET = 1, 2, 3, 4, 5
LATER, ALIKE, HELPED = range(3)
_KIND, _COUNT = 33, 20  # bits below
KINDS = 24  # in a reduction's number: which of the unit's groups have gradients
MASTERS = 1 << 31  # in a gather's number: of the pieces in their own dtype
_NONE = -(1 << 62)
_DOES = ("", "ends a backward", "reduces", "is in a forward or gathers")
_SAME_MODULES = (
    "the ranks don't shard the same modules",
    "build the same model, and give all ranks the same wrap policy and arguments",
)
_SAME_CALL = ("the ranks don't make the same call", "all ranks must make it, at the same place of the training")


def follows_rounds(comm: Communicator) -> bool:
    """Tell whether ranks go on with a round that repeats itself, with no wait for each other: where hosts run ahead."""
    return not comm._on_host


class Agreement:
    """What the ranks of a communicator agree on before each collective of their units; see the module.

    `Order` derives from it, and does what is agreed on: `_reduce` a unit, and `_reset` after an error.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.follows = follows_rounds(comm)
        self.rounds = Rounds(self._post, _has_failed)
        self.control = control_of(comm)
        self.interrupted = 0  # forwards and backwards that an exception has left
        self._units: list[weakref.ref] = []
        self._slots = 0  # of all units
        self._unit_of_slot: list[int] = []
        self._row = numpy.zeros(6, dtype=numpy.int64)
        self._reduced: set[int] = set()  # units that this rank has reduced with what it had, since the others did

    def add(self, unit: Unit, described: str) -> None:
        """Take a unit up; `InvalidUsage` on all ranks where they don't make the same one now."""
        self.agree(_MAKE, zlib.crc32(described.encode()), f"shards {described}")
        unit.index = len(self._units)
        unit.first_slot = self._slots
        self._slots += len(unit.slots)
        self._unit_of_slot += [unit.index] * len(unit.slots)
        self._units.append(weakref.ref(unit))

    def same_number(self, number: int) -> bool:
        """Tell whether all ranks have the same number, of 64 bits with its sign. A collective."""
        if self.control is None:
            return True
        ends = numpy.array([number, -number], dtype=numpy.int64)
        self.control.all_reduce(ends, "max")
        return bool(ends[0] == -ends[1])

    # ---- Agreeing.

    def agree(self, kind: int, index: int = 0, described: str = "", *, near: bool = False) -> int:
        """Tell the others what this rank has come to, and help until all do it.

        Give `ALIKE`: all do; `HELPED`: a gather, in which others only help or have kept other parts (`near`); `LATER`:
        a reduction that must wait.
        """
        if self.control is None:
            return ALIKE
        code, row = kind << _KIND | index << 1 | near, self._row
        count = self.interrupted << _COUNT | self.comm.rank
        wish = -index if kind == GATHER else _NONE
        while True:
            if kind != DONE and self._follow(code):
                return ALIKE
            row[:] = (code, -code, wish, count, -count, 0)
            self.control.all_reduce(row, "max")
            most, least, lowest, newest, oldest, failed = row.tolist()
            if lowest == FOLLOWS:
                if self._take_part(kind, code):
                    return ALIKE
                continue
            self.rounds.leave_if_followed()
            if failed:
                self._reset()
                raise self._remote(f"rank {failed - 1} could not go on, in its forward, and raised the reason there")
            if newest >> _COUNT != -oldest >> _COUNT:
                self._reset()
                self.interrupted = newest >> _COUNT
                ahead = newest & (1 << _COUNT) - 1
                where = "here" if ahead == self.comm.rank else f"on rank {ahead}"
                raise self._remote(
                    f"a forward or backward was interrupted by an exception {where} and not on all ranks: their "
                    "gradients would be of different batches; catch exceptions on all ranks, or on none"
                )
            if self.follows:
                plain = kind in (REDUCE, DONE) or (kind == GATHER and not near and index < MASTERS)
                self.rounds.note(code, plain and most == -least)
            if most == -least:
                return ALIKE
            if most >> _KIND == _MAKE:
                self._differ(described or _DOES[kind], _SAME_MODULES)
            if lowest != _NONE:
                if wish == lowest:
                    return HELPED
                self._help(-lowest)
            elif most >> _KIND == _MEET:
                self._differ(described or _DOES[kind], _SAME_CALL)
            elif kind == REDUCE:
                return LATER

    # ---- Following a round.

    def set_follows(self, follows: bool) -> None:
        """Say whether rounds that repeat themselves are followed. A collective, which blocks."""
        self.meet(f"set_static_graph({follows})")
        self.follows = follows
        self.rounds = Rounds(self._post, _has_failed)

    def _post(self, row: numpy.ndarray):
        return self.control.all_reduce(row, "max", async_op=True)

    def _follow(self, code: int, flags: numpy.ndarray | None = None) -> bool:
        """Go on with no wait where a round is followed that has `code` next; tell whether."""
        if self.rounds.next is None:
            return False
        count = self.interrupted << _COUNT | self.comm.rank
        self._row[:] = (code, -code, FOLLOWS, count, -count, 0)
        return self.rounds.follow(code, self._row, flags)

    def _take_part(self, kind: int, code: int) -> bool:
        """Do what others, which follow the round, have gone on with; True: it ends a backward, as this rank does."""
        theirs = self.rounds.next
        does = theirs >> _KIND
        if does == DONE:
            self.rounds.advance()
            if kind == DONE:
                return True
            self._diverge(f"this rank {self._says(code)} where the others have ended their backward")
        self.rounds.advance()
        if not self._carry_out(theirs):
            self._diverge(f"the others do something with unit {theirs >> 1 & (1 << KINDS) - 1} that this rank can't")
        return False

    def _carry_out(self, code: int) -> bool:
        """Take part in a collective of which only others need the result; tell whether this rank could."""
        index = code >> 1 & ((1 << _KIND - 1) - 1)
        unit = self._units[index & (1 << KINDS) - 1]()
        if unit is None:
            return False
        if code >> _KIND == GATHER:
            unit.help_gather()
        elif unit.kinds == index >> KINDS:
            self._reduced.add(unit.index)
            self._reduce(unit)
        else:
            return False
        return True

    def _says(self, code: int) -> str:
        index = code >> 1 & (1 << KINDS) - 1
        unit = self._units[index]() if index < len(self._units) and code >> _KIND in (GATHER, REDUCE) else None
        return _DOES[min(code >> _KIND, GATHER)] + ("" if unit is None else f" {unit!r}")

    def _diverge(self, what: str) -> None:
        """Raise `InvalidUsage`, and have the others raise, where ranks that don't wait for each other have parted."""
        self.fail()
        raise known_to_all(
            InvalidUsage(
                f"{what}: on GPUs the ranks don't wait for each other once their steps have been the same; give all "
                "ranks the same units in the same order, or call set_static_graph(False), which has them agree before "
                "each collective",
                op="fully_shard",
                rank=self.comm.rank,
            )  # fmt: skip
        )

    def _remote(self, text: str) -> RemoteError:
        """Give an error of which all ranks know."""
        return known_to_all(RemoteError(text, op="fully_shard", rank=self.comm.rank))

    def _differ(self, described: str, what: tuple[str, str]) -> None:
        """Raise an error that says which ranks do what."""
        text = described.encode()
        length = numpy.array([len(text)], dtype=numpy.int64)
        self.control.all_reduce(length, "max")
        table = numpy.zeros((self.comm.size, int(length[0])), dtype=numpy.uint8)
        table[self.comm.rank, : len(text)] = numpy.frombuffer(text, dtype=numpy.uint8)
        self.control.all_reduce(table, "max")
        told = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in table]
        parts = [each.split("; ") for each in told]
        at = next(i for i, rows in enumerate(itertools.zip_longest(*parts)) if len(set(rows)) > 1)
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(parts):
            shown = "; ".join([each[0], *each[max(1, at) : at + 1]])
            ranks.setdefault(shown[:200], []).append(rank)
        found = " | ".join(f"rank {', '.join(map(str, who[:8]))} {what}" for what, who in ranks.items())
        self._reset()
        raise known_to_all(InvalidUsage(f"{what[0]} ({found}): {what[1]}", op="fully_shard", rank=self.comm.rank))

    def fail(self) -> None:
        """Tell the others, in what they do next, that this rank can't go on."""
        while self.control is not None:
            self._row[:] = (0, 0, _NONE, 0, 0, self.comm.rank + 1)
            self.control.all_reduce(self._row, "max")
            if self._row[2] != FOLLOWS:
                break
            theirs = self.rounds.next  # they go on until they know of it
            self.rounds.advance()
            if theirs >> _KIND != DONE:
                self._carry_out(theirs)
        self.rounds.leave_if_followed()
        self._reset()

    def _help(self, index: int) -> None:
        masters, index = divmod(index, MASTERS)
        unit = self._units[index]() if index < len(self._units) else None
        if unit is None:
            raise InvalidUsage(
                f"another rank gathers unit {index}, of a module that is gone here: keep it as long as the others do",
                op="fully_shard", rank=self.comm.rank,
            )  # fmt: skip
        unit.help_gather(masters)

    def meet(self, described: str) -> None:
        """Wait for all ranks to come to the same call, and help with what they do before; `InvalidUsage` where one
        ends a backward or makes another call.
        """
        self.agree(_MEET, zlib.crc32(described.encode()), described)

    def _agree_on(self, flags: numpy.ndarray, units: list[Unit]) -> numpy.ndarray:
        """Give the flags of all ranks at the end of a backward, each the largest."""
        here = {unit.index for unit in units if unit.syncs and unit.has_gradients()} & self._reduced
        if here:
            unit = self._units[min(here)]()
            self._diverge(f"{unit!r} has gradients here, and the others have reduced it before")
        if self.control is None or self._follow(DONE << _KIND, self._of_used_units(flags)):
            self._reduced.clear()
            return flags
        self.agree(DONE)
        self._reduced.clear()
        if self.rounds.next is not None:  # others have ended the round as they did before
            for unit in units:
                flags[unit.index] = unit.syncs and unit.has_gradients()
            if not self.rounds.covers(self._of_used_units(flags)):
                self._diverge("this rank has gradients at the end of its backward that it didn't have in the others")
            return self.rounds.end_flags().copy()
        if not self.follows:
            self.control.all_reduce(flags, "max")
            return flags
        both = numpy.concatenate([flags, 255 - flags])
        self.control.all_reduce(both, "max")
        flags, least = both[: len(flags)], 255 - both[len(flags) :]
        used = self._of_used_units(flags)
        had_all = bool((least >= used).all())
        # None is left to be reduced, and all ranks had all gradients.
        self.rounds.end(used, had_all and not flags[: len(self._units)].any())
        return flags

    def _of_used_units(self, flags: numpy.ndarray) -> numpy.ndarray | None:
        """Return the flags with zeros for units without gradients: their modules may be gone on some ranks and not on
        others, where nothing has collected them yet. None where no round can be followed.
        """
        if not self.follows:
            return None
        count = len(self._units)
        units = numpy.array(self._unit_of_slot, dtype=numpy.int64)
        used = numpy.zeros(count, dtype=bool)
        used[units[flags[count:] >= 2]] = True
        kept = flags.copy()
        kept[count:][~used[units]] = 0
        return kept


def _has_failed(row: numpy.ndarray) -> bool:
    """Tell whether a row says that a rank can't go on, or was interrupted and others weren't."""
    _, _, _, newest, oldest, failed = row.tolist()
    return bool(failed) or newest >> _COUNT != -oldest >> _COUNT


def known_to_all(error: Exception) -> Exception:
    """Mark an error of which all ranks know. It isn't kept: its traceback holds what was in use, the model for one."""
    error.known_to_all = True
    return error
