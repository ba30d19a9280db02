"""Order: the units of a communicator, what forward and backward do with them, and what a backward owes at its end."""

from __future__ import annotations

import weakref

import numpy
import torch

from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from ..gradients.streams import overlaps
from ..torch_compat import current_graph_task_id
from .buffer_pool import Loans
from .controller import ALIKE, GATHER, KINDS, LATER, MASTERS, REDUCE, Agreement, known_to_all
from .streams import HostCopies
from .unit import State, Unit

__all__ = ["Order", "all_orders", "order_of", "orders_of_parameters", "units_of_parameters"]

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


class Order(Agreement):
    """The units of a communicator and the order of their collectives, in forward and backward; see the module."""

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self.loans = Loans()
        self.copies = HostCopies()
        # Gathers and reductions run beside the computation where there is something to run them on.
        self.beside = not comm._on_host or overlaps(comm)
        self.depth = 0  # forwards of units that this thread is in
        self.last_backward = True
        self._backward_order: list[weakref.ref] = []
        self.begins = self._begins = 0  # how many of them it came to before it had let go of any
        self._left = False  # it has let go of one
        self._forward_order: list[weakref.ref] = []
        self._seen_forward: list[Unit] = []
        self._seen_backward: list[Unit] = []
        self.task: int | None = None  # the backward under way
        self._accumulated: list = []  # pieces of which people want to know that their gradients are there
        self._unfinished: list = []  # functions that wait for reductions and end them

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
            self.agree(GATHER, MASTERS | unit.index)
        return [group.gather_masters() for group in unit.groups]

    def gather(self, unit: Unit, *, beside: bool = False) -> None:
        """Begin to gather a unit, if nothing has; `beside`: in advance, while something else is computed."""
        if unit.state is State.SHARDED:
            near = unit.is_near
            if unit.gathers:
                near = self.agree(GATHER, unit.index, near=near) == ALIKE and near
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
            known_to_all(error)
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
            if not torch.is_grad_enabled():
                self.copies.wait()  # people may write to pieces on the host now

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
        self._reduced.clear()
        self._finish()
        self.copies.wait()
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
            if unit.index in self._reduced:
                self._diverge(f"{unit!r} has gradients here, and the others have reduced it before")
            if self.agree(REDUCE, unit.index | unit.kinds << KINDS) == LATER:
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
        self.copies.wait()
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
        flags = self._agree_on(flags, units)
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
        self.copies.wait()
        for unit in units:
            for slot, was in zip(unit.slots, used[unit.first_slot : unit.first_slot + len(unit.slots)], strict=True):
                if slot.fresh and was < 2:
                    slot.piece.grad = None
                slot.fresh = False
                if was >= 2 and slot.piece._post_accumulate_grad_hooks:
                    self._accumulated.append(slot.piece)


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
