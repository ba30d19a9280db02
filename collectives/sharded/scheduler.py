"""Scheduler: when the units of one communicator are gathered, resharded and reduced.

The order of collectives is that of the program, as in FSDP2. A unit is gathered before its forward
and before its backward. It is reduced once in a backward: when the gradients of the inputs of all its
forwards are there, or at the backward's end.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from ..comm.communicator import Communicator
from ..comm.tags import make_tag, tagged
from ..errors import InvalidUsage, Mismatch
from ..gradients.step_count import StepCount
from ..torch_compat import current_graph_task_id, will_engine_execute
from .arena import Arena
from .common_reads import CommonReads
from .managed_params import units_in
from .mesh import split_comm
from .offload import GradientOffload
from .order_check import OrderCheck, compares_order
from .streams import SideStream

if TYPE_CHECKING:
    from .param import ShardedParam
    from .unit import Unit

__all__ = ["Scheduler", "get_scheduler", "living"]

_END_TAG = make_tag("the parameters that a backward has used")
_schedulers: dict[int, Scheduler] = {}  # by the id of their communicator


def get_scheduler(comm: Communicator) -> Scheduler:
    """Return the scheduler of the units over a communicator's ranks."""
    for key, scheduler in list(_schedulers.items()):
        if scheduler.comm.closed:
            del _schedulers[key]
    if id(comm) not in _schedulers:
        _schedulers[id(comm)] = Scheduler(comm)
    return _schedulers[id(comm)]


