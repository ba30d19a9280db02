"""Optimizer in backward: a unit's shards are stepped as soon as its gradients are reduced."""

from __future__ import annotations

import math
import weakref

import torch

from ..errors import InvalidArgument, InvalidUsage
from ..gradients.optimizer_in_backward import OptimizerInBackward
from ..optim import FusedOptimizer

__all__ = ["UnitStep"]


class UnitStep(OptimizerInBackward):
    """Steps an optimizer of `collectives.optim` unit by unit, and frees the gradients.

    `units`: a function that returns the units. All shards with a gradient must be the optimizer's,
    and its other parameters must have none.
    """

    items = "units"

    def __init__(self, optimizer: FusedOptimizer, units):
        super().__init__(optimizer)
        self._units = units

    def forget(self) -> None:
        """Drop the cached positions of parameters."""
        self._where: dict[int, tuple[int, int]] | None = None
        self._by_unit = weakref.WeakKeyDictionary()  # unit -> number of the optimizer's group -> indices in it

    # ---- A backward.

    def begin(self) -> None:
        """Begin a backward. Raises `InvalidUsage` where the last one's step was not ended, too."""
        if self.applied:
            raise InvalidUsage(
                "a backward comes behind one that has stepped the optimizer: call optimizer.step() in between, which "
                "ends the step; accumulate gradients with set_requires_gradient_sync(False); and activation "
                "checkpointing with use_reentrant=True, which makes several backwards of one, can't be had with "
                "HookState's optimizer"
            )
        super().begin()

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

    def _step_item(self, item, *, scale, clip, found) -> None:
        self.update(item, clip=clip, found=found)  # the optimizer reads the scale itself

    def _check_unscaled(self) -> None:
        if self._max_norm is not None:
            raise InvalidUsage(
                "scaler.unscale_(optimizer) was called, and the HookState's max_norm has been compared to what was not "
                "unscaled: leave unscale_ out, or clip with clip_grad_norm_ in place of max_norm"
            )

    def _unreduced(self) -> list:
        return self._outside({id(param.shard) for unit in self._units() for param in unit.params})

    def _members(self, unit) -> dict[int, list[int]]:
        """Return the optimizer's groups that have a unit's shards, with the indices of these
        shards.
        """
        found = self._by_unit.get(unit)
        if found is not None:
            return found
        if self._where is None:
            self._where = self._positions()
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

    # ---- State.

    @torch.no_grad()
    def state_dict(self, full: bool = True, comm=None) -> dict:
        """Return the optimizer's state dict: full, or this rank's shards."""
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
