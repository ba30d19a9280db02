"""ShardedModule: the base class of every sharded module's class, with FSDP2's methods."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from .clip import clip_grad_norm_
from .hooks import run_forward
from .managed_params import units_in
from .state import load_into_shards

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["ShardedModule", "UnshardHandle", "register_forward_method", "share_comm_ctx"]

_NO_COPY = (
    "a sharded module can't be copied or pickled, since its parameters are on other ranks, too: save its state_dict(), "
    "or copy it before it is sharded (make an AveragedModel of the unsharded model, and shard its module alike)"
)


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
    if len({_unit_of(module).scheduler for module in modules}) > 1:
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
        """Wait for the all-gather, and have the module hold the full parameters."""
        if self._unit is not None:
            self._unit.wait_for_unshard()
            self._unit = None


class ShardedModule(nn.Module):
    """Base class that `fully_shard` adds to a module's class; its methods have FSDP2's names.

    `recurse`: also for the units of modules inside.
    """

    if TYPE_CHECKING:  # not while running: transformers evaluates the annotations of every base class
        _sharded_unit: Unit

    def __call__(self, *args, **kwargs):
        return run_forward(self, super().__call__, args, kwargs)

    # ---- Gathering.

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters, not those of inner units. A collective.

        `async_op`: return a handle, whose `wait()` must come before the parameters are used; a
        forward waits, too.
        """
        self._sharded_unit.unshard(async_op=async_op)
        return UnshardHandle(self._sharded_unit) if async_op else None

    def reshard(self) -> None:
        """Have the module hold its shards, and free the full parameters; what was written to them is
        lost. A local call.
        """
        self._sharded_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Set whether to reshard after a forward, as `fully_shard` takes it. With an int it is a
        collective at its first use.
        """
        for unit in units_in(self, recurse=recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after a backward; False: the next forward needs no all-gather, unless
        the parameters were written to.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether the unit is gathered when its backward begins. False is for a unit whose backward
        needs no parameters, such as an embedding.
        """
        self._sharded_unit.unshard_in_backward = bool(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set the modules whose gathers begin when this one's forward begins."""
        self._sharded_unit.forward_prefetch = [_unit_of(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[ShardedModule]) -> None:
        """Set the modules whose gathers begin when this one's backward begins."""
        self._sharded_unit.backward_prefetch = [_unit_of(module) for module in modules]

    def set_custom_all_gather(self, comm) -> None:
        """Gather this module's parameters by a user's ``comm(output, input, group, async_op)``, which
        returns None, or an object with ``wait()``.
        """
        if comm is not None and self._sharded_unit.wire is not None:
            raise InvalidUsage(
                "a custom all-gather sends parameters as they are: leave HookState's gather out",
                op="set_custom_all_gather",
            )
        self._sharded_unit.custom_all_gather = comm

    # ---- Gradients.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients. False: full gradients add up on each rank until a
        backward that reduces.
        """
        for unit in units_in(self, recurse=recurse):
            unit.reduces = bool(requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether backwards from now on are the last ones of their step. False: their ends reduce no
        remaining gradients, reshard nothing and call no hooks.
        """
        for unit in units_in(self):
            unit.is_last_backward = bool(is_last_backward)

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Divide gradients by this factor instead of the number of ranks. `recurse`: those of inner
        units, too, which FSDP2's method leaves alone.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
            raise InvalidArgument(f"factor must be a number above 0, not {factor!r:.40}")
        for unit in units_in(self, recurse=recurse):
            unit.stages.divide_factor = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_custom_reduce_scatter(self, comm) -> None:
        """Reduce this module's gradients by a user's ``comm(output, input, group, op, async_op)``."""
        self._change_stages("set_custom_reduce_scatter", reduce_scatter=comm)

    def set_all_reduce_hook(self, hook, *, stream=None) -> None:
        """Call ``hook(reduced)`` with this rank's part of the reduced gradients, a flat tensor, before
        they become the shards' gradients; what it writes to the tensor is kept. None: no hook.

        It is called for each dtype of the unit's parameters on the stream that stores gradients:
        `stream` is refused.
        """
        if hook is not None and not callable(hook):
            raise InvalidArgument(f"hook must be a function of a tensor, not {kind_of(hook)}", op="set_all_reduce_hook")
        if stream is not None:
            _refuse("set_all_reduce_hook", "stream", "the hook runs on the stream that stores gradients")
        self._change_stages("set_all_reduce_hook", hook=hook)

    def _change_stages(self, op: str, **stages) -> None:
        if self._sharded_unit.reducer is not None and any(stage is not None for stage in stages.values()):
            raise InvalidUsage(
                "this module's gradients are reduced as its HookState says: fully_shard it without hook_state", op=op
            )
        for name, stage in stages.items():
            setattr(self._sharded_unit.stages, name, stage)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip the gradients of this module's parameters, sharded or not, by their norm over all
        ranks; return the norm.

        A collective. ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)`` does the same where all
        parameters are sharded, over one mesh.
        `error_if_nonfinite`: raise RuntimeError on all ranks. Raises `InvalidUsage` where a
        HookState's optimizer has taken the gradients.
        """
        if any(unit.reducer is not None and unit.reducer.steps for unit in units_in(self)):
            raise InvalidUsage(
                "the HookState's optimizer has used the gradients in the backward: give the HookState max_norm",
                op="clip_grad_norm_",
            )
        return clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the shards' gradients, and drop full ones that wait for a backward that reduces."""
        super().zero_grad(set_to_none)
        for unit in units_in(self):
            unit.drop_grads()

    # ---- What FSDP2 sets and what is always so here.

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accept True only, or False where there are no replicas: gradients are reduced over shards and
        replicas together.
        """
        replicated = any(unit.ranks.replicas is not None for unit in units_in(self, recurse=recurse))
        if not requires_all_reduce and replicated:
            _refuse("set_requires_all_reduce", False, "gradients are reduced over shards and replicas at once")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept True only: a rank that hasn't used a parameter takes part with zeros."""
        if not reduce_scatter_unused_params:
            _refuse("set_reduce_scatter_unused_params", False, "a rank without gradients takes part with zeros")

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept any value: gradients are summed, and divided apart from that, where NCCL is faster so."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept True only: buffers are always the engine's memory."""
        if not enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", False, "buffers are the engine's memory")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accept 1 only: one reduction is in progress at a time."""
        if max_input_buffers != 1:
            _refuse("set_reduce_scatter_max_input_buffers", max_input_buffers, "one reduction is in progress at a time")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accept False only: gathers and reductions are operations of one communicator, in one order."""
        if enable:
            _refuse("set_separate_reduce_scatter_group", True, "gathers and reductions share a communicator")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: buffers are the engine's memory, not torch's symmetric memory."""
        _refuse("set_symm_mem_for_comm", backend, "buffers are the engine's memory, not torch's symmetric memory")

    def set_post_optim_event(self, event) -> None:
        """Let the next all-gathers wait for an event, which an optimizer's step on another stream has
        recorded. On the host a step is done when it returns.
        """
        if not hasattr(event, "wait"):
            raise InvalidArgument(f"event must be a torch.Event, not {kind_of(event)}", op="set_post_optim_event")
        if self._sharded_unit.device.type != "cpu":
            event.wait()  # the current stream does, and all-gathers follow it

    def reset_iter_state(self) -> None:
        """Drop a forward or backward that an exception has left, and the gradients that wait to be
        reduced. The next forward does the first by itself. A local call, which all ranks make.
        """
        self._sharded_unit.scheduler.reset(units_in(self))

    # ---- What torch.nn.Module does.

    def _apply(self, fn, recurse=True):
        units = units_in(self)
        for unit in units:
            unit.prepare_conversion()
        try:
            return super()._apply(fn, recurse)
        finally:
            for unit in units:
                unit.rehome()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs):
        self._sharded_unit.scheduler.step_count.reset()  # all ranks have the same parameters again
        self._sharded_unit.scheduler.offload.wait()
        load_into_shards(self, self._sharded_unit, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def extra_repr(self) -> str:
        """Return the module's own text and the unit's."""
        own, unit = super().extra_repr(), self._sharded_unit
        count = sum(param.shape.numel() for param in unit.params)
        here = sum(param.local.numel() for param in unit.params)
        ours = f"unit {unit.index}: {here} of {count} elements on rank {unit.world.rank}"
        return f"{own}, {ours}" if own else ours

    def __deepcopy__(self, memo):
        raise InvalidUsage(_NO_COPY, op="deepcopy")

    def __reduce_ex__(self, protocol):
        raise InvalidUsage(_NO_COPY, op="pickle")


def _unit_of(module) -> Unit:
    if not isinstance(module, ShardedModule):
        raise InvalidArgument(f"only sharded modules are taken here, not {kind_of(module)}")
    return module._sharded_unit


def _refuse(op: str, value, reason: str) -> None:
    raise InvalidArgument(f"{value!r:.40} isn't offered: {reason}. Leave the call out", op=op)
