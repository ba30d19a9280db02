"""ShardedDataParallel: FSDP1's interface to the same units: strategies, wrap policies, `no_sync`,
`summon_full_params`.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from ...arrays import kind_of
from ...comm.communicator import Communicator
from ...errors import InvalidArgument, InvalidUsage
from ...torch_compat import current_graph_task_id
from ..managed_params import managed_parameters, units_in
from ..materialize import has_meta, initialise
from ..module import ShardedModule
from ..module_changes import managed_modules
from ..sharding import shard
from ..state.dist_wrapper import broadcast_from_rank0
from ..state.state_dict import unsharded_params
from . import state_dict_type as settings
from .api import ShardingStrategy
from .arguments import (
    PrecisionPolicies,
    parse_cpu_offload,
    parse_device_id,
    parse_enum,
    parse_ignored,
    resolve_fsdp1_ranks,
    select_units,
    unit_options,
)

__all__ = ["ShardedDataParallel"]


class ShardedDataParallel(ShardedModule):
    """Shard a module, as FullyShardedDataParallel does; in place: returns the module itself, whose
    names don't change.

    A collective, which blocks. Raises what `collectives.sharded.fully_shard` raises, on all ranks.
    The arguments are FullyShardedDataParallel's, and two more:

    - `process_group`: the ranks; two of them, (the shards', the replicas'), for HYBRID_SHARD.
      `device_mesh` or `comm` in its place. None: the default group.
    - `sharding_strategy`: a `ShardingStrategy`, FULL_SHARD unless given; torch's own enums are
      taken, too.
    - `cpu_offload`: ``CPUOffload(offload_params=True)``.
    - `auto_wrap_policy`: which submodules become units of their own, see
      `collectives.sharded.wrap`. None: all is one unit, except submodules that are sharded already.
    - `backward_prefetch`, `forward_prefetch`: prefetch the next unit, where the all-gather can
      overlap with computation: on a GPU, or on spare cores.
    - `limit_all_gathers` changes nothing: an all-gather waits, on the GPU, for the computation that
      had its memory before, and no more than one unit is prefetched.
    - `mixed_precision`: a `MixedPrecision`.
    - `device_id`: where it computes; the module is moved there, unit by unit.
    - `sync_module_states`: take rank 0's parameters and buffers.
    - `param_init_fn`: allocates and initialises modules on the meta device. None: ``to_empty`` and
      ``reset_parameters()``.
    - `ignored_modules`, `ignored_states`: modules, or parameters, that stay as they are.
    - `use_orig_params` changes nothing: the optimizer always gets each parameter's shard.
    - `hook_state`: a `collectives.HookState`.
    """

    def __new__(
        cls, module: nn.Module, process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE, mixed_precision=None, ignored_modules=None, param_init_fn=None,
        device_id=None, sync_module_states: bool = False, forward_prefetch: bool = False,
        limit_all_gathers: bool = True, use_orig_params: bool = False, ignored_states=None, device_mesh=None, *,
        comm: Communicator | None = None, hook_state=None,
    ):  # fmt: skip
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"module must be a torch.nn.Module, not {kind_of(module)}", op="ShardedDataParallel")
        if isinstance(module, ShardedModule):
            raise InvalidUsage(f"this {type(module).__name__} is sharded already", op="ShardedDataParallel")
        strategy = parse_enum(ShardingStrategy, sharding_strategy or ShardingStrategy.FULL_SHARD, "sharding_strategy")
        prefetch = backward_prefetch
        if prefetch is not None:
            prefetch = parse_enum(BackwardPrefetch, prefetch, "backward_prefetch")
        device, precision = parse_device_id(device_id), PrecisionPolicies(mixed_precision)
        modules, parameters = parse_ignored(module, ignored_modules, ignored_states)
        ranks = {strategy: resolve_fsdp1_ranks(module, strategy, process_group, device_mesh, comm, device)}
        for each, own in [*select_units(module, auto_wrap_policy, precision, modules, parameters), (module, {})]:
            its = parse_enum(ShardingStrategy, own.get("sharding_strategy", strategy), "sharding_strategy")
            if its not in ranks:
                ranks[its] = resolve_fsdp1_ranks(module, its, process_group, device_mesh, comm, device)
            policy = precision.root if each is module else precision.inner
            if "mixed_precision" in own:
                policy = PrecisionPolicies(own["mixed_precision"]).inner
            policy = own.get("mp_policy", policy)
            materialize_meta_params(each, ranks[its].world.device, param_init_fn, parameters)
            if sync_module_states:
                broadcast_module_states(each, ranks[its].world, parameters)
            unit = shard(
                each, cls, ranks[its], mp_policy=policy, hook_state=hook_state, ignored_params=parameters,
                offload_policy=parse_cpu_offload(own.get("cpu_offload", cpu_offload)), **unit_options(its),
            )  # fmt: skip
            unit.prefetch_in_forward = bool(forward_prefetch)
            unit.prefetch_in_backward = prefetch is not None
            unit.prefetch_post_backward = prefetch is BackwardPrefetch.BACKWARD_POST
        if precision.buffer_dtype is not None:
            _cast_buffers(module, precision.buffer_dtype, modules)
        return module

    def __init__(self, *args, **kwargs):
        pass  # __new__ does it all; the module keeps what its own __init__ has set

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in ("module", "_fsdp_wrapped_module"):  # FSDP1 wraps, and programs unwrap by these names
                return self
            if name in ("flat_param", "_flat_param", "_handle", "_handles"):
                raise AttributeError(
                    f"{error}: there is no flat parameter. Each parameter keeps its name; parameters() are this rank's "
                    "shards, p.full_tensor() is a whole one, and summon_full_params registers all of them"
                ) from None
            raise

    def check_is_root(self) -> bool:
        """Whether this module is in no other sharded one. A local call."""
        others = (unit.module() for unit in self._scheduler.units if unit is not self._unit)
        return not any(each is self for other in others if other is not None for each in other.modules())

    def register_comm_hook(self, state, hook):
        """Raise `InvalidUsage`, which names what to use: gradients are reduced as a `HookState` says."""
        raise InvalidUsage(
            "FSDP1's communication hooks are not offered: for another wire, clipping or an optimizer in the backward "
            "give ShardedDataParallel or fully_shard hook_state=collectives.HookState(...), and for a reduction of "
            "your own call set_custom_reduce_scatter(comm) on each unit",
            op="register_comm_hook",
        )

    @contextlib.contextmanager
    def no_sync(self, *, keep_bytes: int | None = None):
        """Add up gradients on each rank inside the block; the next backward after it reduces the
        sum.

        `keep_bytes`: as in `set_requires_gradient_sync`.
        """
        units = units_in(self)
        before = [unit.reduce_grads for unit in units]
        self.set_requires_gradient_sync(False, keep_bytes=keep_bytes)
        try:
            yield
        finally:
            for unit, synced in zip(units, before, strict=True):
                unit.reduce_grads = synced

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[ShardedModule]:
        """Return the modules that are units, outermost first; `root_only`: those that are inside no
        other one.
        """
        found, inside = [], set()
        for each in module.modules():
            if isinstance(each, ShardedModule):
                if not (root_only and id(each) in inside):
                    found.append(each)
                inside.update(id(part) for part in each.modules() if part is not each)
        return found

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module, recurse: bool = True, writeback: bool = True, rank0_only: bool = False,
        offload_to_cpu: bool = False, with_grads: bool = False,
    ):  # fmt: skip
        """Register the full parameters on a module inside the block. A collective; takes the memory
        of all of them.

        `recurse`: those of inner units, too. `writeback`: keep what is written to them; each rank
        keeps its own shard. `rank0_only`: on rank 0 only, without `writeback`. `offload_to_cpu`: on
        the host. `with_grads`: the full gradients, too. They are in the shards' own dtype, whatever
        `mixed_precision` says. Raises `InvalidUsage` in a forward or backward; neither is possible
        inside the block.
        """
        if rank0_only and writeback:
            raise InvalidArgument("rank0_only leaves the other ranks nothing to write back: give writeback=False")
        units = units_in(module, recurse=recurse)
        for unit in units:
            if unit.scheduler.depth or current_graph_task_id() != -1:
                raise InvalidUsage("summon_full_params inside of a forward or backward", op="summon_full_params")
        device = torch.device("cpu") if offload_to_cpu else None
        with unsharded_params(units, keep=writeback, gradients=with_grads, device=device, rank0_only=rank0_only):
            yield

    # FSDP1's names for what `collectives.sharded.fsdp1.state_dict_type` does.
    state_dict_type = staticmethod(settings.state_dict_type)
    set_state_dict_type = staticmethod(settings.set_state_dict_type)
    get_state_dict_type = staticmethod(settings.get_state_dict_type)
    optim_state_dict = staticmethod(settings.optim_state_dict)
    optim_state_dict_to_load = staticmethod(settings.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(settings.full_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(settings.scatter_full_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(settings.shard_full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(settings.sharded_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(settings.flatten_sharded_optim_state_dict)
    rekey_optim_state_dict = staticmethod(settings.rekey_optim_state_dict)


def materialize_meta_params(module: nn.Module, device: torch.device, init, ignored) -> None:
    """Allocate and initialise what of a unit is on the meta device."""
    ignored = set(map(id, ignored))
    for each in managed_modules(module):
        if not has_meta(each, ignored):
            continue
        initialise(each, device, init, functools.partial(InvalidArgument, op="ShardedDataParallel"))
        if has_meta(each):
            raise InvalidArgument(
                f"param_init_fn left parameters or buffers of {type(each).__name__} on the meta device",
                op="ShardedDataParallel",
            )


def broadcast_module_states(module: nn.Module, world: Communicator, ignored) -> None:
    """Broadcast rank 0's parameters and buffers of one unit."""
    found = managed_parameters(module, stop=lambda each: isinstance(each, ShardedModule))
    ignored = set(map(id, ignored))
    tensors = [param.data for _, _, param in found if id(param) not in ignored]
    for each in managed_modules(module):
        tensors += [buffer for buffer in each._buffers.values() if buffer is not None]
    with torch.no_grad():
        for tensor in tensors:
            whole = broadcast_from_rank0(tensor, world)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _cast_buffers(module: nn.Module, dtype: torch.dtype, ignored: set[nn.Module]) -> None:
    inside = {id(part) for each in ignored for part in each.modules()}
    for each in module.modules():
        if id(each) not in inside:
            for name, buffer in each._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    each._buffers[name] = buffer.to(dtype)
