"""Scheduler: when the units of one communicator are gathered, resharded and reduced.

The order of collectives is that of the program, as in FSDP2. A unit is gathered before its forward
and before its backward. It is reduced once in a backward: when the gradients of the inputs of all its
forwards are there, or at the backward's end.
"""

from __future__ import annotations

import weakref

import torch

from ..torch_compat import current_graph_task_id, will_engine_execute
from .arena import Arena
from .unit import Unit

__all__ = ["Scheduler", "get_scheduler"]

_schedulers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def get_scheduler(comm) -> Scheduler:
    """Return the scheduler of a communicator's units."""
    if comm not in _schedulers:
        _schedulers[comm] = Scheduler(comm)
    return _schedulers[comm]


class Scheduler:
    def __init__(self, comm):
        self.arena = Arena(comm)
        self.is_last_backward = True
        self._depth = 0
        self._forward: list[Unit] = []  # units of the outermost forward in progress
        self._awaiting: dict[Unit, None] = {}  # units whose forward wants gradients and that no backward has reduced
        self._graph_task: int | None = None

    # ---- Forward.

    def begin_forward(self, unit: Unit) -> None:
        """Gather a unit for its forward, or for a forward that checkpointing repeats in a backward."""
        self._depth += 1
        if self._is_recomputing:
            unit.unshard()
            return
        if self._depth == 1:
            self._abandon_backward()
        unit.drop_stale()
        unit.unshard()
        self._forward.append(unit)

    def end_forward(self, unit: Unit) -> None:
        """Reshard a unit after its forward, and at the end of the outermost forward all that no backward needs."""
        self._depth -= 1
        if self._is_recomputing:
            return
        wants_grad = torch.is_grad_enabled()
        if wants_grad and unit.requires_grad:
            self._awaiting[unit] = None
        is_outermost = self._depth == 0
        if unit.reshard_after_forward and not (is_outermost and wants_grad):
            unit.reshard()
        if is_outermost:
            forward, self._forward = self._forward, []
            if not wants_grad:
                for each in forward:
                    each.reshard()

    def abort_forward(self) -> None:
        """Reshard everything after an exception has left a forward."""
        self._depth -= 1
        if self._depth == 0:
            for unit in self._forward:
                unit.reshard()
            self._forward = []

    @property
    def _is_recomputing(self) -> bool:
        return current_graph_task_id() != -1

    # ---- Backward.

    def pre_backward(self, unit: Unit) -> None:
        """Gather a unit for its backward: the first gradient of an output is there."""
        self._begin_backward()
        if unit.backwards_left is None:
            unit.backwards_left = sum(map(will_engine_execute, unit.live_nodes()))
        unit.unshard()

    def post_backward(self, unit: Unit) -> None:
        """Note that the gradients of one forward's inputs are there."""
        self._begin_backward()
        if unit.backwards_left is None:  # no output of it has a gradient hook: they were not asked for
            unit.backwards_left = 1 + sum(map(will_engine_execute, unit.live_nodes()))
        unit.backwards_left -= 1
        if unit.backwards_left == 0:
            self._finish(unit)

    def _begin_backward(self) -> None:
        if self._graph_task is None:
            self._graph_task = current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _finish(self, unit: Unit) -> None:
        if unit.reshard_after_backward:
            unit.reshard()
        if unit.reduces:
            unit.reduce()
            self._awaiting.pop(unit, None)

    def _end_backward(self) -> None:
        """Reduce, in the order of the forward, what the backward has not reduced, and reshard it."""
        self._graph_task = None
        if not self.is_last_backward:
            return
        for unit in list(self._awaiting):
            self._finish(unit)
            unit.backwards_left = None

    def _abandon_backward(self) -> None:
        """Forget a backward that an exception has left."""
        if self._graph_task is not None:
            self._graph_task = None
            for unit in self._awaiting:
                unit.reshard()
                unit.drop_grads()
            self._awaiting.clear()
