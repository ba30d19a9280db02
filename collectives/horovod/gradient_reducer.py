"""Gradient reducer of a DistributedOptimizer: when each gradient is reduced, and in which bucket.

In the first step each gradient is an operation of its own under its parameter's name, so that the
ranks compare names and shapes and find an order in which gradients become ready. From the second
step on, neighbours in that order share an `AllreduceBucket`. Two things a rank can't know by
itself: whether other ranks have a gradient that it doesn't have, and whether that gradient is
sparse. The ranks exchange these as small sums of numbers.
"""

from __future__ import annotations

import contextlib
import weakref

import torch

from ..gradients.streams import has_spare_cores
from .basics import current
from .bucket_assignment import BucketAssignment
from .controller import Controller
from .exceptions import HorovodInternalError
from .gradient_buckets import ParameterState
from .messages import Request, TensorTableEntry, cached_request
from .operations import Average, Sum, allreduce_async, synchronize
from .process_sets import ProcessSet

__all__ = ["GradientReducer"]

_SPARSE = 1 << 16  # what a rank with a sparse gradient adds to a sum; one with a dense gradient adds 1
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class GradientReducer:
    """Reduces the gradients of an optimizer's parameters.

    `DistributedOptimizer` has checked the arguments. ``backward_ran``: whether a backward has run
    since the last step. ``synchronized``: whether gradients are reduced. ``reduced_for_scaler``:
    whether they were reduced because a GradScaler unscaled them. ``skip_reduction``: whether a step
    doesn't reduce.
    """

    steps_locally = False

    def __init__(
        self, names: dict[int, str], prefix: str, compression, passes: int, op, predivide: float, groups,
        sparse_as_dense: bool, process_set: ProcessSet, *, views: bool,
    ):  # fmt: skip
        self.op = op
        self.passes = passes
        self.backward_ran = self.synchronized = self.reduced_for_scaler = self.skip_reduction = False
        self._names = names
        self._prefix = prefix
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._states: dict[int, ParameterState] = {}  # by id of the parameter
        self._assignment = BucketAssignment(
            self._states, prefix, compression, op, predivide, groups, process_set, views=views
        )
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._buckets: list = []  # of all steps after the first, the same on all ranks
        self._unassigned: list[ParameterState] = []  # in no bucket, in the order in which they became ready
        self._controller: Controller | None = None
        self._overlaps = False
        self._active = False
        self._finalizer = weakref.finalize(self, _remove_hooks, self._hooks)
        self._finalizer.atexit = False
        self._refresh_controller()

    # ---- Parameters and their hooks.

    def register_hooks(self, optimizer) -> None:
        """Register hooks on parameters that have none: all, or those that were added or
        unfrozen.
        """
        states = self._states
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                key = id(param)
                if key in self._hooks or not param.requires_grad:
                    continue
                if key not in states:
                    name = self._names.get(key) or f"allreduce.added.{number}.{index}"
                    states[key] = ParameterState(name, param, self.passes)
                self._hooks[key] = param.register_post_accumulate_grad_hook(_make_hook(states[key], weakref.ref(self)))

    def _on_gradient(self, state: ParameterState) -> None:
        """Handle a gradient that a backward has made."""
        if not self._active:
            return
        if state.backwards_left <= 0:
            raise AssertionError(_TOO_MANY)
        if state.param.grad.requires_grad:
            raise AssertionError(
                f"the gradient of {state.name} requires a gradient itself, after backward(create_graph=True): take "
                "inner derivatives by torch.autograd.grad(..., create_graph=True), which leaves .grad alone"
            )
        state.backwards_left -= 1
        self.backward_ran = True
        self.synchronized = self.reduced_for_scaler = False
        if not state.backwards_left:
            bucket = state.bucket
            if bucket is None:
                self._unassigned.append(state)
                state.record_version()
                return
            if state.view is not None:
                state.copy_to_view()
            if not bucket.mark_ready():
                state.record_version()
                return
            bucket.collect()
            overlaps = self._overlaps and self._current_controller() is self._controller
            if bucket.separate_versions or not overlaps:  # else the reduction changes what is recorded
                for each in bucket.states:
                    each.record_version()
            if overlaps:
                bucket.submit(self._controller, waits=False)

    def set_passes(self, passes: int) -> None:
        """Set the number of backwards before a step."""
        self.passes = passes
        for state in self._states.values():
            state.backwards_left = passes
            state.recorded_grad = None

    def reset(self) -> None:
        """Drop what is under way, and count backwards from 0."""
        self.backward_ran = self.synchronized = self.reduced_for_scaler = False
        self._unassigned.clear()
        for bucket in self._buckets:
            bucket.reset()
        self.set_passes(self.passes)
        self._refresh_controller()

    def drain(self) -> None:
        """Wait for reductions under way, drop their results, and reset; blocks."""
        for bucket in self._buckets:
            if bucket.entry is not None:  # it writes to memory to which the next backward writes
                with contextlib.suppress(HorovodInternalError):  # of a job that has ended
                    bucket.wait(self._controller)
        self.reset()

    # ---- The controller, which changes where a job ends and another one begins.

    def _current_controller(self) -> Controller:
        return current().controller(self._process_set)

    def _refresh_controller(self) -> None:
        """Take the controller of the current job.

        In a new job the ranks negotiate all buckets anew.
        """
        included = self._process_set.included()
        controller = self._current_controller() if included else None
        self._active = included and self._process_set.size() > 1
        if controller is self._controller:
            return
        self._controller = controller
        self._buckets = []
        for state in self._states.values():
            state.bucket = state.sparse = state.view = None
        self._unassigned.clear()
        if included:
            self._overlaps = len(controller.comms) > 1 or has_spare_cores(controller.comms["cpu"])

    # ---- One reduction of all gradients.

    def synchronize(self, optimizer) -> None:
        """Reduce all gradients, missing ones as zeros; blocks."""
        current().check_process_set(self._process_set)  # else ranks would step by their own gradients
        self._refresh_controller()
        if not self._active:
            self.reset()  # a backward may have run while there were other ranks
            self.synchronized = True
            return
        try:
            self.register_hooks(optimizer)
            self._reduce_all(self._controller)
        finally:
            self.reset()
        self.synchronized = True

    def _reduce_all(self, controller: Controller) -> None:
        buckets = self._buckets
        for state in self._states.values():
            if state.was_modified():
                raise AssertionError(
                    f"the gradient of {state.name} was changed after the backward and before it was reduced: call "
                    "optimizer.synchronize() first, then clip or unscale, then step inside of "
                    "`with optimizer.skip_synchronize():`"
                )
        flags = self._sum_used_flags(controller) if buckets else None
        unknown = [state for state in self._states.values() if state.sparse is None and state.param.requires_grad]
        temporary: list = []
        if unknown:
            kinds, everybody = self._exchange_kinds(controller, unknown)
            temporary = self._assignment.make_temporary_buckets(self._ready_order(kinds), kinds)
        for bucket in (*buckets, *temporary):
            if bucket.entry is None:
                if not bucket.collected:
                    bucket.collect()
                bucket.submit(controller, waits=True)
        for bucket in (*buckets, *temporary):
            bucket.wait(controller)
        if flags is not None:
            controller.wait(flags)
            used = [count > 0 for count in flags.results[0].tolist()]
            at = 0
            for bucket in buckets:
                bucket.write_back(used[at : at + len(bucket.states)])
                at += len(bucket.states)
        for bucket in temporary:
            bucket.write_back([True] * len(bucket.states))
        if unknown and everybody:
            for state, sparse in kinds.items():
                state.sparse = sparse
            if temporary:
                temporary.sort(key=lambda bucket: bucket.sequence)
                states = [state for bucket in (*buckets, *temporary) for state in bucket.states]
                self._buckets = self._assignment.make_buckets(states, self._controller)

    def _sum_numbers(self, controller: Controller, what: str, numbers: list[int]) -> TensorTableEntry:
        """Start the sum of numbers over the ranks."""
        sent = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        first = next(iter(self._states.values())).name
        name = f"{self._prefix}{what} gradients of {first} and {len(self._states) - 1} more"
        request = Request("allreduce", name, ("int32",), ((len(numbers),),), op="sum")
        entry = TensorTableEntry(cached_request(request), [sent], [sent])
        controller.submit(entry, waits=True)
        return entry

    def _sum_used_flags(self, controller: Controller) -> TensorTableEntry:
        numbers = [int(has) for bucket in self._buckets for has in bucket.has_gradients()]
        return self._sum_numbers(controller, "used", numbers)

    def _exchange_kinds(
        self, controller: Controller, unknown: list[ParameterState]
    ) -> tuple[dict[ParameterState, bool], bool]:
        """Return the states of which some rank has a gradient, and whether all ranks took part.

        The states are keys of a dict; the value is whether the gradient is sparse.
        """
        numbers = [1]
        for state in unknown:
            grad = state.param.grad
            numbers.append(0 if grad is None else _SPARSE if grad.is_sparse and not self._sparse_as_dense else 1)
        entry = self._sum_numbers(controller, "kinds of", numbers)
        controller.wait(entry)
        present, *found = entry.results[0].tolist()
        kinds = {state: kind >= _SPARSE for state, kind in zip(unknown, found, strict=True) if kind}
        return kinds, present == controller.size

    def _ready_order(self, kinds) -> list[ParameterState]:
        return list(dict.fromkeys([*(state for state in self._unassigned if state in kinds), *kinds]))

    # ---- The loss of a closure.

    def average_loss(self, loss):
        """Reduce a loss as gradients are: some optimizers step by its value, which must be the same
        on all ranks.
        """
        if not self._active or loss is None or self.op not in (Average, Sum):
            return loss
        tensor = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        name = f"{self._prefix}loss of {next(iter(self._states.values())).name}"
        result = synchronize(allreduce_async(tensor, name=name, op=self.op, process_set=self._process_set, _waits=True))
        return result if isinstance(loss, torch.Tensor) else result.item()


def _make_hook(state: ParameterState, owner: weakref.ref):
    """Return the hook that a parameter calls once its gradient is there.

    It doesn't keep the optimizer alive.
    """

    def on_gradient(_param):
        reducer = owner()
        if reducer is not None:
            reducer._on_gradient(state)

    return on_gradient


def _remove_hooks(hooks: dict) -> None:
    for handle in hooks.values():
        handle.remove()
