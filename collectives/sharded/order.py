"""Order: what the ranks agree on before each gather and reduction, and what a backward still owes at its end.

Ranks need not run the same units. Before a collective each tells, in one small all-reduce, which one it has come to:

- all the same: they do it.
- some want a gather: all take part in the one of the lowest unit; those that didn't want it let the result go.
- else reductions of different units: these wait for the end of the backward.
- at the end of its backward a rank helps with the others' gathers until all are there; what gradients still wait on
  any rank are then reduced, by all, with zeros from those that have none.

So branches, unused units, one rank that evaluates alone, or more micro-batches on one rank can't block the others for
ever. The price is one all-reduce of some 60 bytes a collective, and that a GPU's rank waits on the host for the others.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import deque

import numpy
import torch

from ..communicator import Communicator
from ..control import control_of
from ..errors import InvalidUsage, RemoteError
from ..lanes import overlaps
from ..torch_compat import current_graph_task_id
from .loans import Loans
from .unit import State, Unit

__all__ = ["Order", "all_orders", "order_of", "orders_of_parameters", "units_of_parameters"]

_DONE, _REDUCE, _GATHER, _MAKE, _MEET = 1, 2, 3, 4, 5
_MOST_FREED = 2
LATER, ALIKE, HELPED = range(3)
_KIND, _COUNT = 33, 20  # bits below
_KINDS = 24  # in a reduction's number: which of the unit's groups have gradients
_MASTERS = 1 << 31  # in a gather's number: of the pieces in their own dtype
_NONE = -(1 << 62)
_DOES = ("", "ends a backward", "reduces", "is in a forward or gathers")
_SAME_MODULES = (
    "the ranks don't shard the same modules",
    "build the same model, and give all ranks the same wrap policy and arguments",
)
_SAME_CALL = ("the ranks don't make the same call", "all ranks must make it, at the same place of the training")

# id of a communicator -> its order, which holds it
_orders: dict[int, Order] = {}


def order_of(comm: Communicator) -> Order:
    """Give the order of a communicator's units; the first call, which all ranks must make, opens it."""
    for key, order in list(_orders.items()):
        if order.comm.closed:
            del _orders[key]
            if isinstance(order.control, Communicator):
                order.control.close()
    if id(comm) not in _orders:
        _orders[id(comm)] = Order(comm)
    return _orders[id(comm)]


