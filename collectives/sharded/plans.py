"""Plans: what the collectives of a forward and a backward depend on, and of which kind they are."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

import torch

from .agreement import Agreement
from .managed_params import units_in
from .unit import Unit
from .unit_registry import BACKWARD, FORWARD, KIND_SHIFT, UnitRegistry, living

__all__ = ["BackwardPlan", "ForwardPlan", "PassPlanner"]

_MAX_FORWARDS = 64  # before one backward, that are told apart


@dataclasses.dataclass
class ForwardPlan:
    """What a forward's collectives depend on, besides the modules that it runs.

    `order`: the units of the forward before, each once, for prefetching. `kept`: those that stay
    gathered for the backward.
    """

    order: list[weakref.ref]
    kept: list[weakref.ref]


@dataclasses.dataclass
class BackwardPlan:
    """What a backward's collectives depend on, besides the forwards.

    `order`: the units of the backward before, each once, for prefetching. `expected`: for each
    unit, which parameters get a gradient; it is reduced when they have.
    """

    order: list[weakref.ref]
    expected: list[tuple[weakref.ref, tuple[bool, ...]]]


def _form_of(unit: Unit):
    """Return what a forward of an outermost unit depends on in its modules: train or eval."""
    return unit.module().training if unit.module_group is None else unit.module_group.form


class PassPlanner:
    """Begins the passes of a communicator's units, and makes their plans: those with which the
    schedules were recorded that are followed, otherwise new ones, from the last passes.

    A unit holds its modules, so what lasts from one step to the next refers weakly to units.
    """

    def __init__(self, agreement: Agreement, registry: UnitRegistry):
        self._agreement = agreement
        self._follower = agreement.follower
        self._registry = registry
        self._forward_order: list[weakref.ref] = []  # the units of the last forward, each once
        self._backward_order: list[weakref.ref] = []  # the units of the last backward, each once
        self.units_before_reshard = 0  # of these, before the first one that was resharded
        self.forward = ForwardPlan([], [])  # of the last outermost forward
        self.backward = BackwardPlan([], [])  # of the last backward
        self._expectation_changes = True  # since the last backward's plan was made
        self._forward_kinds: list[tuple] = []  # of the forwards since the last backward
        self._roots: dict[int, weakref.ref] = {}  # the outermost units of these, by their numbers
        self._backward_roots: list[weakref.ref] = []  # those of the forwards before the last backward
        self._units_inside: dict[int, tuple[int, list[weakref.ref]]] = {}  # of an outermost unit, by its number

    def reset(self) -> None:
        """Drop the forwards that wait for a backward."""
        self._forward_kinds, self._roots = [], {}

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Let the ranks run other units inside the block; see `Agreement.uneven`. What they did there
        has no effect on later passes, whose collectives must be the same on all ranks: no plan is
        made of it, and what they have prefetched and not used is resharded.
        """
        before = self._forward_order, self._backward_order, self.units_before_reshard
        try:
            with self._agreement.uneven():
                yield
        finally:
            self._forward_order, self._backward_order, self.units_before_reshard = before
            self._reshard_prefetched()

    def set_static_graph(self, static_graph: bool) -> None:
        """As `Agreement.set_static_graph`; what the ranks did before has no effect on plans."""
        self._agreement.set_static_graph(static_graph)
        if static_graph:
            self._forward_order, self._backward_order, self.units_before_reshard = [], [], 0
            self._reshard_prefetched()

    def _reshard_prefetched(self) -> None:
        for unit in self._registry.living():
            if not unit.is_unsharded_registered:
                unit.reshard()

    def begin_forward(self, unit: Unit, overlaps: bool) -> None:
        """Begin the pass of an outermost unit's forward, if all-gathers can be a part of it."""
        self._agreement.resume()
        while not self._begin_forward_pass(unit):
            pass
        kept = self._backward_order[: self.units_before_reshard + overlaps]
        self.forward = self._follower.plan or ForwardPlan(self._forward_order, kept)
        self._follower.record_plan(self.forward)

    def _begin_forward_pass(self, unit: Unit) -> bool:
        """Begin it, as `Follower.begin_pass`."""
        follower, computes_gradients = self._follower, torch.is_grad_enabled()
        if not computes_gradients or not self._forward_kinds or unit.index in self._roots:
            follower.begin_iteration()
        if computes_gradients:
            self._roots[unit.index] = weakref.ref(unit)
        if not any(each.gathers for each in self._find_units_inside(unit)):
            return True
        number = len(self._forward_kinds) if computes_gradients else -1
        kind = ("forward", unit.index, number, _form_of(unit))
        if 0 <= number < _MAX_FORWARDS:
            self._forward_kinds.append(kind)
        return follower.begin_pass(kind, FORWARD << KIND_SHIFT | unit.index << 1)

    def end_forward(self, units: list[Unit]) -> None:
        """Note the units of a forward, each once."""
        self._forward_order = list(map(weakref.ref, units))
        self._follower.is_unfinished |= torch.is_grad_enabled()

    def end_backward(self, units: list[Unit]) -> None:
        """Note the units of a backward, each once."""
        self._backward_order = list(map(weakref.ref, units))

    def units_of_backward(self) -> list[Unit]:
        """Return the units of the modules whose forwards came before the last backward, the same ones
        on ranks that have run the same forwards.

        The living units aren't: a module that is gone may have been collected on some ranks, and not
        yet on others.
        """
        roots = [root for root in living(self._backward_roots) if root.module() is not None]
        return [each for root in roots for each in self._find_units_inside(root)]

    def frees_inside(self, unit: Unit) -> bool:
        """Whether gathered memory of other units in a unit's module is freed when they are resharded."""
        inside = [each for each in self._find_units_inside(unit) if each is not unit]
        return any(not group.shares_memory for each in inside for group in each.groups)

    def _find_units_inside(self, unit: Unit) -> list[Unit]:
        """Return a unit and the units of this communicator in its module."""
        count, found = self._units_inside.get(unit.index, (0, []))
        if count != len(self._registry):
            found = [weakref.ref(each) for each in units_in(unit.module()) if each.scheduler is unit.scheduler]
            self._units_inside[unit.index] = len(self._registry), found
        return living(found)

    def begin_backward(self, *, in_forward: bool, is_last: bool) -> None:
        """Begin the pass of a backward. `in_forward`: inside of a forward, whose pass ends.
        `is_last`: the last one of a step.
        """
        self.units_before_reshard = 0
        self._follower.is_unfinished = False
        kinds, self._forward_kinds = tuple(self._forward_kinds), []
        if self._roots:  # none in a second backward of the same forwards
            self._backward_roots, self._roots = list(self._roots.values()), {}
        roots = {kind[1]: self._registry.get(kind[1]) for kind in kinds}
        roots = [root for root in roots.values() if root is not None and root.module() is not None]
        units = [each for root in roots for each in self._find_units_inside(root)]
        settings = tuple((each.index, each.gradients.requires_grad_bits, each.reduce_grads) for each in units)
        if in_forward:
            self._agreement.end_pass()
        self._follower.begin_pass(("backward", kinds, settings, is_last), BACKWARD << KIND_SHIFT)
        plan, before = self._follower.plan, self.backward
        if plan is None:
            units = self._registry.living()
            expected = [(weakref.ref(unit), tuple(param.expects_grad for param in unit.params)) for unit in units]
            self.backward = BackwardPlan(self._backward_order, expected)
            self._follower.record_plan(self.backward)
        elif plan is not before or self._expectation_changes:
            self.backward = plan
            for reference, expected in plan.expected:
                unit = reference()
                if unit is not None:
                    unit.gradients.set_expected(expected)
        self._expectation_changes = plan is None

    def resume_forward(self) -> None:
        """Go on with the forward in which a backward has run, as a pass of its own."""
        self._follower.begin_pass(("rest of a forward",), FORWARD << KIND_SHIFT)
