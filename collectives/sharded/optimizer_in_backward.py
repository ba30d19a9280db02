"""Optimizer in backward: a unit's shards are stepped as soon as its gradients are reduced."""

from __future__ import annotations

import math
import weakref

import torch

from ..errors import InvalidArgument, InvalidUsage
from ..gradients.zero import refuse_arguments
from ..optim import FusedOptimizer

__all__ = ["OptimizerInBackward"]


class OptimizerInBackward:
    """Steps an optimizer of `collectives.optim` unit by unit, and frees the gradients.

    `optimizer`: a `collectives.optim.SGD`, `Adam` or `AdamW` of shards, whose ``step()`` then only
    ends the step. `units`: a function that returns the units. All shards with a gradient must be
    the optimizer's, and its other parameters must have none.
    """

    def __init__(self, optimizer: FusedOptimizer, units):
        self.optimizer = optimizer
        self.applied = False  # the last backward has stepped, and step() has not been called
        self._units = units
        self._pending: list | None = None
        self._norm = self._max_norm = self._found = None
        self.forget()
        optimizer._sharded = self

    def forget(self) -> None:
        """Drop the cached positions of parameters; called when the optimizer's parameters or groups
        change.
        """
        self._where: dict[int, tuple[int, int]] | None = None
        self._by_unit = weakref.WeakKeyDictionary()  # unit -> number of the optimizer's group -> indices in it

    # ---- A backward.

    def begin(self) -> None:
        """Begin a backward. Raises `InvalidUsage` where the last one's step was not ended."""
        if self._pending is not None:
            raise InvalidUsage(
                "the last backward's updates still wait for optimizer.step(): call it after each backward that "
                "synchronises (scaler.step(optimizer) with a GradScaler)"
            )
        if self.applied:
            raise InvalidUsage(
                "a backward comes behind one that has stepped the optimizer: call optimizer.step() in between, which "
                "ends the step; accumulate gradients with set_requires_gradient_sync(False); and activation "
                "checkpointing with use_reentrant=True, which makes several backwards of one, can't be had with "
                "HookState's optimizer"
            )

    def discard(self) -> None:
        """Drop the deferred updates."""
        self._pending = self._norm = self._max_norm = self._found = None

    @torch.no_grad()
    def update(self, unit, *, clip=None, found=None) -> None:
        """Step a unit's shards and free their gradients. A local call.

        `clip`: a factor of the gradients. `found`: where it isn't 0, the gradients are freed
        without a step.
        """
        self.optimizer._step_params(self._members(unit), id(unit), clip=clip, found_nonfinite=found)
        for group in unit.gradients.trainable:
            for param in group.params:
                param.shard.grad = None
            group.gradients.flat = None
        unit.post_optim_step()
        self.applied = True
        self.optimizer._opt_called = True  # lr schedulers check it

    def defer(self, units, norm=None, max_norm=None, found=None) -> None:
        """Defer the update of units to ``optimizer.step()``, which clips by `max_norm`. `norm`: of
        all ranks, before unscaling.
        """
        self._pending = list(units)
        self._norm, self._max_norm, self._found = norm, max_norm, found

    def _members(self, unit) -> dict[int, list[int]]:
        """Return the optimizer's groups that have a unit's shards, with the indices of these
        shards.
        """
        found = self._by_unit.get(unit)
        if found is not None:
            return found
        if self._where is None:
            self._where = {
                id(param): (number, index)
                for number, group in enumerate(self.optimizer.param_groups)
                for index, param in enumerate(group["params"])
            }
        found = {}
        for group in unit.gradients.trainable:
            for param in group.params:
                place = self._where.get(id(param.shard))
                if place is None:
                    raise InvalidArgument(
                        f"the HookState's optimizer doesn't have {param.name} of {unit!r}: give it all trainable "
                        "parameters of the modules that the state serves, or freeze this one (requires_grad=False)"
                    )
                found.setdefault(place[0], []).append(place[1])
        self._by_unit[unit] = {number: sorted(members) for number, members in found.items()}
        return self._by_unit[unit]

    # ---- What the optimizer calls.

    def step(self, closure=None, **others) -> None:
        """End a step: ``optimizer.step()`` calls this. Applies deferred updates; what the backward
        has stepped stays.

        Reads what a GradScaler sets (``optimizer.grad_scale`` and ``found_inf``, on which the ranks
        have agreed). Raises `InvalidUsage` where there was no synchronised backward since the last
        step, and where a parameter has a gradient and is in no unit; `InvalidArgument` for a
        closure and for arguments.
        """
        refuse_arguments(closure, others, "its HookState", "the state's")
        optimizer = self.optimizer
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if self._pending is not None:
            if found_inf is not None and scale is None and self._max_norm is not None:
                raise InvalidUsage(
                    "scaler.unscale_(optimizer) was called, and the HookState's max_norm has been compared to what was "
                    "not unscaled: leave unscale_ out, or clip with clip_grad_norm_ in place of max_norm"
                )
            clip = None
            if self._norm is not None and self._max_norm is not None:
                norm = torch.as_tensor(self._norm, dtype=torch.float64)
                norm = norm if scale is None else norm / scale.to(norm.device, torch.float64)
                clip = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
            found = FusedOptimizer._parse_found_nonfinite(self._found)
            pending = self._pending
            self.discard()
            for unit in pending:
                self.update(unit, clip=clip, found=found)
        elif not self.applied:
            raise InvalidUsage(
                "no synchronised backward since the last step: the optimizer is stepped inside of the backward, once "
                "for each that reduces gradients"
            )
        elif found_inf is not None:
            raise InvalidUsage(
                "a GradScaler steps this optimizer, but its updates were applied in the backward by gradients that "
                "were still scaled: make the GradScaler before the first backward"
            )
        self.applied = False
        own = {id(param.shard) for unit in self._units() for param in unit.params}
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None and id(param) not in own:
                    raise InvalidUsage(
                        f"parameter {index} of group {number} (shape {tuple(param.shape)}) has a gradient but is in no "
                        "unit of the HookState, so that it was not stepped: give it an optimizer of its own"
                    )

    def refresh_masters(self) -> None:
        """Copy this rank's shards to their master weights."""
        self.optimizer._refresh_masters()

    # ---- State.

    @torch.no_grad()
    def state_dict(self, full: bool = True, comm=None) -> dict:
        """Return the optimizer's state dict. `full`: as if nothing were sharded; all ranks must
        call it.

        Otherwise what ``optimizer.state_dict()`` returns: the state of this rank's shards, which
        only the same rank of as many ranks can load.
        """
        given = self.optimizer.state_dict()
        if not full:
            return given
        numbers = self._param_numbers()
        for unit in self._units():
            for group in unit.gradients.trainable:
                states = [given["state"].get(numbers.get(id(param.shard))) for param in group.params]
                keys = {key for state in states if state for key, value in state.items() if _is_per_element(key, value)}
                for key in sorted(keys):
                    self._gather(group, states, key, given["state"], numbers)
        return given

    def _gather(self, group, states, key, given, numbers) -> None:
        members = [(param, state) for param, state in zip(group.params, states, strict=True) if state and key in state]
        values = [(param, state[key]) for param, state in members]
        whole = group.all_gather_like_shards(values, values[0][1].dtype)
        for param, _ in members:
            number = numbers[id(param.shard)]
            full = whole[param.offset : param.offset + param.count].view(param.shape).clone()
            given[number] = {**given[number], key: full}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a full state dict, of any number of ranks, or that of this rank's shards. A local
        call.
        """
        numbers = self._param_numbers()
        found = dict(state_dict["state"])
        for unit in self._units():
            for group in unit.gradients.trainable:
                for param in group.params:
                    number, count = numbers.get(id(param.shard)), param.shard.numel()
                    if number in found:
                        found[number] = {
                            key: value.reshape(-1)[param.start : param.start + count].view(param.shard.shape)
                            if _is_per_element(key, value)
                            and value.shape == param.shape
                            and math.prod(param.shape) != count
                            else value
                            for key, value in found[number].items()
                        }
                        for key, value in found[number].items():
                            if _is_per_element(key, value) and value.shape != param.shard.shape:
                                raise InvalidArgument(
                                    f"the {key} to load of {param.name} has the shape {tuple(value.shape)}: neither "
                                    f"the parameter's, {tuple(param.shape)}, nor this rank's piece's, "
                                    f"{tuple(param.shard.shape)}"
                                )
        self.optimizer.load_state_dict({**state_dict, "state": found})

    def _param_numbers(self) -> dict[int, int]:
        """Return each parameter's number in the optimizer's state dict, by the parameter's id."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return {id(param): number for number, param in enumerate(params)}


def _is_per_element(key: str, value) -> bool:
    """Whether an entry of the state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and key != "step"
