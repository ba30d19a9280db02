"""Unit: parameters that are all-gathered together, and whose gradients are reduced together.

A unit knows nothing of forward and backward. `forward_hooks` and `scheduler` call it for sharded
modules, and users' own wrappers call it directly.
"""

from __future__ import annotations

import contextlib
import enum

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from .buffer_pool import BufferPool
from .gather_windows import UnitWindow
from .managed_params import managed_parameters
from .mesh import Ranks
from .module_changes import AddedParamCheck, sync_attributes
from .module_group import ModuleGroup
from .param_group import make_groups
from .param_registration import ParamRegistration
from .policies import MixedPrecisionPolicy, parse_mp_policy, parse_offload_policy
from .quantized_gather import QuantizedAllGather
from .reduction import start_average
from .streams import HostCopies, current_stream, host_of, release
from .unit_gradients import UnitGradients

__all__ = ["State", "Unit"]


class State(enum.Enum):
    """Who owns a unit's parameters.

    SHARDED: the modules hold the shards, and nothing is gathered. GATHERING: an all-gather is in
    progress into a buffer that nothing views yet. UNSHARDED: the gathered buffer is there, and the
    full parameters view it. The modules hold the full parameters, or after `to_sharded` the shards
    again.
    """

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()


class Unit:
    """Parameters in shards that are all-gathered together and whose gradients are reduced together.

    The module is changed in place. It holds this rank's shards, of shape ``(1, ..., 1, k)`` for k
    elements, until `unshard()`, and again after `reshard()`. Both forms are Parameters and keep
    their identity. The unit computes on the device of the communicator. A local call. All ranks
    must make units of the same parameters.

    Args:
        module: The owner of the parameters. None: see `parameters`.
        ranks: A `Communicator`, or `Ranks`.
        parameters: A list of (names, places, parameter) as `managed_parameters` returns it. None:
            those of `module`.
        ignored_params: Parameters of `module` that stay as they are.
        name: The unit's name in messages.
        mp_policy: As in `fully_shard`.
        offload_policy: As in `fully_shard`.
        persistent: Keep the gathered buffer, with the shard as a part of it, which takes the memory
            of all parameters on each rank.
        align: The shard is a multiple of so many elements. 0: of 16 bytes.
        quantized_gather: The wire format of the all-gather. None: the parameters' dtype.

    Raises:
        InvalidArgument: With the parameter's name, for parameters that can't be sharded.
    """

    def __init__(
        self, module: nn.Module | None, ranks: Ranks | Communicator, *, parameters=None, ignored_params=(),
        name: str = "", mp_policy: MixedPrecisionPolicy | None = None, offload_policy=None, persistent: bool = False,
        pool: BufferPool | None = None, align: int = 0, quantized_gather: QuantizedAllGather | None = None,
        host_copies: HostCopies | None = None,
    ):  # fmt: skip
        if isinstance(ranks, Communicator):
            ranks = Ranks(ranks if ranks.size > 1 else None, None, ranks)
        self.ranks = ranks
        self.name = name
        self.device = ranks.world.device
        self.mp_policy = parse_mp_policy(mp_policy)
        self.persistent = persistent
        self.pool = BufferPool() if pool is None else pool
        self.host_copies = HostCopies() if host_copies is None else host_copies
        self.state = State.SHARDED
        self.index = self.first_param = 0  # positions among all units of the communicator, and all their parameters
        self.gradient_divide_factor: float | None = None
        self.custom_all_gather = self.custom_reduce_scatter = self.custom_all_reduce = None
        self.all_reduce_hook = None  # a function of this rank's reduced gradients
        self.reducer = None  # a ShardedGradReducer, where a HookState says how gradients are reduced
        # Settings that the scheduler reads in forward and backward.
        self.reshard_after_forward = self.reshard_after_backward = self.reduce_grads = True
        self.prefetch_in_forward = self.prefetch_in_backward = self.unshard_in_backward = True
        self.prefetch_post_backward = False  # BACKWARD_POST: prefetch after a unit's gradients
        self.forward_prefetch = self.backward_prefetch = None  # lists of units; None: the next one
        self.scheduler = self.module = None  # module: a weak reference
        self.module_group: ModuleGroup | None = None  # what `module` refers to, where the unit is of several modules
        self.unfilled: set = set()  # parameters that have got memory and no values yet, in a load_state_dict
        self._alloc_stream = None  # the stream on which the gathered buffer was allocated
        self.state_dict_settings = None  # those of `set_state_dict_type`; None: full tensors
        self.is_read = False  # it stays gathered while the forward that has read its parameters runs
        self.pending_backwards = 0  # forwards whose backward has not ended
        self.post_forward_comm: Communicator | None = None  # ranks that keep all parameters between them
        self._works: list = []
        self.window = UnitWindow(self)
        store = self.device if (offload := parse_offload_policy(offload_policy)) is None else host_of(self.device)
        found = managed_parameters(module, ignored_params) if parameters is None else parameters
        self.groups = make_groups(
            found, ranks, self.pool, device=self.device, store=store, gather_dtype=self.mp_policy.param_dtype,
            pinned=offload is not None and offload.pin_memory, reduce_dtype=self.mp_policy.reduce_dtype,
            persistent=persistent, align=align, quantized_gather=quantized_gather, host_copies=self.host_copies,
        )  # fmt: skip
        self.params = [param for group in self.groups for param in group.params]
        self.gradients = UnitGradients(self.groups)
        self.register_grad_hook = lambda param: None  # set by `register_grad_hooks`
        self.added_params: AddedParamCheck | None = None
        self.registration = ParamRegistration(self.params)
        self.end_backward()

    def __repr__(self):
        count = sum(param.count for param in self.params)
        return f"<Unit {self.name or self.index} of {len(self.params)} parameters, {count} elements, {self.state.name}>"

    # ---- What it is.

    @property
    def gathers(self) -> bool:
        """Whether unsharding takes a collective."""
        return self.ranks.shard is not None and bool(self.groups)

    def pieces(self) -> list[nn.Parameter]:
        """Return this rank's shards, in the order of the parameter groups."""
        return [param.shard for param in self.params]

    def reset_sharded_params(self) -> None:
        """Take over as shards the parameters that the modules now hold, after ``module.to_empty()``
        and the like.
        """
        for param in self.params:
            holder, attribute = param.places[0]
            param.shard = holder._parameters[attribute]
            for other, name in param.places[1:]:
                other._parameters[name] = param.shard
        if self.module_group is None or len({param.shard.device.type for param in self.params}) == 1:
            self.check()  # otherwise the next modules of the group get memory, too

    def check(self) -> None:
        """Check that the modules hold the shards and that these lie in the flat shard; see
        `ParamGroup.check`.
        """
        if self.registration.has_substitutes:  # an exception has left a load_state_dict
            self.registration.restore()
        if self.registration.has_substitutes:
            raise InvalidUsage(f"{self!r} holds full parameters by summon_full_params: leave its block first")
        if not self.is_unsharded_registered:
            self.registration.check_shards()
        if self.added_params is not None:
            self.added_params.check(self.params)
        for group in self.groups:
            group.check()
        if self.state is State.UNSHARDED and not self.is_unsharded_registered and self._writes() != self._written:
            self.post_optim_step()  # or written to by other means
        sync_attributes(self)

    # ---- Gathering.

    def unshard(self, *, async_op: bool = False, post_forward: bool = False) -> None:
        """All-gather the parameters and register the full ones on the modules. A collective of
        `ranks.shard`.

        Blocks on the host.

        Args:
            async_op: Only begin the all-gather; `wait_for_unshard` ends it.
            post_forward: Gather among the ranks of `post_forward_comm`, from the shards that they
                kept after the forward.
        """
        if self.state is State.SHARDED:
            self._start_all_gather(async_op, post_forward)
        if not async_op:
            self.wait_for_unshard()

    @torch.inference_mode(False)  # what is gathered may outlive the mode, in which alone it could be saved for backward
    @torch.no_grad()
    def _start_all_gather(self, async_op: bool, post_forward: bool) -> None:
        works = []
        self._alloc_stream = current_stream(self.device)
        for group, out in zip(self.groups, self.window.acquire(post_forward), strict=True):
            if post_forward:
                work = group.unshard_post_forward(self.post_forward_comm, async_op)
            else:
                work = group.unshard(async_op=async_op, custom=self.custom_all_gather, out=out)
            if work is not None:
                works.append(work)
        self._works = works
        self.state = State.GATHERING

    @torch.no_grad()
    def move_gathered(self) -> None:
        """Move what is gathered in a window to memory of the unit's own."""
        while self._works:
            (work := self._works.pop(0)).wait()
            work.release()
        for group in self.groups:
            group.move_gathered(registered=self.state is State.UNSHARDED)
        self.window.release()

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather of `unshard`, and register the full parameters on the modules; raise
        `InvalidUsage` where nothing is gathered.
        """
        if self.state is State.UNSHARDED:
            if not self.is_unsharded_registered:
                self.registration.register("full")
            return
        if self.state is State.SHARDED:
            raise InvalidUsage(f"{self!r} has nothing gathered: unshard() it")
        self._end_all_gather()
        self.registration.register("full")
        self.state = State.UNSHARDED

    @torch.inference_mode(False)
    def _end_all_gather(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
            work.release() if self.window.is_used else release(work, self._alloc_stream, self.device)
        self._record_stream()
        for group in self.groups:
            group.to_unsharded()

    def _record_stream(self) -> None:
        """Record the current stream on the gathered buffers, so that the allocator waits for it
        before it reuses them.
        """
        here = current_stream(self.device)
        if here != self._alloc_stream:
            for group in self.groups:
                if group.gathered is not None:
                    group.gathered.record_stream(here)

    @property
    def is_unsharded_registered(self) -> bool:
        """Whether the modules hold the full parameters."""
        return self.registration.form == "full"

    def to_sharded(self) -> None:
        """Register the shards on the modules, and keep the gathered buffer for the next
        `wait_for_unshard`.
        """
        if self.is_unsharded_registered:
            self.registration.register("shard")
            self._written = self._writes()

    def _writes(self) -> int:
        """Count the in-place writes to the shards, as autograd counts them: those through ``.data``
        are not counted.
        """
        shards = [param.shard for param in self.params]
        return sum([shard._version for shard in shards if not shard.is_inference()])

    def post_optim_step(self) -> None:
        """Free the gathered buffer, since an optimizer has written newer values to the shards.

        A backward that needs the values from before the step then raises, rather than compute with
        the new ones.
        """
        self.reshard()
        for group in self.groups:
            group.post_optim_step()

    @property
    def is_sharded_post_forward(self) -> bool:
        """Whether this rank keeps a post-forward shard."""
        return any([group.post_forward_shard is not None for group in self.groups])

    def reshard(self, *, write_back: bool = False, post_forward: bool = False) -> None:
        """Register the shards on the modules and free the gathered buffer. A local call.

        Args:
            write_back: First copy to the shards what was written to the full parameters.
            post_forward: Keep the post-forward shard, this rank's part among the ranks of
                `post_forward_comm`.
        """
        if self.state is State.GATHERING:
            self.wait_for_unshard()  # what is under way must end
        for group in self.groups:
            group.post_forward_shard = None
        if self.state is State.SHARDED:
            return
        self.to_sharded()
        for group in self.groups:
            if write_back:
                group.write_back()
            if post_forward and self.post_forward_comm is not None:
                group.to_sharded_post_forward(self.post_forward_comm)
        self._record_stream()
        for group in self.groups:
            group.free_unsharded()
        self.window.release()
        self.state = State.SHARDED

    @contextlib.contextmanager
    def unsharded(self, *, write_back: bool = False):
        """Unshard inside a ``with`` block; reshard after it, if the unit was sharded before."""
        before = self.state
        self.unshard()
        try:
            yield self
        finally:
            if before is State.SHARDED:
                self.reshard(write_back=write_back)
            elif write_back:
                for group in self.groups:
                    group.write_back()

    # ---- Gradients.

    @torch.inference_mode(False)
    @torch.no_grad()
    def start_reduce(self, *, async_op: bool = False) -> list:
        """Begin to average the full gradients into the shards' gradients; return functions that
        wait and store the results.

        A collective of all ranks; a rank without gradients sends zeros. The full gradients are
        freed.
        """
        if self.reducer is not None:
            return self.reducer.start_reduce(self, async_op=async_op)
        return [start_average(self, group, async_op) for group in self.gradients.trainable]

    def reduce(self) -> None:
        """Average the full gradients over the ranks into the shards' gradients, or add to those
        that are there. Blocks.
        """
        for finish in self.start_reduce():
            finish()
        self.host_copies.wait()

    def end_backward(self, *, drop: bool = False, repeated: bool = False) -> None:
        """Reset what tracks a backward; see `UnitGradients.end_backward`."""
        self.gradients.end_backward(reduced=self.reduce_grads, drop=drop, repeated=repeated)
        if self.module_group is not None:
            self.module_group.left.clear()
        self.pending_backwards = 0