class Scheduler:
    """Unshards, prefetches, reshards and reduces the units of one communicator, in forward and backward.

    Attributes:
        arena: The units' memory.
        side: The stream on which they gather and reduce on a GPU.
        offload: Copies of gradients to the host.
        step_count: Counts the optimizers' steps of the units' parameters, which the ranks compare.
        reads: Units that read the ranks' shards where they are.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.arena = Arena(comm)
        self.side = SideStream(comm.device)
        self.offload = GradientOffload(self.side)
        self.step_count = StepCount()
        self.reads = CommonReads(comm)
        self._neighbours: dict[tuple[int, int], Communicator] = {}  # by their communicator's id and their number
        self._units: list[weakref.ref[Unit]] = []
        self._depth = 0  # of nested forwards
        self._root = 0  # the index of the outermost one's unit
        self._forward: dict[Unit, None] = {}  # units of the outermost forward in progress
        self._order: list[weakref.ref[Unit]] = []  # units of the last outermost forward
        # Units whose forward wants gradients and that no backward has reduced.
        self._awaiting: weakref.WeakKeyDictionary[Unit, None] = weakref.WeakKeyDictionary()
        # The engine's callback at the end of the backward in progress. The engine drops it after an exception, too.
        self._backward: weakref.ref | None = None
        self._in_backward: dict[Unit, None] = {}  # units that the backward in progress has gathered
        self._kept: weakref.WeakSet[Unit] = weakref.WeakSet()  # units with which the last backward began
        self._has_resharded = False  # in the backward in progress
        self._named: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # outermost ones whose units have names
        self._check: OrderCheck | None = None if compares_order(comm) else OrderCheck(comm, self._name_of)
        self._reduced: dict[ShardedParam, tuple[bool, bool]] = {}  # by the backward in progress: used here, new

    @property
    def units(self) -> list[Unit]:
        """The units that are alive, in the order in which they were made."""
        return living(self._units)

    def add(self, unit: Unit) -> int:
        """Add a unit; return its number, the same on all ranks."""
        self._units.append(weakref.ref(unit))
        self.reads.add(unit)
        return len(self._units) - 1

    def split(self, comm: Communicator, size: int) -> Communicator:
        """Return the communicator of `size` neighbouring ranks of a unit's. A collective at the first call."""
        known = self._neighbours.get((id(comm), size))
        if known is None or known.closed:
            known = self._neighbours[id(comm), size] = split_comm(comm, comm.rank // size, comm.rank)
        return known

    def note(self, unit: Unit, kind: str) -> None:
        """Note that a unit begins a collective, where the engine doesn't compare the ranks' units."""
        if self._check is not None:
            self._check.note(unit.index, kind)

    def decide_in_place(self, unit: Unit) -> bool:
        """Decide whether a unit that is gathered now may read the other ranks' shards where they are."""
        if self._is_first_run:
            self.reads.note_writes(unit)
        return self.is_running and self.reads.may_read(unit)

    def begin_reads(self, unit: Unit) -> None:
        """Note that a unit reads the other ranks' shards where they are. May wait for all ranks."""
        self.reads.begin(unit, in_forward=self._is_first_run)

    def _name_of(self, index: int) -> str:
        unit = self._units[index]()
        return f"unit {index}" if unit is None else f"unit {index}, {unit.name}"

    @property
    def is_in_forward(self) -> bool:
        return self._depth > 0

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward is in progress."""
        return self.is_in_forward or self._is_in_backward

    @property
    def _is_in_backward(self) -> bool:
        return self._backward is not None and self._backward() is not None

    @property
    def _is_first_run(self) -> bool:
        """Whether a forward is in progress that isn't a repeated one."""
        return self.is_in_forward and not self.is_recomputing

    @property
    def is_recomputing(self) -> bool:
        """Whether a forward that runs now is one that activation checkpointing repeats."""
        return current_graph_task_id() != -1

    # ---- Forward.

    def begin_forward(self, unit: Unit, module: torch.nn.Module) -> None:
        """Gather a unit for the forward of one of its modules, or for one that activation checkpointing repeats."""
        self._depth += 1
        if self.is_recomputing:
            self._begin_backward()
            unit.unshard()
            if torch.is_grad_enabled() and unit.requires_grad:
                self._awaiting[unit] = None
            self._enter_backward(unit)
            return
        if self._depth == 1:
            self._begin_pass(module)
            self._root = unit.index
        unit.root = self._root
        if unit.holds_copies and torch.is_grad_enabled():
            raise InvalidUsage(
                f"{unit.name} holds copies of its parameters, whose gradients no rank would get: leave the block of "
                "summon_full_params, or use torch.no_grad()",
                op="forward", rank=self.comm.rank,
            )  # fmt: skip
        unit.sync_attributes()
        unit.unshard()
        self._forward[unit] = None
        for other in unit.forward_prefetch or self._next_in_forward(unit):
            other.unshard(async_op=True)

    def _begin_pass(self, root: torch.nn.Module) -> None:
        if self._backward is not None:
            self._abandon_backward(self._in_backward)
        if root not in self._named:
            self._named.add(root)
            for name, module in root.named_modules():
                if name and hasattr(module, "_sharded_unit"):
                    module._sharded_unit.set_name(f"{name} ({type(module).__name__})")
            self._warn_of_unmanaged(root)
        units = self.units
        self.reads.begin_forward(units)
        for unit in units:
            unit.free_unused_grads()
        self._forward = {}
        self.side.wait_for_current()  # for what an optimizer has written

    def _warn_of_unmanaged(self, root: torch.nn.Module) -> None:
        """Warn of trainable parameters of an outermost module that are of no unit: each rank trains its own."""
        units = units_in(root)
        known = {place for unit in units for param in unit.params for place in param.places}
        known.update(*(unit.ignored for unit in units))
        unmanaged = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in root.named_modules()
            for name, param in module._parameters.items()
            if param is not None and param.requires_grad and (module, name) not in known
        ]
        if unmanaged:
            warnings.warn(
                f"parameters that this {type(root).__name__} got after it was sharded are not reduced, so that the "
                f"ranks train different ones: {', '.join(unmanaged[:8])}{' and others' if len(unmanaged) > 8 else ''}. "
                "Change modules before fully_shard, or name what each rank trains alone in ignored_params",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    def _next_in_forward(self, unit: Unit) -> list[Unit]:
        if not (unit.prefetch_in_forward and self.side):
            return []
        return self._after(unit, living(self._order))

    @staticmethod
    def _after(unit: Unit, order: list[Unit]) -> list[Unit]:
        return order[order.index(unit) + 1 :][:1] if unit in order else []

    def end_forward(self, unit: Unit, *, is_last: bool) -> None:
        """Reshard a unit after its forward; at the end of the outermost forward all that no backward needs.

        `is_last`: whether all of the unit's modules have run.
        """
        self._depth -= 1
        if self.is_recomputing:
            return
        wants_grad = torch.is_grad_enabled()
        if wants_grad and unit.requires_grad:
            self._awaiting[unit] = None
        if is_last and self._depth:
            self._reshard_after_forward(unit, wants_grad)
        if self._depth == 0:
            self._end_pass(unit, wants_grad)

    def _reshard_after_forward(self, unit: Unit, wants_grad: bool) -> None:
        if unit.reshard_after_forward is False or unit.stays_gathered or (wants_grad and unit in self._kept):
            return
        unit.reshard_after_pass() if wants_grad else unit.reshard()

    def _end_pass(self, root: Unit, wants_grad: bool) -> None:
        if not wants_grad:  # no backward waits
            self.offload.wait()
        forward, self._forward = self._forward, {}
        if wants_grad:
            self._order = list(map(weakref.ref, forward))
        for unit in forward:
            is_root = unit is root and len(forward) > 1
            begins_backward = is_root and wants_grad and unit.reshard_after_forward is None
            if not begins_backward:
                self._reshard_after_forward(unit, wants_grad)
            unit.end_pass()
        self.reads.end_forward(forward)

    def abort_forward(self) -> None:
        """Reshard everything after an exception has left a forward."""
        self._depth -= 1
        if self._depth == 0 and not self.is_recomputing:
            for unit in self._forward:
                unit.reshard()
                unit.end_pass()
                self._awaiting.pop(unit, None)
            self._forward = {}

    # ---- Backward.

    def pre_backward(self, unit: Unit, versions: tuple[int, ...]) -> None:
        """Gather a unit for its backward: the first gradient of an output is there.

        `versions`: those of the shards in the forward.
        """
        self._begin_backward()
        self._expect_gradients(unit)
        if unit.unshard_in_backward:
            with self._resetting_steps():
                unit.unshard()  # a checkpointed part of the unit reads its parameters
            if unit.versions != versions:
                raise InvalidUsage(
                    f"parameters of {unit.name} were written to after the forward of this backward, as by an "
                    "optimizer's step: the backward would use the new values; call backward() before step()"
                )
        self._enter_backward(unit)

    def _enter_backward(self, unit: Unit) -> None:
        """Note that the backward uses a unit; the first time begin to gather the next one."""
        if unit in self._in_backward:
            return
        self._in_backward[unit] = None
        named = unit.backward_prefetch
        if not named and unit.prefetch_in_backward and self.side:
            order = reversed(living(self._order))
            named = self._after(unit, [other for other in order if other is unit or other not in self._in_backward])
        for other in named:
            other.unshard(async_op=True)

    def _expect_gradients(self, unit: Unit) -> None:
        if unit.backwards_left is None:
            unit.backwards_left = unit.is_open_ended + sum(map(will_engine_execute, unit.live_nodes()))
            if unit.requires_grad:
                self._awaiting[unit] = None

    def post_backward(self, unit: Unit) -> None:
        """Note that the gradients of one forward's inputs are there."""
        self._begin_backward()
        if unit.backwards_left is None:  # the backward has begun at a tensor that the unit keeps, and not at an output
            self._expect_gradients(unit)
            unit.backwards_left += 1
        self._in_backward[unit] = None
        unit.backwards_left -= 1
        if unit.backwards_left <= 0:
            self._finish(unit)
            unit.backwards_left = None

    def note_backward(self, unit: Unit) -> None:
        """Note that a backward uses a unit, whose forward had no hooks for it."""
        self._begin_backward()
        self._in_backward[unit] = None
        self.reads.note_backward(unit)

    def _begin_backward(self) -> None:
        if self._is_in_backward:
            return
        if self._backward is not None:
            self._abandon_backward(self._in_backward)
        self._in_backward, self._has_resharded = {}, False
        callback = self.end_backward  # a new object, which the engine alone keeps
        self._backward = weakref.ref(callback, self._leave_backward)
        self.step_count.begin_backward(self.comm)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    @contextlib.contextmanager
    def _resetting_steps(self) -> Iterator[None]:
        """Count steps anew after a `Mismatch`, which all ranks raise."""
        try:
            yield
        except Mismatch:
            self.step_count.reset()
            raise

    def _leave_backward(self, _reference) -> None:
        """Have the modules hold their shards after an exception has left a backward."""
        for unit in self._in_backward:
            unit.to_sharded()

    def _finish(self, unit: Unit) -> None:
        """Reshard a unit that the backward needs no more, and reduce its gradients."""
        if not self._has_resharded:
            self._has_resharded = True
            self._kept = weakref.WeakSet(self._in_backward)
        if unit.reshard_after_backward:
            unit.reshard()
        if unit.reduces and unit.requires_grad:
            self._awaiting.pop(unit, None)
            with self._resetting_steps():
                gradients = unit.reduce_grads()
            for param, is_used, is_new in gradients:
                before = self._reduced.get(param, (False, is_new))
                self._reduced[param] = is_used or before[0], before[1]

    def end_backward(self) -> None:
        """End a backward: reduce, in the order of their forwards, the units that it has not reduced, and reshard."""
        self._backward = None
        units, self._in_backward = self._in_backward, {}
        try:
            self._end_backward(units)
        except BaseException:
            self._abandon_backward(units)
            raise

    def _end_backward(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.backwards_left, unit.is_open_ended, unit.stays_gathered = None, False, False
            unit.to_sharded()
        ending = [unit for unit in units if unit.is_last_backward]
        if not ending:
            self.reads.end(_END_TAG)
            return
        roots = {unit.root for unit in ending}
        for unit in list(self._awaiting):
            # Those of other models have a backward of their own, or none.
            if unit.root in roots and unit.is_last_backward:
                self._finish(unit)
        for unit in ending:
            if unit.reshard_after_backward:
                unit.reshard()
        self.side.join()
        self.offload.wait()
        reduced, self._reduced = self._reduced, {}
        if self._drop_unused(reduced):
            self.reads.end_step()
        else:
            self.reads.end(_END_TAG)
        for reducer in self._reducers():
            reducer.end()
        if self._check is not None:
            self._check.end_step()
        for param in reduced:
            for hook in (param.sharded._post_accumulate_grad_hooks or {}).values():
                if param.sharded.grad is not None:
                    hook(param.sharded)

    def _drop_unused(self, reduced: dict[ShardedParam, tuple[bool, bool]]) -> bool:
        """Set the new gradients of parameters that no rank has used to None, as in one process; return whether
        that has waited for all ranks.

        On a GPU they stay zeros, since the host doesn't wait there.
        """
        if not reduced or self.comm.device.type != "cpu":
            return False
        used = torch.tensor([is_used for is_used, _ in reduced.values()], dtype=torch.uint8, device="cpu")
        if self.comm.size > 1:
            with tagged(_END_TAG, self.comm):
                self.comm.all_reduce(used, "max")
        if used.all():
            return True
        for (param, (_, is_new)), is_used in zip(reduced.items(), used.tolist(), strict=True):
            if is_new and not is_used:
                param.sharded.grad = None
        return True

    def _reducers(self) -> list:
        return list(dict.fromkeys(unit.reducer for unit in self.units if unit.reducer is not None))

    def reset(self, units: list[Unit]) -> None:
        """Drop a forward or backward that an exception has left, and units' gradients that wait to be reduced."""
        self._depth = 0
        self._abandon_backward(self._in_backward)
        for unit in units:
            self._awaiting.pop(unit, None)
            unit.reshard()
            unit.drop_grads()

    def _abandon_backward(self, used: Iterable[Unit]) -> None:
        """Drop a backward that an exception has left, and that has used some units. Gradients of other models stay."""
        self._backward = None
        roots = {unit.root for unit in used}
        self._in_backward, self._reduced = {}, {}
        self.side.join()
        self.offload.wait()
        for reducer in self._reducers():
            reducer.reset()
        for unit in self.units:
            unit.backwards_left = None
            unit.reshard()
            if unit.root in roots:
                self._awaiting.pop(unit, None)
                if unit.reduces:
                    unit.drop_grads()


def living(references: list[weakref.ref[Unit]]) -> list[Unit]:
    """Return the units of weak references that are alive."""
    return [unit for reference in references if (unit := reference()) is not None]
