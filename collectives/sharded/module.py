"""Sharded module: the base class of every sharded module's class, with FSDP2's methods."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from .clip import clip_grad_norm_
from .conversions import restored_on_error
from .forward_hooks import run_forward
from .fsdp2_settings import FSDP2Settings
from .managed_params import named_params, units_in
from .post_forward import parse_reshard_after_forward, set_reshard_after_forward
from .state.state_dict import make_state_dict, pre_load_state_dict, unsharded_params
from .unit import State, Unit

__all__ = ["ShardedModule", "UnshardHandle", "register_forward_method", "share_comm_ctx", "units_in"]


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make another method of a sharded module a forward: parameters are gathered for it. Other
    modules are left alone.
    """
    if not isinstance(module, ShardedModule):
        return
    method = getattr(module, name, None)
    if not callable(method):
        raise InvalidArgument(f"{type(module).__name__} has no method {name!r:.60}", op="register_forward_method")

    @functools.wraps(method)
    def call(*args, **kwargs):
        return run_forward(module, method, args, kwargs)

    object.__setattr__(module, name, call)


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Check that these sharded modules share their streams and buffers, as those over one communicator
    always do. FSDP2's name.

    Raises `InvalidArgument` for modules that aren't sharded, or are sharded over different
    communicators.
    """
    schedulers = {_sharded(module)._scheduler for module in modules}
    if len(schedulers) > 1:
        raise InvalidArgument(
            "these modules are sharded over different communicators, each with streams and buffers of its own: shard "
            "them over the same comm, mesh or process group",
            op="share_comm_ctx",
        )


class UnshardHandle:
    """Handle of ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit):
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather, and register the full parameters on the module."""
        if self._unit.state is State.GATHERING:
            self._unit.wait_for_unshard()


class ShardedModule(FSDP2Settings):
    """Base class that `fully_shard` adds to a module's class; its methods have FSDP2's names."""

    def __call__(self, *args, **kwargs):
        return run_forward(self, super().__call__, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters, not those of inner units. A collective.

        `async_op`: return a handle, whose `wait()` must come before the parameters are used; a
        forward waits, too.
        """
        self._scheduler.unshard(self._unit, async_op=async_op)
        if async_op:
            return UnshardHandle(self._unit)
        self._unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Register the shards on the module and free the full parameters; what was written to them
        is lost. A local call.
        """
        self._unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True, keep_bytes: int | None = None
    ) -> None:
        """Set whether backwards reduce gradients. False: full gradients add up on each rank until a
        backward that reduces.

        `keep_bytes`: the most bytes of full gradients to keep; None: no limit. Units beyond that
        reduce in each backward, and their shards' gradients add up. The innermost and first units
        are kept first.
        """
        left = None if keep_bytes is None else int(keep_bytes)
        for unit in reversed(units_in(self, recurse=recurse)):
            unit.reduce_grads = bool(requires_gradient_sync)
            if left is not None and not unit.reduce_grads:
                left -= unit.gradients.full_bytes
                unit.reduce_grads = left < 0

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after a forward, as `fully_shard` takes it.

        With an int it is a collective, which all ranks must call.
        """
        for unit in units_in(self, recurse=recurse):
            set_reshard_after_forward(unit, parse_reshard_after_forward(reshard_after_forward, unit.ranks))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after a backward; False: the next forward needs no all-gather.

        This is for accumulation: an optimizer's step reshards all the same.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set the modules to prefetch when this one's forward begins."""
        self._unit.forward_prefetch = [_sharded(module)._unit for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set the modules to prefetch when this one's backward begins."""
        self._unit.backward_prefetch = [_sharded(module)._unit for module in modules]

    def set_static_graph(self, static_graph: bool) -> None:
        """Set whether ranks whose passes repeat themselves go on without agreeing on each
        collective, which is the default.

        False: as inside of `uneven`, until it is set to True again: the ranks agree before each
        collective, so that they may take other branches in any step. A collective, for all units
        over the same communicator.
        """
        self._scheduler.planner.set_static_graph(bool(static_graph))

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Divide gradients by this factor instead of the number of ranks; on each rank, before the
        sum. `recurse`: those of inner units, too, which FSDP2's method leaves alone.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise InvalidArgument(f"factor must be a number above 0, not {factor!r:.40}")
        for unit in units_in(self, recurse=recurse):
            unit.gradient_divide_factor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip the gradients of this module's parameters, sharded or not, by their norm over all
        ranks; return the norm.

        A collective. ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)`` does the same.
        `error_if_nonfinite`: raise RuntimeError on all ranks. Raises `InvalidUsage` where a
        HookState's optimizer has taken the gradients.
        """
        return clip_grad_norm_(self, units_in(self), max_norm, norm_type, error_if_nonfinite, foreach)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one of this step. False: its end reduces no
        remaining gradients, reshards nothing and calls no hooks.
        """
        self._scheduler.is_last_backward = bool(is_last_backward)

    def set_custom_all_gather(self, comm) -> None:
        """Gather this module's parameters by a user's ``comm(output, input, group, async_op)``.

        It may have FSDP2's ``allocate(size, *, dtype, device)``. It returns None, or an object with
        ``wait()``.
        """
        self._unit.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm) -> None:
        """Reduce this module's gradients by a user's ``comm(output, input, group, op, async_op)``."""
        self._unit.custom_reduce_scatter = comm

    def set_custom_all_reduce(self, comm) -> None:
        """Reduce over replicas by a user's ``comm(tensor, group, op, async_op)``, in place."""
        self._unit.custom_all_reduce = comm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the shards' gradients, and drop full ones that wait for a synchronised backward."""
        super().zero_grad(set_to_none)
        for each in self.modules():
            for unit in units_in(each, recurse=False):
                unit.gradients.drop([param for param, _ in named_params(unit, each)])

    def _apply(self, fn, recurse=True):
        if self._unit.registration.has_substitutes:  # full parameters, in an initialisation
            return super()._apply(fn, recurse)
        with restored_on_error(self):
            self._unit.reshard()
            result = super()._apply(fn, recurse)
            self._unit.reset_sharded_params()
        return result

    def state_dict(self, *args, **kwargs):
        """Return the full parameters and buffers, or shards where `set_state_dict_type` says so. A
        collective.

        The tensors have memory of their own, and are gathered unit by unit. Keys and shapes are the
        unsharded module's.
        """
        return make_state_dict(self._unit, super().state_dict, args, kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        pre_load_state_dict(self._unit, state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def apply(self, fn):
        """Call `fn` on each module inside, with full parameters; keep what it writes. A collective."""
        with unsharded_params([self._unit]):
            return super().apply(fn)

    def extra_repr(self) -> str:
        """Return the module's own text and the unit's."""
        own, unit = super().extra_repr(), self._unit
        count = sum(param.count for param in unit.params)
        here = sum(param.shard.numel() for param in unit.params)
        ours = f"unit {unit.index}: {here} of {count} elements on rank {unit.ranks.world.rank}"
        return f"{own}, {ours}" if own else ours

    def __deepcopy__(self, memo):
        raise InvalidUsage(_NO_COPY, op="deepcopy")

    def __reduce_ex__(self, protocol):
        raise InvalidUsage(_NO_COPY, op="pickle")


_NO_COPY = (
    "a sharded module can't be copied or pickled, since its parameters are on other ranks, too: save its state_dict(), "
    "or copy it before it is sharded (make an AveragedModel of the unsharded model, and shard its module alike)"
)


def _sharded(module) -> ShardedModule:
    if not isinstance(module, ShardedModule):
        raise InvalidArgument(f"only sharded modules are taken here, not {kind_of(module)}")
    return module
