"""Unit gradients: which gradients of a unit a backward has computed, and which wait to be reduced."""

from __future__ import annotations

import torch

from .param import ShardedParam
from .param_group import ParamGroup

__all__ = ["UnitGradients"]


class UnitGradients:
    """Tracks the gradients of a unit's parameter groups.

    `trainable`: the groups whose gradients are reduced. `trainable_mask` identifies them, and
    `trainable_indices` are the positions of their parameters in `params`. `requires_grad_bits`: a bit
    for each parameter that requires a gradient.
    """

    def __init__(self, groups: list[ParamGroup]):
        self.groups = groups
        self.params = [param for group in groups for param in group.params]
        self.update_trainable()

    # ---- What is reduced.

    def update_trainable(self) -> None:
        """Find the groups whose gradients are reduced.

        They must be the same on all ranks; `trainable_mask` identifies them.
        """
        self.trainable = [group for group in self.groups if group.requires_grad]
        self.requires_grad_bits = sum(1 << at for at, param in enumerate(self.params) if param.requires_grad)
        self.trainable_mask = sum(1 << at % 8 for at, group in enumerate(self.groups) if group.requires_grad) & 0xFF
        ids = {id(param) for group in self.trainable for param in group.params}
        self.trainable_indices = [at for at, param in enumerate(self.params) if id(param) in ids]
        self._grads_left = sum(param.expects_grad and not param.has_grad_in_backward for param in self.params)

    def extend_trainable(self, flags: list[int]) -> None:
        """Add the groups that other ranks reduce: those with a parameter whose flag isn't 0."""
        if sum(map(bool, flags)) > len(self.trainable_indices):
            new = {id(param) for param, flag in zip(self.params, flags, strict=True) if flag}
            for group in self.groups:
                group.requires_grad = group.requires_grad or any(id(param) in new for param in group.params)
            self.update_trainable()

    @property
    def full_bytes(self) -> int:
        """Bytes of the full gradients of all trainable parameters, in the dtype of the reduction."""
        return sum(group.layout.total * group.reduce_dtype.itemsize for group in self.trainable)

    def has_gradients(self) -> bool:
        """Whether full gradients are waiting to be reduced."""
        return any(group.gradients.has_gradients() for group in self.trainable)

    def drop_unused(self, flags: list[int]) -> list[torch.nn.Parameter]:
        """Drop the new gradients of parameters that no rank has used: those with a flag below 2.
        Return the other shards that have post-accumulate-grad hooks.
        """
        hooked = []
        for param, flag in zip(self.params, flags, strict=True):
            if param.grad_is_new and flag < 2:
                param.shard.grad = None
            param.grad_is_new = False
            if flag >= 2 and param.shard._post_accumulate_grad_hooks:
                hooked.append(param.shard)
        return hooked

    # ---- Shards' gradients, for summon_full_params.

    @torch.no_grad()
    def gather(self) -> None:
        """Set the substitutes' gradients to the full gradients, gathered from the shards. A
        collective.
        """
        for group in self.trainable:
            values = [(param, param.shard.grad) for param in group.params]
            group.gradients.set_substitute_grads(group.all_gather_like_shards(values, group.dtype))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy to the shards' gradients what was written to the substitutes'."""
        for group in self.trainable:
            group.gradients.write_back()

    # ---- A backward.

    def drop(self, params: list[ShardedParam]) -> None:
        """Drop the full gradients of these parameters that wait to be reduced."""
        for param in params:
            param.full.grad = param.accumulated_grad = None
            param.has_unreduced_grad = False

    def record_grad(self, param: ShardedParam) -> bool:
        """Record that a parameter's gradient was computed in this backward; return whether it was
        the last one expected.
        """
        param.has_unreduced_grad = True
        if param.has_grad_in_backward:
            return False
        param.has_grad_in_backward = True
        self._grads_left -= param.expects_grad
        return param.expects_grad and not self._grads_left

    def set_expected(self, expected: tuple[bool, ...]) -> None:
        """Set which parameters get a gradient in the next backward."""
        for param, expects_grad in zip(self.params, expected, strict=True):
            param.expects_grad = expects_grad
        self._grads_left = sum(expected)

    def end_backward(self, *, reduced: bool, drop: bool, repeated: bool) -> None:
        """Reset the tracking of gradients for the next backward.

        `reduced`: the backward has reduced them; otherwise they add up. `drop`: drop the gradients
        of the last one. `repeated`: the next one computes those that were expected in this one;
        otherwise, those that it has computed.
        """
        if any(param.has_grad_in_backward for param in self.params):
            for param in self.params:
                if not drop:
                    param.expects_grad = param.expects_grad if repeated else param.has_grad_in_backward
                elif param.has_grad_in_backward:
                    param.full.grad = None
                    param.has_unreduced_grad = param.accumulated_grad is not None
                param.has_grad_in_backward = False
        if reduced:
            for param in self.params:
                param.has_unreduced_grad = False
        else:
            for group in self.trainable:
                group.gradients.to_accumulated_grad()
        self._grads_left = sum(param.expects_grad for param in self.params)
