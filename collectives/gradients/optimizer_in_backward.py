"""Optimizer in backward: an optimizer that is stepped inside of the backward, at once or, where the
step must wait, in ``optimizer.step()``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument, InvalidUsage
from ..kernels import Statistics
from ..optim import FusedOptimizer
from ..optimizer_state import clip_coefficient

__all__ = ["OptimizerInBackward"]


class OptimizerInBackward:
    """Base of what steps an optimizer of `collectives.optim` inside of the backward.

    `optimizer`: a `collectives.optim.SGD`, `Adam` or `AdamW`, whose ``step()`` from then on only
    ends the step; see `step`. A front end calls `begin` at the start of a backward. For each of its
    items (a DDP bucket, a sharded unit) it then steps at once, or defers the update to
    ``optimizer.step()``, as a GradScaler needs. A subclass steps an item and says which parameters
    its items have.
    """

    items = ""  # what is stepped as a whole, in the plural

    def __init__(self, optimizer: FusedOptimizer):
        self.optimizer = optimizer
        self.applied = False  # whether an update was applied in the backward that has begun last
        self._divided = False  # whether the applied update undid a GradScaler's scale
        self.discard()
        self.forget()
        optimizer._sharded = self

    # ---- What a subclass has of its own.

    def forget(self) -> None:
        """Drop what is cached of parameters, groups and state.

        The optimizer calls it when it gets others.
        """
        raise NotImplementedError

    def _step_item(self, item, *, scale, clip, found) -> None:
        """Step a deferred item: `scale` divides its gradients (None: by nothing), `clip` multiplies
        them (None: by nothing), and where `found` isn't 0 nothing changes.
        """
        raise NotImplementedError

    def _check_unscaled(self) -> None:
        """Raise `InvalidUsage` where ``scaler.unscale_`` must not be called before a deferred step."""

    def _unreduced(self) -> list[tuple[torch.nn.Parameter, str]]:
        """Return the optimizer's parameters that are in no item, each with its name for a message."""
        raise NotImplementedError

    def state_dict(self, full: bool = True, comm=None) -> dict[str, Any]:
        """Return the optimizer's state dict.

        `full`: the state as if it had not been sharded, in the format of torch's optimizer of that
        name, on every rank; all ranks must call it, and it blocks until they do. Otherwise this
        rank's shard, as ``optimizer.state_dict()`` returns it, which only the same rank of as many
        can load. `comm`: the communicator to gather by, where no gradient has been reduced yet.
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, of any number of ranks, or this rank's shard. A local call."""
        raise NotImplementedError

    def refresh_masters(self) -> None:
        """Update this rank's masters from the parameters; see the optimizer's `refresh_masters`."""
        self.optimizer._refresh_masters()

    # ---- A backward.

    @property
    def pending(self) -> int:
        """The number of items whose update waits for ``optimizer.step()``."""
        return len(self._pending)

    def begin(self) -> None:
        """Begin a backward, before its first reduction.

        Raises `InvalidUsage` where the last one's updates still wait.
        """
        if self._pending:
            raise InvalidUsage(
                f"the updates of {len(self._pending)} {self.items} still wait for optimizer.step(): call it after each "
                "backward that synchronises (scaler.step(optimizer) with a GradScaler), or drop them with "
                f"{type(self).__name__}.discard()"
            )
        self.applied = self._divided = False

    def discard(self) -> None:
        """Drop deferred updates, e.g. after an error between backward and ``optimizer.step()``."""
        self._pending: list = []
        self._nonfinite_counts: list = []
        self._norm = self._max_norm = None

    def defer(self, item, norm=None, max_norm=None, found=None) -> None:
        """Leave an item's update to ``optimizer.step()``. A local call.

        `norm`: of all reduced gradients, before unscaling; with `max_norm` they are clipped by it.
        `found`: the number of non-finite gradients, over all ranks; if it isn't 0 the step is left
        out. These are numbers, `Statistics` or tensors of one element, final when this is called;
        those of the whole backward may come with its last item alone.
        """
        self._pending.append(item)
        if norm is not None:
            self._norm, self._max_norm = norm, max_norm
        if found is not None:
            self._nonfinite_counts.append(found)

    # ---- What the optimizer calls.

    def step(self, closure=None, **others) -> None:
        """End a step, for ``optimizer.step()``: apply the deferred updates.

        The backward has applied all others. Reads what a GradScaler sets (``optimizer.grad_scale``,
        the divisor, and ``found_inf``). Blocks as the collectives do. Raises `InvalidUsage` where
        there was no synchronised backward since the last step, where ``scaler.unscale_`` was called
        though a norm depends on the scale, and where a parameter has a gradient that was not
        reduced; `InvalidArgument` for a closure and for arguments.
        """
        self._refuse_arguments(closure, others)
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if self._pending:
            if found_inf is not None and scale is None:
                self._check_unscaled()
            self._step_pending(scale, found_inf)
        elif not self.applied:
            raise InvalidUsage(
                "no synchronised backward since the last step: the optimizer is stepped inside of the backward, once "
                "for each that reduces gradients, outside of no_sync()"
            )
        elif found_inf is not None and not self._divided:
            raise InvalidUsage(
                "a GradScaler steps this optimizer, but its updates were applied in the backward by gradients that "
                "were still scaled: make the GradScaler before the first backward"
            )
        self.applied = self._divided = False
        for param, name in self._unreduced():
            if param.grad is not None:
                raise InvalidUsage(
                    f"{name} has a gradient but was in no {self.items.removesuffix('s')} of the HookState, so that it "
                    "was not stepped: give it an optimizer of its own, or, if it is another module's, let this state "
                    "reduce that module's gradients, too"
                )

    def _refuse_arguments(self, closure, others: dict) -> None:
        if closure is not None:
            raise InvalidArgument("the optimizer is stepped inside of the backward: step() takes no closure")
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise InvalidArgument(
                f"the optimizer is stepped by its HookState, so step() takes no {given[0]}: use the state's max_norm, "
                "or a GradScaler"
            )

    def _step_pending(self, scale, found_inf) -> None:
        clip = None
        if self._norm is not None and self._max_norm is not None:
            norm = self._norm.norm if isinstance(self._norm, Statistics) else self._norm
            if not isinstance(norm, torch.Tensor):
                norm = torch.tensor(norm, dtype=torch.float64, device="cpu")
            norm = norm.double()
            norm = norm if scale is None else norm / scale.to(norm.device, torch.float64)
            clip = clip_coefficient(norm, self._max_norm)
        found = FusedOptimizer._parse_found_nonfinite(*self._nonfinite_counts, found_inf)
        pending = self._pending
        self.discard()
        for item in pending:
            self._step_item(item, scale=scale, clip=clip, found=found)

    def _positions(self) -> dict[int, tuple[int, int]]:
        """Return the number of each parameter's group and its index there, by the parameter's id."""
        return {
            id(param): (number, index)
            for number, group in enumerate(self.optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }

    def _outside(self, reduced: set[int]) -> list[tuple[torch.nn.Parameter, str]]:
        """Return the optimizer's parameters whose ids aren't in `reduced`, each with its name."""
        return [
            (param, f"parameter {index} of group {number} (shape {tuple(param.shape)})")
            for number, group in enumerate(self.optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if id(param) not in reduced
        ]