class Order:
    """The units of a communicator and the order of their collectives, in forward and backward; see the module."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.loans = Loans()
        self.control = control_of(comm)
        self._units: list[weakref.ref] = []
        self._slots = 0  # of all units
        self._row = numpy.zeros(6, dtype=numpy.int64)
        # Gathers and reductions run beside the computation where there is something to run them on.
        self.beside = not comm._on_host or overlaps(comm)
        self.interrupted = 0  # forwards and backwards that an exception has left
        self.depth = 0  # forwards of units that this thread is in
        self.last_backward = True
        self.limited = True  # on a GPU, by `limit_all_gathers`
        self._freed: deque = deque()  # events behind which gathered parameters were let go
        self._backward_order: list[weakref.ref] = []
        self.begins = self._begins = 0  # how many of them it came to before it had let go of any
        self._left = False  # it has let go of one
        self._forward_order: list[weakref.ref] = []
        self._seen_forward: list[Unit] = []
        self._seen_backward: list[Unit] = []
        self.task: int | None = None  # the backward under way
        self._accumulated: list = []  # pieces of which people want to know that their gradients are there
        self._unfinished: list = []  # functions that wait for reductions and end them

    def add(self, unit: Unit, described: str) -> None:
        """Take a unit up; `InvalidUsage` on all ranks where they don't make the same one now."""
        self.agree(_MAKE, zlib.crc32(described.encode()), f"shards {described}")
        unit.index = len(self._units)
        unit.first_slot = self._slots
        unit.freed = self._freed
        self._slots += len(unit.slots)
        self._units.append(weakref.ref(unit))

    def same_number(self, number: int) -> bool:
        """Tell whether all ranks have the same number, of 64 bits with its sign. A collective."""
        if self.control is None:
            return True
        ends = numpy.array([number, -number], dtype=numpy.int64)
        self.control.all_reduce(ends, "max")
        return bool(ends[0] == -ends[1])

    @property
    def units(self) -> list[Unit]:
        """Those that still live."""
        return _living(self._units)

    # A unit holds its modules: what the order keeps from one step to the next must not hold units.

    @property
    def forward_order(self) -> list[Unit]:
        """The units of the last forward, each once."""
        return _living(self._forward_order)

    @property
    def backward_order(self) -> list[Unit]:
        """The units of the last backward, each once."""
        return _living(self._backward_order)

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
        wish = -index if kind == _GATHER else _NONE
        while True:
            row[:] = (code, -code, wish, count, -count, 0)
            self.control.all_reduce(row, "max")
            most, least, lowest, newest, oldest, failed = row.tolist()
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
            elif kind == _REDUCE:
                return LATER

    def _remote(self, text: str) -> RemoteError:
        """Give an error of which all ranks know."""
        return _known(RemoteError(text, op="fully_shard", rank=self.comm.rank))

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
        raise _known(InvalidUsage(f"{what[0]} ({found}): {what[1]}", op="fully_shard", rank=self.comm.rank))

    def fail(self) -> None:
        """Tell the others, in what they do next, that this rank can't go on."""
        if self.control is not None:
            self._row[:] = (0, 0, _NONE, 0, 0, self.comm.rank + 1)
            self.control.all_reduce(self._row, "max")
        self._reset()

    def _help(self, index: int) -> None:
        masters, index = divmod(index, _MASTERS)
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

    # ---- Gathering.

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather_masters(self, unit: Unit) -> list[torch.Tensor]:
        """Gather a unit's pieces in their own dtype, beside what it has gathered for forward and backward.

        Gives a flat buffer for each of the unit's groups, to be let go of at once.
        """
        try:
            unit.check()
        except Exception:
            self.fail()
            raise
        if unit.gathers:
            self.agree(_GATHER, _MASTERS | unit.index)
        return [group.gather_masters() for group in unit.groups]

    def gather(self, unit: Unit, *, beside: bool = False) -> None:
        """Begin to gather a unit, if nothing has; `beside`: in advance, while something else is computed."""
        if unit.state is State.SHARDED:
            if self.limited and self._freed is not None and len(self._freed) >= _MOST_FREED:
                self._freed.popleft().synchronize()
            near = unit.is_near
            if unit.gathers:
                near = self.agree(_GATHER, unit.index, near=near) == ALIKE and near
            unit.start_gather(async_op=beside, near=near)

    def need(self, unit: Unit) -> None:
        """Have a unit unsharded."""
        if not unit.is_shown:
            self.gather(unit)
            unit.show()

    def demand(self, unit: Unit) -> None:
        """Have a unit unsharded with the parameters that the forward has used."""
        if unit.hook is not None:
            unit.hook.check_use(unit)
        self.need(unit)

    def _advance(self, unit: Unit, named: list[Unit] | None, order: list[Unit]) -> None:
        """Gather in advance what comes behind a unit: those that were named for it, or the next of the last time."""
        if named is None:
            if not self.beside or unit not in order:
                return
            at = order.index(unit) + 1
            named = [] if any(each.state is State.GATHERING for each in order) else order[at : at + 1]
        for each in named:
            self.gather(each, beside=True)

    # ---- Forward.

    def begin_forward(self, unit: Unit, in_backward: bool) -> None:
        if not in_backward and self.task is not None:  # the backward before never came to its end
            self._reset()
            self.interrupted += 1
        if self.depth == 0 and not in_backward:
            self._seen_forward = []
        self.depth += 1

    def forward(self, unit: Unit, in_backward: bool) -> None:
        """Have a unit unsharded for its forward, and gather what comes next."""
        try:
            unit.check()
        except Exception as error:
            self.fail()
            _known(error)
            raise
        if unit.groups and not in_backward and unit not in self._seen_forward:
            self._seen_forward.append(unit)
        self.demand(unit) if in_backward else self.need(unit)
        if not in_backward:
            self._advance(unit, unit.forward_prefetch, self.forward_order if unit.prefetches_forward else [])

    def end_forward(self, unit: Unit, in_backward: bool) -> None:
        self.depth -= 1
        if self.depth == 0 and not in_backward:
            seen, self._seen_forward = self._seen_forward, []
            self._forward_order = list(map(weakref.ref, seen))
            # Outside, people see pieces, and may write to them: what is gathered stays for a backward alone.
            for each in seen:
                if torch.is_grad_enabled() or each.calls:
                    each.rest()
                elif each.state is State.UNSHARDED:
                    each.reshard()

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Tell whether a unit lets go behind its forward. What the backward begins with, it doesn't."""
        if not unit.reshard_after_forward:
            return False
        return not torch.is_grad_enabled() or unit not in self.backward_order[: self.begins + self.beside]

    def interrupt(self, error: BaseException, in_backward: bool) -> None:
        """Go back to where a forward can begin, after an exception has left one."""
        self.depth -= 1
        if self.depth == 0 and not in_backward:
            if torch.is_grad_enabled() and not getattr(error, "known_to_all", False):
                self.interrupted += 1
            self._reset()

    def _reset(self) -> None:
        self.task = None
        self._accumulated = []
        self._finish()
        for hook in self._hooks():
            hook.reset()
        for unit in self.units:
            unit.reshard()
            unit.end_backward(drop=True)

    # ---- Backward.

    def begin_backward(self) -> None:
        """Note that a backward is under way; called by whatever of it comes first."""
        if self.task is None:
            self.task = current_graph_task_id()
            self._seen_backward = []
            self._left = False
            self._begins = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def backward(self, unit: Unit) -> None:
        """Have a unit unsharded for its backward, and gather what comes next."""
        self.begin_backward()
        if unit.groups and unit not in self._seen_backward:
            self._seen_backward.append(unit)
            self._begins += not self._left
            self.need(unit)
            if not unit.prefetches_late:
                self._advance(unit, unit.backward_prefetch, self.backward_order if unit.prefetches_backward else [])
        else:
            self.need(unit)

    def arrived(self, unit: Unit) -> None:
        """Reduce a unit whose gradients have all come."""
        # Frozen parameters may still be needed, until the gradients of the inputs are there.
        stays = unit.calls > 0 and len(unit.trainable) < len(unit.groups)
        if unit.syncs:
            if self.agree(_REDUCE, unit.index | unit.kinds << _KINDS) == LATER:
                return  # the end of the backward sees to it
            if unit.reshard_after_backward and not stays:
                unit.reshard()  # before, since the gradients can be packed where the parameters were
            self._reduce(unit)
        if not stays:
            self.leave_backward(unit)

    def leave_backward(self, unit: Unit) -> None:
        """Let a unit's parameters go, of which this backward has no more need."""
        self._left = True
        if unit.reshard_after_backward:
            unit.reshard()
        if unit.prefetches_late:
            self._advance(unit, unit.backward_prefetch, self.backward_order if unit.prefetches_backward else [])

    def _hooks(self) -> list:
        """Give what the units have of HookStates, each once, in the same order on all ranks."""
        return list({id(unit.hook): unit.hook for unit in self.units if unit.hook is not None}.values())

    def _reduce(self, unit: Unit) -> None:
        self._finish()  # one at a time is under way, since each has a buffer
        self._unfinished += unit.start_reduce(async_op=self.beside)
        if not self.beside:
            self._finish()

    def _finish(self) -> None:
        unfinished, self._unfinished = self._unfinished, []
        for finish in unfinished:
            finish()

    def _end_backward(self) -> None:
        """Do what is left at the end of a backward."""
        if self.task is None:
            return  # it was interrupted
        units = self.units
        self._backward_order, self.begins = list(map(weakref.ref, self._seen_backward)), self._begins
        self._seen_backward = []
        if not self.last_backward:
            self.task = None
            return
        if any(unit.syncs for unit in units):
            self._flush(units)
        self._finish()
        for hook in self._hooks():
            hook.end()
        self.task = None
        for unit in units:
            if unit.reshard_after_backward:
                unit.reshard()
            unit.rest()
            unit.end_backward()
        accumulated, self._accumulated = self._accumulated, []
        for piece in accumulated:
            for hook in list(piece._post_accumulate_grad_hooks.values()):
                hook(piece)

    def _flush(self, units: list[Unit]) -> None:
        """Reduce what still waits on any rank, and take the zeros off parameters that no rank has used."""
        count = len(self._units)
        flags = numpy.zeros(count + self._slots, dtype=numpy.uint8)
        for unit in units:
            if unit.syncs:
                flags[unit.index] = unit.has_gradients()
                begin = count + unit.first_slot
                flags[begin : begin + len(unit.slots)] = [2 * slot.arrived for slot in unit.slots]
            for at in unit.trainable_slots:  # 1: of a group with gradients; 2: it has one
                flags[count + unit.first_slot + at] |= 1
        if self.control is not None:
            self.agree(_DONE)
            self.control.all_reduce(flags, "max")
        used = flags[count:].tolist()
        for unit in units:
            unit.add_trainable(used[unit.first_slot : unit.first_slot + len(unit.slots)])
        for index in numpy.flatnonzero(flags[:count]).tolist():
            unit = self._units[index]()
            if unit is None:
                raise InvalidUsage(
                    f"other ranks have gradients of unit {index}, of a module that is gone here", op="fully_shard",
                    rank=self.comm.rank,
                )  # fmt: skip
            for slot in unit.slots:
                slot.arrived |= slot.full.grad is not None
            self._reduce(unit)
        self._finish()
        for unit in units:
            for slot, was in zip(unit.slots, used[unit.first_slot : unit.first_slot + len(unit.slots)], strict=True):
                if slot.fresh and was < 2:
                    slot.piece.grad = None
                slot.fresh = False
                if was >= 2 and slot.piece._post_accumulate_grad_hooks:
                    self._accumulated.append(slot.piece)


def _known(error: Exception) -> Exception:
    """Mark an error of which all ranks know. It isn't kept: its traceback holds what was in use, the model for one."""
    error.known_to_all = True
    return error


def _living(references) -> list[Unit]:
    return [unit for unit in (reference() for reference in references) if unit is not None]


def all_orders() -> list[Order]:
    """Give the orders of all communicators that are open."""
    return [order for order in _orders.values() if not order.comm.closed]


def orders_of_parameters(params) -> list[Order]:
    """Give the orders of the units whose pieces are among parameters."""
    orders = {id(unit.order): unit.order for unit in units_of_parameters(params)}
    return [order for order in orders.values() if not order.comm.closed]


def units_of_parameters(params) -> list[Unit]:
    """Give the units whose pieces are among parameters."""
    members = set(map(id, params))
    units = [unit for order in _orders.values() for unit in order.units]
    return [unit for unit in units if any(id(slot.piece) in members for slot in unit.slots)]
