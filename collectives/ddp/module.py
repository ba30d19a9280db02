"""DistributedDataParallel: torch's, with the memory and process group that `fused_allreduce` needs."""

# No `from __future__ import annotations`: torch compares a hook's annotations as objects.

import contextlib
import warnings

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.bucket_cap import DEFAULT_CAP_MB, default_bucket_cap_mb
from ..gradients.state import HookState, has_lost_group
from ..gradients.unused_states import forget
from ..torch_compat import untraced
from .devices import add_device_note, check_device_ids
from .fitness import find_reason, has_hook
from .hook import fused_allreduce
from .zero_copy import BucketRebuild, allocate_buckets

__all__ = ["DistributedDataParallel"]


_GROUP_AT, _CAP_AT = 5, 6  # of process_group and bucket_cap_mb, where torch's arguments are given by position


def _default_cap(module, arguments, options) -> dict[str, int]:
    """Return bucket_cap_mb where the default for this module and its ranks isn't torch's."""
    group = arguments[_GROUP_AT] if len(arguments) > _GROUP_AT else options.get("process_group")
    mesh = options.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group(mesh_dim=0)
    if not isinstance(module, torch.nn.Module) or (group is None and not dist.is_initialized()):
        return {}  # which torch refuses
    cap = default_bucket_cap_mb(module.parameters(), dist.get_world_size(group))
    return {} if cap == DEFAULT_CAP_MB else {"bucket_cap_mb": cap}


def _refuse_wrapped(module) -> None:
    """Raise `InvalidArgument` for a module of torch's DistributedDataParallel, also a compiled one."""
    inside = getattr(module, "_orig_mod", module)
    if isinstance(inside, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgument(
            "this module is a DistributedDataParallel already, and two of them average the gradients twice: register "
            "the hook on it, register_comm_hook(None, collectives.fused_allreduce), or wrap its .module"
        )


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, whose `register_comm_hook` also takes the hook alone and
    names its own group.

    Without a hook it registers `fused_allreduce` in its first forward with gradients, or warns why
    torch's own all-reduce stays (sparse gradients, an optimizer in the backward, ...). Set
    ``default_hook = False`` on the object before to keep torch's.

    `fused_allreduce` averages over the right ranks also if the module was built over a subgroup.
    With the hook the buckets that DDP keeps are allocated in memory that the ranks of a node share
    (`HookState`'s `zero_copy`).

    On CUDA the buckets lie in a memory pool over ``ncclMemAlloc`` (``torch.cuda.MemPool``), and
    `fused_allreduce` registers them with its communicator (``ncclCommRegister``), so that NCCL can
    use them in place. The repr of the `HookState` says how many are, and why none is. A
    DistributedDataParallel of torch's own gets the same memory for its final buckets, when the hook
    is registered on it.

    Args:
        module: The module.
        *arguments: As torch takes them.
        gradient_as_bucket_view: Make gradients views of DDP's buckets, which saves two passes over
            them. As in torch, such a gradient can't be ``detach_()``-ed.
        **options: As torch takes them. `bucket_cap_mb` None: on GPUs buckets grow with the number
            of ranks, from 25 MiB for up to 10 to at most 400 MiB or a sixteenth of the gradients;
            see `collectives.gradients.bucket_cap`. A value or `bucket_cap_mb_list` is taken as
            torch takes it.

    Raises:
        InvalidArgument: For `device_ids` that don't match the device of the module's parameters,
            with those that would, and for a module that is a DistributedDataParallel already, such
            as one that accelerate has prepared.
    """

    default_hook: bool = True

    def __init__(self, module, *arguments, gradient_as_bucket_view: bool = True, **options):
        _refuse_wrapped(module)
        check_device_ids(arguments[0] if arguments else options.get("device_ids"), module)
        if len(arguments) < _CAP_AT and options.get("bucket_cap_mb") is None and not options.get("bucket_cap_mb_list"):
            options.update(_default_cap(module, arguments, options))
        super().__init__(module, *arguments, gradient_as_bucket_view=gradient_as_bucket_view, **options)
        self._hook_is_decided = self._has_default_hook = False

    def __setstate__(self, state):
        super().__setstate__(state)
        # A copied or loaded object has a reducer of its own, without a hook.
        self._hook_is_decided = self._has_default_hook = False

    def _ddp_init_helper(self, *arguments, **options):
        self.bucket_rebuild = BucketRebuild(shares_memory=False)  # until the hook is registered
        # On the host buckets that DDP frees after a backward aren't worth shared memory.
        keeps = self.find_unused_parameters or self.device.type != "cpu"
        with allocate_buckets(self) if keeps else contextlib.nullcontext():
            super()._ddp_init_helper(*arguments, **options)

    @untraced(recursive=False)
    def forward(self, *inputs, **arguments):
        """Call the module as torch's does.

        An error from inputs on another device than the module's gets a note.
        """
        try:
            return super().forward(*inputs, **arguments)
        except RuntimeError as error:
            if "device" in str(error) and hasattr(error, "add_note"):  # Python 3.11
                add_device_note(error, self.module, (*inputs, *arguments.values()))
            raise

    @untraced(recursive=False)
    def _pre_forward(self, *inputs, **arguments):
        # In join() a rank may have no forward at all, so none registers it there, nor later (torch leaves it enabled).
        if not self._hook_is_decided and torch.is_grad_enabled() and not self._join_config.enable:
            self._register_default_hook()
        self.bucket_rebuild(self)
        return super()._pre_forward(*inputs, **arguments)

    @untraced
    def _register_default_hook(self) -> None:
        self._hook_is_decided = True
        if not self.default_hook or self.process_group.size() == 1 or has_hook(self):
            return
        if reason := find_reason(self):
            warnings.warn(f"DistributedDataParallel keeps torch's own all-reduce: {reason}", stacklevel=2)
        else:
            self.register_comm_hook(fused_allreduce)
            self._has_default_hook = True

    def register_comm_hook(self, state, hook=None):
        """Register a communication hook, by ``(hook)`` or torch's ``(state, hook)``.

        Args:
            state: The hook's state, or the hook alone. With `fused_allreduce`, a state of None, or
                one that names no ranks, gets this module's process group.
            hook: The hook. None: `state` is the hook.

        Raises:
            InvalidArgument: For a state with other ranks than the module's.
        """
        if hook is None:
            if not callable(state):
                raise InvalidArgument(f"register_comm_hook takes (hook) or (state, hook); {kind_of(state)} is no hook")
            state, hook = None, state
        if self._has_default_hook:
            raise InvalidUsage(
                "fused_allreduce was registered in the first forward, where this module had no hook, and DDP takes "
                "one: register yours before the first forward"
            )
        if hook is fused_allreduce:
            if state is None:
                state = HookState(process_group=self.process_group)
                forget(state)
            elif isinstance(state, HookState):
                self._set_process_group(state)
        super().register_comm_hook(state, hook)

    def _set_process_group(self, state: HookState) -> None:
        """Give a state this module's process group, or check the ranks that it names."""
        group = self.process_group
        if state.comm is not None:
            if (state.comm.rank, state.comm.size) != (group.rank(), group.size()):
                raise InvalidArgument(
                    f"the state's communicator is rank {state.comm.rank} of {state.comm.size}, this module's process "
                    f"group rank {group.rank()} of {group.size()}"
                )
        elif state.process_group is None or has_lost_group(state):
            state.process_group = group
            state.group_from_module = True
        elif state.process_group is not group:
            raise InvalidArgument("the state names another process group than this module's: use a state of its own")
