"""Controller: the ranks negotiate each all-gather and reduction before they make it, and the end of
a backward.

Ranks need not run the same units. Before a collective each rank announces, in one small all-reduce,
the collective that it has reached:

- all ranks have reached the same one: they make it.
- some want an all-gather: all ranks take part in that of the lowest unit, and those that didn't
  want it drop the result.
- otherwise there are reductions of different units: these are deferred to the end of the backward.
- at the end of its backward a rank takes part in the others' all-gathers until all ranks have ended
  theirs. All ranks then reduce the gradients that still wait on any of them; ranks without
  gradients send zeros.

So branches, unused units, one rank that evaluates alone, and more micro-batches on one rank can't
block the other ranks for ever. The cost is one all-reduce of 48 bytes for each collective, and a
wait of the host for the other ranks.

On GPUs the hosts run ahead, and must not wait for each other in each step. There a static graph is
used. An iteration, from the end of one backward to the end of the next, that was the same on all
ranks twice is replayed (`static_graph`): a rank that reaches the collective that the iteration has
next posts its row of the all-reduce and goes on without waiting. A rank may then reach something
else:

- all ranks reach it, as with an evaluation between two steps: no rank replays, and they negotiate
  as above until an iteration repeats.
- other ranks have gone on with the iteration: this rank takes part in their collectives, one after
  the other, until the iteration reaches what it wants. A unit that it doesn't use this time gets
  its zeros.
- it has gradients for a unit that the others have already reduced, or other ranks have ended the
  iteration. Their step used other gradients, and that can't be undone. This rank raises
  `InvalidUsage`, which says what it has reached, and the others raise `RemoteError` in their next
  call. If their hosts wait for a GPU that waits for a collective which this rank never makes, the
  communicator's timeout frees them, and its error names the operation and the ranks.
- it was interrupted by an exception, or can't go on: the others read that from its row, in their
  next call or an iteration later. Until then they go on, and this rank takes part with zeros.
- it dies: the others' rows fail at once, with an error that names it.

``ShardedModule.set_static_graph(False)`` has the ranks negotiate before each collective on GPUs,
too.
"""

from __future__ import annotations

import itertools
import weakref
import zlib

import numpy

from ..comm.communicator import Communicator
from ..errors import InvalidUsage, RemoteError
from ..rendezvous.control import open_control
from .static_graph import REPLAYS, StaticGraph
from .unit import Unit

__all__ = [
    "AGREED",
    "DEFERRED",
    "DONE",
    "GATHER",
    "GROUP_MASK_SHIFT",
    "MASTER_SHARDS",
    "REDUCE",
    "Controller",
    "known_to_all",
]

DONE, REDUCE, GATHER, _CREATE, _BARRIER = 1, 2, 3, 4, 5
DEFERRED, AGREED, PARTIAL = range(3)
_KIND, _COUNT = 33, 20  # bits below
GROUP_MASK_SHIFT = 24  # in a reduction's index, bits above: the mask of the unit's trainable groups
MASTER_SHARDS = 1 << 31  # in an all-gather's index: of the shards in their own dtype
_NONE = -(1 << 62)
_ACTIONS = ("", "ends a backward", "reduces", "is in a forward or gathers")
_DIFFERENT_MODULES = (
    "the ranks don't shard the same modules",
    "build the same model, and give all ranks the same wrap policy and arguments",
)
_DIFFERENT_CALLS = ("the ranks don't make the same call", "all ranks must make it, at the same place of the training")


def uses_static_graph(comm: Communicator) -> bool:
    """Whether ranks replay an iteration that repeats itself without waiting for each other: where
    hosts run ahead.
    """
    return not comm._on_host


