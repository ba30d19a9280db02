"""FSDP2's settings that a sharded module takes, and those that it refuses because they can't hold here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arrays import kind_of
from ..comm.config import launches_in_order
from ..errors import InvalidArgument, InvalidUsage
from .managed_params import units_in

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .unit import Unit

__all__ = ["FSDP2Settings"]


class FSDP2Settings:
    """Methods of FSDP2's ``FSDPModule`` for what is always so here, or never."""

    if TYPE_CHECKING:  # not while running: transformers evaluates the annotations of every base class
        _unit: Unit
        _scheduler: Scheduler

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether the unit is gathered when its backward begins.

        False is for a unit whose backward needs no parameters, such as an embedding. Where it does
        need them, it gathers them then.
        """
        self._unit.unshard_in_backward = bool(unshard_in_backward)

    def set_all_reduce_hook(self, hook, *, stream=None) -> None:
        """Call ``hook(reduced)`` with this rank's part of the reduced gradients, a flat tensor, before
        they become the shards' gradients; what it writes to the tensor is kept. None: no hook.

        It is called for each dtype of the unit's parameters, trainable and frozen ones apart, on the
        stream that stores gradients: `stream` is refused, and so is a hook where a HookState reduces.
        """
        if hook is not None and not callable(hook):
            raise InvalidArgument(f"hook must be a function of a tensor, not {kind_of(hook)}", op="set_all_reduce_hook")
        if stream is not None:
            raise InvalidArgument(
                "stream isn't offered: the hook runs on the stream that stores gradients, for which all that uses them "
                "waits; leave it out",
                op="set_all_reduce_hook",
            )
        if hook is not None and self._unit.reducer is not None:
            raise InvalidUsage(
                "this module's gradients are reduced as its HookState says, which may step its optimizer at once: "
                "fully_shard it without hook_state",
                op="set_all_reduce_hook",
            )
        self._unit.all_reduce_hook = hook

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accept True only, or False where there are no replicas.

        In FSDP2 False leaves out the sum over replicas; here gradients are summed over shards and
        replicas at once.
        """
        if not requires_all_reduce and any(unit.ranks.replicas for unit in units_in(self, recurse=recurse)):
            raise InvalidArgument(
                "gradients are reduced over pieces and replicas at once: set_requires_gradient_sync",
                op="set_requires_all_reduce",
            )

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept True only: ranks that haven't used a parameter always take part with zeros."""
        _accept("set_reduce_scatter_unused_params", reduce_scatter_unused_params, True, _UNUSED)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept any value: gradients are always summed, and divided apart from that."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept True only: buffers are always the engine's memory."""
        _accept("set_allocate_memory_from_process_group_for_comm", enable, True, _ALLOCATES)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accept 1 only: one reduction is in progress at a time."""
        _accept("set_reduce_scatter_max_input_buffers", max_input_buffers, 1, _ONE_BUFFER)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accept what is so: True on GPUs where NCCL keeps two communicators in one order, so that
        gathers have one of their own, and False elsewhere.
        """
        world = self._unit.ranks.world
        separate = not world._on_host and launches_in_order(world.engine.library)
        _accept("set_separate_reduce_scatter_group", bool(enable), separate, _SEPARATE if separate else _TOGETHER)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: on GPUs units are gathered in NCCL's symmetric windows where NCCL has them."""
        raise InvalidArgument(
            "torch's symmetric memory isn't used: on GPUs units are gathered in windows of NCCL's own, which it "
            "addresses in the same way; leave the call out (COLLECTIVES_NO_WINDOWS=1 turns windows off)",
            op="set_symm_mem_for_comm",
        )

    def set_post_optim_event(self, event) -> None:
        """Let the next all-gathers wait for an event, which an optimizer's step on another stream has
        recorded. On the host a step is done when it returns.
        """
        if not hasattr(event, "wait"):
            raise InvalidArgument(f"event must be a torch.Event, not {kind_of(event)}", op="set_post_optim_event")
        if self._unit.device.type != "cpu":
            event.wait()  # the current stream does, and all-gathers follow it

    def reset_iter_state(self) -> None:
        """Drop a backward that an exception has ended, and the gradients that wait to be reduced.

        The next forward does the first by itself. A local call, which all ranks make.
        """
        self._scheduler.abort_backward()
        for unit in self._scheduler.units:
            unit.reshard()
            unit.gradients.drop(unit.params)


_UNUSED = "a rank that hasn't used a parameter takes part with zeros, or the others would wait for it"
_ALLOCATES = "buffers are the engine's memory, which the peers read in place"
_ONE_BUFFER = "one reduction is in progress at a time, for the least memory"
_TOGETHER = "gathers and reductions are operations of one communicator, in one order on all ranks"
_SEPARATE = "gathers have a communicator of their own, beside the reductions"


def _accept(op: str, value, wanted, reason: str) -> None:
    if type(value) is not type(wanted) or value != wanted:
        raise InvalidArgument(f"{value!r:.40} isn't offered: {reason}. Leave the call out, or give {wanted}", op=op)
