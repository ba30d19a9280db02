"""Unit registry: the units of a communicator and its optimizers of whole parameters by number, and
the codes of their collectives.

A collective's code is a number: its kind, the unit's number and options. It is the same on all
ranks.
"""

from __future__ import annotations

import weakref

import numpy

from ..errors import InvalidUsage
from .unit import Unit

__all__ = [
    "BACKWARD", "BARRIER", "CREATE", "DONE", "END", "FORWARD", "GATHER", "KIND_SHIFT", "REDUCE", "REMOTE", "STEP",
    "OptimizerRegistry", "UnitRegistry", "gather_code", "gathers_masters", "is_post_forward", "kind_of", "living",
    "reduce_code", "step_code",
]  # fmt: skip

# The kinds. END: of a pass; DONE: of a backward, before its remaining reductions. STEP: of a
# FullParamOptimizer. FORWARD, BACKWARD and REMOTE are reasons only: a forward or backward begins, and
# another rank has failed.
END, DONE, REDUCE, GATHER, CREATE, BARRIER, FORWARD, BACKWARD, REMOTE, STEP = range(1, 11)
KIND_SHIFT = 33
_POST_FORWARD = 1  # an all-gather of the shards that were kept after a forward
_UNIT_SHIFT, _UNIT_BITS = 1, 24
_MASK_SHIFT = _UNIT_SHIFT + _UNIT_BITS  # of a reduction: the mask of the unit's trainable groups
_STEP_BITS = 12  # of an optimizer's step: its number; above it a checksum of which parameters have gradients
_MASTER_SHARDS = 1 << KIND_SHIFT - 1  # of an all-gather: of the shards in their own dtype
_ACTIONS = {
    END: "ends a forward", DONE: "ends a backward", REDUCE: "reduces", GATHER: "is in a forward or gathers",
    CREATE: "shards a module", BARRIER: "makes another call", FORWARD: "begins a forward of",
    BACKWARD: "begins a backward", STEP: "steps a FullParamOptimizer",
}  # fmt: skip


def gather_code(unit: Unit, *, post_forward: bool = False, masters: bool = False) -> int:
    """Return the code of a unit's all-gather."""
    return GATHER << KIND_SHIFT | masters * _MASTER_SHARDS | unit.index << _UNIT_SHIFT | post_forward


def reduce_code(unit: Unit) -> int:
    """Return the code of a unit's reduction, with the groups that it reduces."""
    return REDUCE << KIND_SHIFT | unit.gradients.trainable_mask << _MASK_SHIFT | unit.index << _UNIT_SHIFT


def step_code(number: int, checksum: int) -> int:
    """Return the code of a step of the `FullParamOptimizer` of a number."""
    number &= (1 << _STEP_BITS) - 1
    return STEP << KIND_SHIFT | (checksum << _STEP_BITS + 1 & (1 << KIND_SHIFT) - 1) | number << 1


def kind_of(code: int) -> int:
    """Return the kind of a code."""
    return code >> KIND_SHIFT


def is_post_forward(code: int) -> bool:
    """Whether an all-gather is of the shards that were kept after a forward."""
    return bool(code & _POST_FORWARD)


def gathers_masters(code: int) -> bool:
    """Whether an all-gather is of the shards in their own dtype."""
    return bool(code & _MASTER_SHARDS)


def living(references) -> list[Unit]:
    """Return the units that are alive."""
    return [unit for reference in references if (unit := reference()) is not None]


class UnitRegistry:
    """The units of a communicator, by their numbers; it holds them weakly."""

    def __init__(self):
        self._units: list[weakref.ref] = []
        self.param_count = 0  # of all units
        self.unit_of_param: list[int] = []

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        """Give a unit its number, and those of its parameters."""
        unit.index = len(self._units)
        unit.first_param = self.param_count
        self.param_count += len(unit.params)
        self.unit_of_param += [unit.index] * len(unit.params)
        self._units.append(weakref.ref(unit))

    def get(self, index: int) -> Unit | None:
        """Return a unit by its number; None where it is gone, or was never there."""
        return self._units[index]() if index < len(self._units) else None

    def of(self, code: int) -> Unit | None:
        """Return the unit of a collective."""
        return self.get(self.index_of(code))

    @staticmethod
    def index_of(code: int) -> int:
        """Return the number of a collective's unit."""
        return code >> _UNIT_SHIFT & (1 << _UNIT_BITS) - 1

    def living(self) -> list[Unit]:
        """Return the units that are alive."""
        return living(self._units)

    def describe(self, code: int) -> str:
        """Return the text of a code, for an error: "reduces <Unit ...>"."""
        kind = kind_of(code)
        unit = self.of(code) if kind in (GATHER, REDUCE, FORWARD) else None
        return _ACTIONS.get(kind, "does something else") + ("" if unit is None else f" {unit!r}")

    # ---- Flags at a backward's end: of units that wait to be reduced, then of parameters.

    def gradient_flags(self) -> numpy.ndarray:
        """Return this rank's flags. A parameter's: 1 where its group is reduced, plus 2 where it has a
        gradient.
        """
        count = len(self)
        flags = numpy.zeros(count + self.param_count, dtype=numpy.uint8)
        for unit in self.living():
            if unit.reduce_grads:
                flags[unit.index] = unit.gradients.has_gradients()
                begin = count + unit.first_param
                flags[begin : begin + len(unit.params)] = [2 * param.has_unreduced_grad for param in unit.params]
            for at in unit.gradients.trainable_indices:
                flags[count + unit.first_param + at] |= 1
        return flags

    def flags_of_used_units(self, flags: numpy.ndarray) -> numpy.ndarray:
        """Return the flags with zeros for units without gradients.

        The modules of such units may have been collected on some ranks and not yet on others.
        """
        count = len(self)
        units = numpy.array(self.unit_of_param, dtype=numpy.int64)
        used = numpy.zeros(count, dtype=bool)
        used[units[flags[count:] >= 2]] = True
        kept = flags.copy()
        kept[count:][~used[units]] = 0
        return kept


class OptimizerRegistry:
    """The optimizers of whole parameters of a communicator's units, by their numbers, which are the
    same on all ranks; it holds them weakly.
    """

    def __init__(self):
        self._optimizers: list[weakref.ref] = []

    def add(self, optimizer) -> int:
        """Add an optimizer; return its number."""
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def join_step(self, code: int, has_grad: tuple[bool, ...]) -> None:
        """Take part in a step that only other ranks make. `has_grad`: the parameters with gradients
        there.
        """
        number = code >> 1 & (1 << _STEP_BITS) - 1
        optimizer = self._optimizers[number]()
        if optimizer is None:
            raise InvalidUsage(
                f"other ranks step FullParamOptimizer {number}, which is gone here: keep it as long as they do",
                op="FullParamOptimizer.step",
            )
        optimizer.join_step(has_grad)
