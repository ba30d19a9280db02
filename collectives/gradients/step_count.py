"""Counts of optimizer steps, which the ranks compare when they exchange gradients.

A rank that leaves out an optimizer's step, as where an exception was caught between a backward and
``optimizer.step()``, has other parameters than the others from then on. Its next gradients would be
averaged with theirs all the same. So each rank counts the steps between its backwards, and the host
engine compares the counts with each call; see `set_step`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.communicator import Communicator
from ..comm.program_step import set_step
from ..weak_tensors import WeakTensorDict

__all__ = ["StepCount", "count_steps", "find_step_count", "forget_steps"]

_counts = WeakTensorDict()  # parameter -> the count of its module


class StepCount:
    """Counts the steps between backwards, several as one, since the communicator was first used.
    `has_stepped`: since the last backward; to be set by each step. `replaced`: by another count of one
    of its parameters.
    """

    def __init__(self):
        self.has_stepped = self.replaced = False
        self.ddp: weakref.ref | None = None  # the DDP object whose own hook counts
        self._steps = 0
        self._comms: list[weakref.ref] = []

    def reset(self) -> None:
        """Count anew: all ranks have the same parameters again, or have raised since they haven't."""
        for comm in filter(None, (each() for each in self._comms)):
            set_step(comm, 0)
        self._steps, self.has_stepped, self._comms = 0, False, []

    def begin_backward(self, comm: Communicator, *others: Communicator) -> None:
        """Count a step if one was made since the last backward, or this is the first one."""
        if not self._comms or self._comms[0]() is not comm or self.has_stepped:
            self.advance(comm, *others)
            self.has_stepped = False

    def advance(self, comm: Communicator, *others: Communicator) -> None:
        """Count a step, which the ranks compare in the calls from here on, on `others`, too."""
        if not self._comms or self._comms[0]() is not comm:  # the other ranks' counts begin with it, too
            self._steps = 0
        comms = [comm, *others]
        self._steps, self._comms = self._steps + 1, list(map(weakref.ref, comms))
        for each in comms:
            set_step(each, self._steps)


def count_steps(parameters: Iterable[torch.nn.Parameter], ddp=None, count: StepCount | None = None) -> None:
    """Count the steps of the optimizers of a module's parameters. `ddp`: the DDP object of a hook.
    `count`: where they are counted; None: in a new one.
    """
    _register_hook()
    count = StepCount() if count is None else count
    count.ddp = None if ddp is None else weakref.ref(ddp)
    for parameter in parameters:
        before = _counts.get(parameter)
        if before is not None and before is not count:
            before.replaced = True
        _counts[parameter] = count


def forget_steps(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Count no steps of these parameters, and hold no weak reference to them, with which torch can't swap them."""
    for parameter in parameters:
        _counts.pop(parameter)


def find_step_count(parameter: torch.Tensor) -> StepCount | None:
    """Return the count of a parameter's module; None where its steps aren't counted."""
    return _counts.get(parameter)


def _after_step(optimizer, _args, _kwargs) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:
            count = _counts.get(parameter)
            if count is not None:
                count.has_stepped = True


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_post_hook(_after_step)
