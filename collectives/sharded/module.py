"""fully_shard: a module becomes a unit, in place, and its forward and backward gather, let go and reduce.

The module's class becomes one that derives from `ShardedModule` and from the module's own; nothing is wrapped, and no
name changes.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from .clip import clip_grad_norm_
from .forward_hooks import run_forward
from .managed_params import units_in
from .post_forward import parse_reshard_after_forward, set_reshard_after_forward
from .scheduler import Scheduler
from .state.state_dict import make_state_dict, pre_load_state_dict, unsharded_params
from .unit import State, Unit

__all__ = ["ShardedModule", "UnshardHandle", "register_forward_method", "units_in"]

# ---- What people call.


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let another method of a sharded module be a forward: parameters are gathered for it. Others are left alone."""
    if not isinstance(module, ShardedModule):
        return
    method = getattr(module, name, None)
    if not callable(method):
        raise InvalidArgument(f"{type(module).__name__} has no method {name!r:.60}", op="register_forward_method")

    @functools.wraps(method)
    def call(*args, **kwargs):
        return run_forward(module._unit, method, args, kwargs)

    object.__setattr__(module, name, call)


class UnshardHandle:
    """What ``unshard(async_op=True)`` gives."""

    def __init__(self, unit: Unit):
        self._unit = unit

    def wait(self) -> None:
        """Wait for the gather, and give the module the full parameters."""
        if self._unit.state is State.GATHERING:
            self._unit.wait_for_unshard()


class ShardedModule:
    """What `fully_shard` adds to a module's class; the names are FSDP2's."""

    _unit: Unit
    _scheduler: Scheduler

    def __call__(self, *args, **kwargs):
        return run_forward(self._unit, super().__call__, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, not those of inner units. A collective.

        With `async_op` it gives a handle, whose `wait()` is to come before the parameters are used; so does a forward.
        """
        self._scheduler.unshard(self._unit, async_op=async_op)
        if async_op:
            return UnshardHandle(self._unit)
        self._unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Give the module its pieces again; a local call. What was written to the full parameters is lost."""
        self._unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, keep_bytes: int | None = None
    ) -> None:
        """Say whether backwards reduce gradients; False: full ones add up, on each rank alone, until one does.

        `keep_bytes`: so many bytes of full gradients may be kept; units beyond them reduce in each backward, and add up
        in pieces. The innermost and first come first; None: no limit.
        """
        left = None if keep_bytes is None else int(keep_bytes)
        for unit in reversed(units_in(self, recurse=recurse)):
            unit.reduce_grads = bool(requires_gradient_sync)
            if left is not None and not unit.reduce_grads:
                left -= unit.full_gradient_bytes
                unit.reduce_grads = left < 0

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """FSDP2's name for leaving out the sum over replicas; here they are summed with the pieces: True only."""
        if not requires_all_reduce:
            raise InvalidArgument("gradients are reduced over pieces and replicas at once: set_requires_gradient_sync")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether to let go of the parameters behind a forward, as `fully_shard` takes it.

        An int is a collective, which all ranks must call.
        """
        for unit in units_in(self, recurse=recurse):
            set_reshard_after_forward(unit, parse_reshard_after_forward(reshard_after_forward, unit.ranks))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether to let go of the parameters behind a backward; False: the next forward needs no gather.

        That is for accumulation: an optimizer's step lets go of them all the same.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Name the modules to gather in advance when this one's forward begins."""
        self._unit.forward_prefetch = [_sharded(module)._unit for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Name the modules to gather in advance when this one's backward begins."""
        self._unit.backward_prefetch = [_sharded(module)._unit for module in modules]

    def set_static_graph(self, static_graph: bool) -> None:
        """Say whether ranks whose steps were the same twice go on with no wait for each other; on GPUs they do.

        False: they agree before each collective, on the host, so that they may take other branches in any step. A
        collective; of all units over the same communicator.
        """
        self._scheduler.set_static_graph(bool(static_graph))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by this in place of the number of ranks; in each rank, before the sum."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise InvalidArgument(f"factor must be a number above 0, not {factor!r:.40}")
        for unit in units_in(self):
            unit.gradient_divide_factor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip the gradients of this module's parameters, sharded or not, by their norm over all ranks; give the norm.

        A collective. ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)`` does the same. `error_if_nonfinite`:
        RuntimeError on all ranks alike. Raises `InvalidUsage` where a HookState's optimizer has taken the gradients.
        """
        return clip_grad_norm_(self, units_in(self), max_norm, norm_type, error_if_nonfinite, foreach)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last one of this step; False leaves open what would end it."""
        self._scheduler.is_last_backward = bool(is_last_backward)

    def set_custom_all_gather(self, comm) -> None:
        """Gather this module's parameters by somebody else's ``comm(output, input, group, async_op)``.

        It may have FSDP2's ``allocate(size, *, dtype, device)``; it gives None, or what has a ``wait()``.
        """
        self._unit.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm) -> None:
        """Reduce this module's gradients by somebody else's ``comm(output, input, group, op, async_op)``."""
        self._unit.custom_reduce_scatter = comm

    def set_custom_all_reduce(self, comm) -> None:
        """Reduce over replicas by somebody else's ``comm(tensor, group, op, async_op)``, in place."""
        self._unit.custom_all_reduce = comm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the pieces' gradients, and drop full ones that wait for a synchronised backward."""
        super().zero_grad(set_to_none)
        for unit in units_in(self):
            unit.drop_gradients()

    def _apply(self, fn, recurse=True):
        if self._unit.registration.has_substitutes:  # full parameters, in an initialisation
            return super()._apply(fn, recurse)
        self._unit.reshard()
        result = super()._apply(fn, recurse)
        self._unit.reset_sharded_params()
        return result

    def state_dict(self, *args, **kwargs):
        """Give the full parameters and buffers; or pieces, by `set_state_dict_type`. A collective.

        Tensors of its own, unsharded in turn, unit by unit; the keys and shapes are the unsharded module's.
        """
        return make_state_dict(self._unit, super().state_dict, args, kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        pre_load_state_dict(self._unit, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def apply(self, fn):
        """Call `fn` of each module inside, whose parameters are full ones then; keep what it writes. A collective."""
        with unsharded_params([self._unit]):
            return super().apply(fn)

    def extra_repr(self) -> str:
        """Tell the unit beside what the module tells of itself."""
        own, unit = super().extra_repr(), self._unit
        count = sum(param.count for param in unit.params)
        here = sum(param.shard.numel() for param in unit.params)
        told = f"unit {unit.index}: {here} of {count} elements on rank {unit.ranks.world.rank}"
        return f"{own}, {told}" if own else told

    def __deepcopy__(self, memo):
        raise InvalidUsage(_NO_COPY, op="deepcopy")

    def __reduce_ex__(self, protocol):
        raise InvalidUsage(_NO_COPY, op="pickle")


_NO_COPY = (
    "a sharded module can't be copied or pickled, since its parameters are on other ranks, too: save its state_dict(), "
    "or copy it before it is sharded"
)


def _sharded(module) -> ShardedModule:
    if not isinstance(module, ShardedModule):
        raise InvalidArgument(f"only sharded modules can be gathered in advance, not {kind_of(module)}")
    return module


# ---- Optimizers.
