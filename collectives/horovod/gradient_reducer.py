"""Gradient reducer of a DistributedOptimizer: when each gradient is reduced, and in which bucket.

In the first step each gradient is an operation of its own under its parameter's name, so that the
ranks compare names and shapes and find an order in which gradients become ready. From the second
step on, neighbours in that order share an `AllreduceBucket`. Two things a rank can't know by
itself: whether other ranks have a gradient that it doesn't have, and whether that gradient is
sparse. The ranks exchange these as small sums of numbers.
"""

from __future__ import annotations

import contextlib

import torch

from ..gradients.bucket_assignment import split_by_bucket
from ..gradients.bucket_filler import BucketFiller, ParameterState
from ..gradients.streams import has_spare_cores
from ..torch_compat import untraced
from .basics import current
from .bucket_assignment import BucketAssignment
from .controller import Controller
from .exceptions import HorovodInternalError
from .gradient_buckets import AllreduceBucket
from .operations import Average, Sum, allreduce_async, allreduce_async_, synchronize
from .process_sets import ProcessSet

__all__ = ["GradientReducer"]

_SPARSE = 1 << 16  # what a rank with a sparse gradient adds to a sum; one with a dense gradient adds 1
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


@untraced
class GradientReducer:
    """Reduces the gradients of an optimizer's parameters.

    `DistributedOptimizer` has checked the arguments. ``reduced_for_scaler``: whether gradients were
    reduced because a GradScaler unscales them. ``skip_reduction``: whether a step doesn't reduce.
    """

    steps_locally = False

    def __init__(
        self, names: dict[int, str], prefix: str, compression, passes: int, op, predivide: float, groups,
        sparse_as_dense: bool, process_set: ProcessSet, *, views: bool,
    ):  # fmt: skip
        self.op = op
        self.reduced_for_scaler = self.skip_reduction = self._synchronized = False
        self._names = names
        self._prefix = prefix
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._filler = BucketFiller(self, passes=passes)
        self._states = self._filler.states  # by id of the parameter
        self._assignment = BucketAssignment(
            self._states, prefix, compression, op, predivide, groups, process_set, views=views
        )
        self._buckets: list[AllreduceBucket] = []  # of all steps after the first, the same on all ranks
        # Whether a gradient is reduced as a sparse one, of parameters of which some rank has had one.
        self._kinds: dict[ParameterState, bool] = {}
        # With sparse_as_dense: parameters whose gradients are reduced as dense ones, and sparse again behind it.
        self._made_dense: dict[ParameterState, None] = {}
        self._controller: Controller | None = None
        self._overlaps = False
        self._refresh_controller()

    @property
    def backward_ran(self) -> bool:
        """Whether a backward has run since the last step or reduction."""
        return self._filler.backward_ran

    @property
    def synchronized(self) -> bool:
        """Whether gradients are reduced, and no backward has run since."""
        return self._synchronized and not self._filler.backward_ran

    def begin_step(self) -> None:
        """Forget that gradients were reduced: the step uses them up."""
        self._synchronized = self.reduced_for_scaler = False

    # ---- Parameters and their hooks.

    def register_hooks(self, optimizer) -> None:
        """Register hooks on parameters that have none: all, or those that were added or
        unfrozen.
        """
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.requires_grad:
                    name = self._names.get(id(param)) or f"allreduce.added.{number}.{index}"
                    self._filler.watch(param, name)

    def bucket_ready(self, bucket: AllreduceBucket) -> None:
        """Pack a bucket, and reduce it while the backward goes on. Called by the parameters' hooks."""
        overlaps = self._overlaps and self._current_controller() is self._controller
        bucket.read_grads()
        bucket.pack(record=not (overlaps and bucket.changes_gradients))
        if overlaps:
            bucket.submit(self._controller, waits=False)

    def refuse_gradient(self, state: ParameterState) -> None:
        """Raise the error for a gradient that came too often, or that requires a gradient."""
        if state.backwards_left <= 0:
            raise AssertionError(_TOO_MANY)
        raise AssertionError(
            f"the gradient of {state.name} requires a gradient itself, after backward(create_graph=True): take inner "
            "derivatives by torch.autograd.grad(..., create_graph=True), which leaves .grad alone"
        )

    def set_passes(self, passes: int) -> None:
        """Set the number of backwards before a step."""
        self._filler.set_passes(passes)

    def reset(self) -> None:
        """Drop what is under way, and count backwards from 0."""
        self.begin_step()
        self._filler.rewind(self._buckets)
        self._refresh_controller()

    def drain(self) -> None:
        """Wait for reductions under way, drop their results, and reset; blocks."""
        for bucket in self._buckets:
            if bucket.work is not None:  # it writes to memory to which the next backward writes
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
        self._filler.closed = int(not included or self._process_set.size() == 1)
        if controller is self._controller:
            return
        self._controller = controller
        self._buckets = []
        self._kinds.clear()
        self._made_dense.clear()
        self._filler.detach()
        if included:
            self._overlaps = len(controller.comms) > 1 or has_spare_cores(controller.comms["cpu"])

    # ---- One reduction of all gradients.

    def synchronize(self, optimizer) -> None:
        """Reduce all gradients, missing ones as zeros; blocks."""
        current().check_process_set(self._process_set)  # else ranks would step by their own gradients
        self._refresh_controller()
        if self._filler.closed:
            self.reset()  # a backward may have run while there were other ranks
            self._synchronized = True
            return
        try:
            self.register_hooks(optimizer)
            self._reduce_all(self._controller)
        finally:
            self.reset()
        self._synchronized = True

    def _reduce_all(self, controller: Controller) -> None:
        buckets = self._buckets
        if (changed := self._filler.find_changed(buckets)) is not None:
            raise AssertionError(
                f"the gradient of {changed.name} was changed after the backward and before it was reduced: call "
                "optimizer.synchronize() first, then clip or unscale, then step inside of "
                "`with optimizer.skip_synchronize():`"
            )
        flags = self._sum_used_flags() if buckets else None
        unknown = [state for state in self._states.values() if state not in self._kinds and state.param.requires_grad]
        temporary: list[AllreduceBucket] = []
        if unknown:
            kinds, everybody = self._exchange_kinds(unknown)
            temporary = self._assignment.make_temporary_buckets(kinds)
        for bucket in (*buckets, *temporary):
            if bucket.work is None:
                if bucket.sending is None:
                    bucket.read_grads()
                    bucket.pack(record=False)
                bucket.submit(controller, waits=True)
        for bucket in (*buckets, *temporary):
            bucket.wait(controller)
        if flags is not None:
            used = [count > 0 for count in synchronize(flags).tolist()]
            for bucket, part in zip(buckets, split_by_bucket(used, buckets), strict=True):
                bucket.unpack(part)
        for bucket in temporary:
            bucket.unpack([True] * len(bucket.params))
        self._make_sparse_again()
        if unknown and everybody:
            self._kinds |= kinds
            if temporary:
                temporary.sort(key=lambda bucket: bucket.sequence)
                self._replace_buckets([*buckets, *temporary])

    def _make_sparse_again(self) -> None:
        """Make gradients sparse that were sparse before they were reduced as dense ones: on all ranks, since
        some optimizers (SparseAdam) take no others.
        """
        for state in self._made_dense:
            grad = state.param.grad
            if grad is not None and not grad.is_sparse:
                state.param.grad = grad.to_sparse(1)  # rows, as those of nn.Embedding

    def _replace_buckets(self, former: list[AllreduceBucket]) -> None:
        """Make the buckets of further steps, for the parameters of these buckets in their order."""
        states = [self._states[id(param)] for bucket in former for param in bucket.params]
        kinds = {state: self._kinds[state] for state in states}
        self._buckets = self._assignment.make_buckets(kinds, self._controller)
        self._filler.attach(self._buckets)

    def _sum_numbers(self, what: str, numbers: list[int]) -> int:
        """Start the sum of numbers over the ranks; return its handle."""
        sent = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        first = next(iter(self._states.values())).name
        name = f"{self._prefix}{what} gradients of {first} and {len(self._states) - 1} more"
        return allreduce_async_(sent, name=name, op=Sum, process_set=self._process_set, _waits=True)

    def _sum_used_flags(self) -> int:
        numbers = [int(param.grad is not None) for bucket in self._buckets for param in bucket.params]
        return self._sum_numbers("used", numbers)

    def _exchange_kinds(self, unknown: list[ParameterState]) -> tuple[dict[ParameterState, bool], bool]:
        """Return the states of which some rank has a gradient, and whether all ranks took part.

        The states are keys of a dict, in the order in which their gradients came here; the value is
        whether the gradient is sparse.
        """
        numbers = [1]
        for state in unknown:
            grad = state.param.grad
            numbers.append(0 if grad is None else _SPARSE if grad.is_sparse else 1)
        present, *found = synchronize(self._sum_numbers("kinds of", numbers)).tolist()
        kinds = {state: kind >= _SPARSE for state, kind in zip(unknown, found, strict=True) if kind}
        if self._sparse_as_dense:
            self._made_dense |= {state: None for state, sparse in kinds.items() if sparse}
            kinds = dict.fromkeys(kinds, False)
        arrived = {state: kinds[state] for state in self._filler.arrived if state in kinds}
        return arrived | kinds, present == self._process_set.size()

    # ---- The loss of a closure.

    def average_loss(self, loss):
        """Reduce a loss as gradients are: some optimizers step by its value, which must be the same
        on all ranks.
        """
        if self._filler.closed or loss is None or self.op not in (Average, Sum):
            return loss
        is_tensor = isinstance(loss, torch.Tensor)
        tensor = loss.detach() if is_tensor else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        name = f"{self._prefix}loss of {next(iter(self._states.values())).name}"
        result = synchronize(allreduce_async(tensor, name=name, op=self.op, process_set=self._process_set, _waits=True))
        return result if is_tensor else result.item()