class Controller:
    """Negotiates the collectives of a communicator's units; see the module.

    `Scheduler` derives from it and makes the collectives: it has `_reduce`, which reduces a unit,
    and `_reset`, called after an error.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.uses_static_graph = uses_static_graph(comm)
        self.static_graph = StaticGraph(self._post, _has_failed)
        self.control = open_control(comm)
        self.interrupted = 0  # forwards and backwards that an exception ended
        self._units: list[weakref.ref] = []
        self._param_count = 0  # of all units
        self._unit_of_param: list[int] = []
        self._row = numpy.zeros(6, dtype=numpy.int64)
        self._reduced: set[int] = set()  # units that this rank has reduced because the others did

    def add(self, unit: Unit, described: str) -> None:
        """Register a unit. Raises `InvalidUsage` on all ranks where they don't make the same one
        now.
        """
        self.negotiate(_CREATE, zlib.crc32(described.encode()), f"shards {described}")
        unit.index = len(self._units)
        unit.first_param = self._param_count
        self._param_count += len(unit.params)
        self._unit_of_param += [unit.index] * len(unit.params)
        self._units.append(weakref.ref(unit))

    def same_number(self, number: int) -> bool:
        """Return whether all ranks have the same number, a signed one of 64 bits. A collective."""
        if self.control is None:
            return True
        ends = numpy.array([number, -number], dtype=numpy.int64)
        self.control.all_reduce(ends, "max")
        return bool(ends[0] == -ends[1])

    # ---- Negotiating.

    def negotiate(self, kind: int, index: int = 0, described: str = "", *, post_forward: bool = False) -> int:
        """Announce the collective that this rank has reached, and take part in others' until all
        ranks can make it.

        Returns `AGREED`: all ranks make it. `PARTIAL`: an all-gather in which some ranks only take
        part, or keep other parts (`post_forward`). `DEFERRED`: a reduction that must wait for the
        end of the backward.
        """
        if self.control is None:
            return AGREED
        code, row = kind << _KIND | index << 1 | post_forward, self._row
        count = self.interrupted << _COUNT | self.comm.rank
        wish = -index if kind == GATHER else _NONE
        while True:
            if kind != DONE and self._replay(code):
                return AGREED
            row[:] = (code, -code, wish, count, -count, 0)
            self.control.all_reduce(row, "max")
            most, least, lowest, newest, oldest, failed = row.tolist()
            if lowest == REPLAYS:
                if self._join_replay(kind, code):
                    return AGREED
                continue
            self.static_graph.stop_replay_if_any()
            if failed:
                self._reset()
                raise self._remote_error(
                    f"rank {failed - 1} could not go on, in its forward, and raised the reason there"
                )
            if newest >> _COUNT != -oldest >> _COUNT:
                self._reset()
                self.interrupted = newest >> _COUNT
                ahead = newest & (1 << _COUNT) - 1
                where = "here" if ahead == self.comm.rank else f"on rank {ahead}"
                raise self._remote_error(
                    f"a forward or backward was interrupted by an exception {where} and not on all ranks: their "
                    "gradients would be of different batches; catch exceptions on all ranks, or on none"
                )
            if self.uses_static_graph:
                plain = kind in (REDUCE, DONE) or (kind == GATHER and not post_forward and index < MASTER_SHARDS)
                self.static_graph.record(code, plain and most == -least)
            if most == -least:
                return AGREED
            if most >> _KIND == _CREATE:
                self._raise_mismatch(described or _ACTIONS[kind], _DIFFERENT_MODULES)
            if lowest != _NONE:
                if wish == lowest:
                    return PARTIAL
                self._join_all_gather(-lowest)
            elif most >> _KIND == _BARRIER:
                self._raise_mismatch(described or _ACTIONS[kind], _DIFFERENT_CALLS)
            elif kind == REDUCE:
                return DEFERRED

    # ---- Replaying an iteration.

    def set_static_graph(self, static_graph: bool) -> None:
        """Set whether iterations that repeat themselves are replayed. A collective, which blocks."""
        self.barrier(f"set_static_graph({static_graph})")
        self.uses_static_graph = static_graph
        self.static_graph = StaticGraph(self._post, _has_failed)

    def _post(self, row: numpy.ndarray):
        return self.control.all_reduce(row, "max", async_op=True)

    def _replay(self, code: int, flags: numpy.ndarray | None = None) -> bool:
        """Replay the next collective without waiting, where it is `code`; return whether it was."""
        if self.static_graph.next is None:
            return False
        count = self.interrupted << _COUNT | self.comm.rank
        self._row[:] = (code, -code, REPLAYS, count, -count, 0)
        return self.static_graph.replay(code, self._row, flags)

    def _join_replay(self, kind: int, code: int) -> bool:
        """Make the collective that others have replayed; return True where it ends a backward, as
        this rank does.
        """
        theirs = self.static_graph.next
        does = theirs >> _KIND
        if does == DONE:
            self.static_graph.advance()
            if kind == DONE:
                return True
            self._raise_divergence(f"this rank {self._describe_code(code)} where the others have ended their backward")
        self.static_graph.advance()
        if not self._join_collective(theirs):
            self._raise_divergence(
                f"the others do something with unit {theirs >> 1 & (1 << GROUP_MASK_SHIFT) - 1} that this rank can't"
            )
        return False

    def _join_collective(self, code: int) -> bool:
        """Take part in a collective whose result only others need; return whether this rank could."""
        index = code >> 1 & ((1 << _KIND - 1) - 1)
        unit = self._units[index & (1 << GROUP_MASK_SHIFT) - 1]()
        if unit is None:
            return False
        if code >> _KIND == GATHER:
            unit.join_all_gather()
        elif unit.gradients.trainable_mask == index >> GROUP_MASK_SHIFT:
            self._reduced.add(unit.index)
            self._reduce(unit)
        else:
            return False
        return True

    def _describe_code(self, code: int) -> str:
        """Return the text of a code, for an error."""
        index = code >> 1 & (1 << GROUP_MASK_SHIFT) - 1
        unit = self._units[index]() if index < len(self._units) and code >> _KIND in (GATHER, REDUCE) else None
        return _ACTIONS[min(code >> _KIND, GATHER)] + ("" if unit is None else f" {unit!r}")

    def _raise_divergence(self, what: str) -> None:
        """Raise `InvalidUsage`, and have the others raise, where a rank has left the iteration that
        the others replay.
        """
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

    def _remote_error(self, text: str) -> RemoteError:
        """Return an error that all ranks raise."""
        return known_to_all(RemoteError(text, op="fully_shard", rank=self.comm.rank))

    def _raise_mismatch(self, described: str, what: tuple[str, str]) -> None:
        """Raise an error that says which ranks do what."""
        text = described.encode()
        length = numpy.array([len(text)], dtype=numpy.int64)
        self.control.all_reduce(length, "max")
        table = numpy.zeros((self.comm.size, int(length[0])), dtype=numpy.uint8)
        table[self.comm.rank, : len(text)] = numpy.frombuffer(text, dtype=numpy.uint8)
        self.control.all_reduce(table, "max")
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in table]
        parts = [each.split("; ") for each in texts]
        at = next(i for i, rows in enumerate(itertools.zip_longest(*parts)) if len(set(rows)) > 1)
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(parts):
            shown = "; ".join([each[0], *each[max(1, at) : at + 1]])
            ranks.setdefault(shown[:200], []).append(rank)
        found = " | ".join(f"rank {', '.join(map(str, who[:8]))} {what}" for what, who in ranks.items())
        self._reset()
        raise known_to_all(InvalidUsage(f"{what[0]} ({found}): {what[1]}", op="fully_shard", rank=self.comm.rank))

    def fail(self) -> None:
        """Announce to the others, in their next calls, that this rank can't go on."""
        while self.control is not None:
            self._row[:] = (0, 0, _NONE, 0, 0, self.comm.rank + 1)
            self.control.all_reduce(self._row, "max")
            if self._row[2] != REPLAYS:
                break
            theirs = self.static_graph.next  # they go on until they read it
            self.static_graph.advance()
            if theirs >> _KIND != DONE:
                self._join_collective(theirs)
        self.static_graph.stop_replay_if_any()
        self._reset()

    def _join_all_gather(self, index: int) -> None:
        """Take part in the all-gather that other ranks want."""
        masters, index = divmod(index, MASTER_SHARDS)
        unit = self._units[index]() if index < len(self._units) else None
        if unit is None:
            raise InvalidUsage(
                f"another rank gathers unit {index}, of a module that is gone here: keep it as long as the others do",
                op="fully_shard", rank=self.comm.rank,
            )  # fmt: skip
        unit.join_all_gather(masters)

    def barrier(self, described: str) -> None:
        """Wait for all ranks to make the same call; take part in the all-gathers that they make
        before it.

        Raises `InvalidUsage` on all ranks where one ends a backward or makes another call.
        """
        self.negotiate(_BARRIER, zlib.crc32(described.encode()), described)

    def _reduce_flags(self, flags: numpy.ndarray, units: list[Unit]) -> numpy.ndarray:
        """Return the element-wise maximum of all ranks' flags at the end of a backward."""
        here = {unit.index for unit in units if unit.reduce_grads and unit.gradients.has_gradients()} & self._reduced
        if here:
            unit = self._units[min(here)]()
            self._raise_divergence(f"{unit!r} has gradients here, and the others have reduced it before")
        if self.control is None or self._replay(DONE << _KIND, self._flags_of_used_units(flags)):
            self._reduced.clear()
            return flags
        self.negotiate(DONE)
        self._reduced.clear()
        if self.static_graph.next is not None:  # others have ended the iteration as they did before
            for unit in units:
                flags[unit.index] = unit.reduce_grads and unit.gradients.has_gradients()
            if not self.static_graph.covers(self._flags_of_used_units(flags)):
                self._raise_divergence(
                    "this rank has gradients at the end of its backward that it didn't have in the others"
                )
            return self.static_graph.end_flags().copy()
        if not self.uses_static_graph:
            self.control.all_reduce(flags, "max")
            return flags
        both = numpy.concatenate([flags, 255 - flags])
        self.control.all_reduce(both, "max")
        flags, least = both[: len(flags)], 255 - both[len(flags) :]
        used = self._flags_of_used_units(flags)
        had_all = bool((least >= used).all())
        # Nothing is left to reduce, and all ranks had all gradients.
        self.static_graph.end(used, had_all and not flags[: len(self._units)].any())
        return flags

    def _flags_of_used_units(self, flags: numpy.ndarray) -> numpy.ndarray | None:
        """Return the flags with zeros for units without gradients; None where no iteration can be
        replayed.

        The modules of such units may have been collected on some ranks and not yet on others.
        """
        if not self.uses_static_graph:
            return None
        count = len(self._units)
        units = numpy.array(self._unit_of_param, dtype=numpy.int64)
        used = numpy.zeros(count, dtype=bool)
        used[units[flags[count:] >= 2]] = True
        kept = flags.copy()
        kept[count:][~used[units]] = 0
        return kept


def _has_failed(row: numpy.ndarray) -> bool:
    """Whether a row says that a rank can't go on, or that some ranks were interrupted and others
    weren't.
    """
    _, _, _, newest, oldest, failed = row.tolist()
    return bool(failed) or newest >> _COUNT != -oldest >> _COUNT


def known_to_all(error: Exception) -> Exception:
    """Mark an error that all ranks raise. It must not be kept: its traceback holds the model, among
    others.
    """
    error.known_to_all = True
    return error
