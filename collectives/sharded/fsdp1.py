"""FSDP1's face of sharded modules: `ShardedDataParallel`, with FullyShardedDataParallel's arguments and methods."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import StateDictType

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import tree_map_only
from . import state
from .fsdp1_arguments import (
    Precision,
    ShardingStrategy,
    parse_cpu_offload,
    parse_enum,
    parse_state_dict_settings,
    place_of,
)
from .fully_shard import shard
from .hook_state import ranks_of
from .managed_params import units_in
from .materialize import cast_buffers, prepare
from .mesh import resolve_mesh
from .module import ShardedModule
from .optimizer_state import gather_optimizer_state, local_optimizer_state, optimizer_state, scatter_optimizer_state
from .wrap import parse_ignored, units_of

__all__ = ["ShardedDataParallel"]

_NAME = "ShardedDataParallel"


class ShardedDataParallel(ShardedModule):
    """Shard a module, as FullyShardedDataParallel does; in place: returns the module itself.

    A collective, which blocks. The arguments are FullyShardedDataParallel's, and two more:

    - `process_group`: the ranks; for HYBRID_SHARD also a pair, (the shards', the replicas').
      `device_mesh` or `comm` in its place. None: the default group.
    - `sharding_strategy`: a `ShardingStrategy`, torch's, or a name. None: FULL_SHARD.
    - `cpu_offload`: ``CPUOffload(offload_params=True)``.
    - `auto_wrap_policy`: which submodules become units, see `collectives.sharded.wrap`. None: all is
      one unit, except submodules that are sharded already. A `CustomPolicy` may set of one module
      sharding_strategy, mixed_precision, cpu_offload, backward_prefetch and forward_prefetch.
    - `backward_prefetch`, `forward_prefetch`: on a GPU, gather the next unit while one is computed.
    - `limit_all_gathers`, `use_orig_params` change nothing: at most one unit is gathered ahead, and
      the optimizer always gets each parameter's shard.
    - `mixed_precision`: a `MixedPrecision`. Modules of ``_module_classes_to_ignore`` compute in their
      own dtype, and their buffers keep theirs.
    - `device_id`: where it computes; the module is moved there unit by unit.
    - `sync_module_states`: take rank 0's parameters and buffers.
    - `param_init_fn`: allocates and initialises what a module on the meta device holds itself. None:
      ``to_empty`` and ``reset_parameters()``.
    - `ignored_modules`, `ignored_states`: modules, or parameters, that stay as they are.
    - `comm`: a `Communicator`. `hook_state`: a `collectives.HookState`.

    Raises:
        InvalidArgument: By name, for an argument of another kind.
        InvalidUsage, Mismatch: As `collectives.sharded.fully_shard`.
    """

    _state_dict_settings = None

    def __new__(
        cls, module: nn.Module, process_group=None, sharding_strategy=None, cpu_offload=None, auto_wrap_policy=None,
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE, mixed_precision=None, ignored_modules=None,
        param_init_fn=None, device_id=None, sync_module_states: bool = False, forward_prefetch: bool = False,
        limit_all_gathers: bool = True, use_orig_params: bool = False, ignored_states=None, device_mesh=None, *,
        comm=None, hook_state=None,
    ):  # fmt: skip
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"module must be a torch.nn.Module, not {kind_of(module)}", op=_NAME)
        if isinstance(module, ShardedModule):
            raise InvalidUsage(f"this {type(module).__name__} is sharded already", op=_NAME)
        settings = {
            "sharding_strategy": sharding_strategy, "cpu_offload": cpu_offload, "mixed_precision": mixed_precision,
            "backward_prefetch": backward_prefetch, "forward_prefetch": forward_prefetch,
        }  # fmt: skip
        precision = Precision(mixed_precision)
        skipped, ignored = parse_ignored(module, ignored_modules, ignored_states)
        if process_group is None and device_mesh is None and comm is None:
            comm, process_group = ranks_of(hook_state)
        place = place_of(module, device_id)
        units = units_of(module, auto_wrap_policy, skipped, ignored, also=precision.exempt)
        for each, own in [*units, (module, {})]:
            if not own.keys() <= settings.keys():
                raise InvalidArgument(f"a policy sets {list(own)} of one module; it may set {list(settings)}", op=_NAME)
            its = settings | own
            strategy = parse_enum(ShardingStrategy, its["sharding_strategy"] or "FULL_SHARD", "sharding_strategy")
            if its["backward_prefetch"] is not None:
                parse_enum(fsdp.BackwardPrefetch, its["backward_prefetch"], "backward_prefetch")
            policies = Precision(own["mixed_precision"]) if "mixed_precision" in own else precision
            ranks = resolve_mesh(place, comm, device_mesh, group=process_group, shape=strategy.shape)
            prepare(each, ranks, param_init_fn, skipped, ignored, sync=sync_module_states)
            unit = shard(
                [each], cls, ranks, mp_policy=policies.policy_of(each, is_root=each is module), hook_state=hook_state,
                ignored_params=ignored, offload_policy=parse_cpu_offload(its["cpu_offload"]),
                reshard_after_forward=strategy.reshard_after_forward,
            )  # fmt: skip
            unit.reshard_after_backward = strategy is not ShardingStrategy.SHARD_OPTIMIZER
            unit.prefetch_in_forward = bool(its["forward_prefetch"])
            unit.prefetch_in_backward = its["backward_prefetch"] is not None
        if precision.buffer_dtype is not None:
            cast_buffers(module, precision.buffer_dtype, precision.exempt, skipped)
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
        others = [each for unit in self._sharded_unit.scheduler.units for each in unit.modules if each is not self]
        return not any(part is self for each in others for part in each.modules())

    def register_comm_hook(self, state, hook):
        """Raise `InvalidUsage`, which names what to use: gradients are reduced as a `HookState` says."""
        raise InvalidUsage(
            "FSDP1's communication hooks are not offered: for another wire, clipping or an optimizer in the backward "
            "give ShardedDataParallel or fully_shard hook_state=collectives.HookState(...), and for a reduction of "
            "your own call set_custom_reduce_scatter(comm) on each unit",
            op="register_comm_hook",
        )

    @contextlib.contextmanager
    def no_sync(self):
        """Add up full gradients on each rank inside the block; the next backward after it reduces the sum."""
        units = units_in(self)
        before = [unit.reduces for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, reduces in zip(units, before, strict=True):
                unit.reduces = reduces

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[ShardedModule]:
        """Return the modules that are units, outermost first; `root_only`: those that are inside no other one."""
        found = [each for each in module.modules() if isinstance(each, ShardedModule)]
        inside = {part for each in found for part in each.modules() if part is not each}
        return [each for each in found if not (root_only and each in inside)]

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module, recurse: bool = True, writeback: bool = True, rank0_only: bool = False,
        offload_to_cpu: bool = False, with_grads: bool = False,
    ):  # fmt: skip
        """Have a module hold whole parameters inside the block, of the shards' dtype. A collective; blocks.

        Args:
            recurse: Those of inner units, too.
            writeback: Keep what is written to them; each rank keeps its own part.
            rank0_only: On rank 0 only, without `writeback`.
            offload_to_cpu: On the host.
            with_grads: The whole gradients, too.

        Raises:
            InvalidUsage: In a forward or backward. Neither is possible inside the block.
            InvalidArgument: `rank0_only` with `writeback`.
        """
        units = units_in(module, recurse=recurse)
        if any(unit.scheduler.is_running or unit.scheduler.is_recomputing for unit in units):
            raise InvalidUsage("summon_full_params inside of a forward or backward", op="summon_full_params")
        with state.unsharded_params(
            units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            yield

    def state_dict(self, *, destination=None, prefix: str = "", keep_vars: bool = False):
        """Return whole tensors, a collective, or shards, as `set_state_dict_type` says; whole ones unless it is set."""
        settings = self.get_state_dict_type(self)
        config, is_full = settings.state_dict_config, settings.state_dict_type is StateDictType.FULL_STATE_DICT
        if state.wants_shards():
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        with state.as_shards():
            made = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if is_full:
            state.gather_entries(self, made, prefix, to_cpu=config.offload_to_cpu, rank0_only=config.rank0_only)
        elif config.offload_to_cpu:
            own = {key: value for key, value in made.items() if key.startswith(prefix)}
            made.update(tree_map_only(torch.Tensor, torch.Tensor.cpu, own))
        return made

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> fsdp.StateDictSettings:
        """Return what `set_state_dict_type` has set for the outermost unit inside."""
        found = (each._state_dict_settings for each in module.modules() if isinstance(each, ShardedDataParallel))
        return next(found, None) or parse_state_dict_settings(StateDictType.FULL_STATE_DICT)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module, state_dict_type, state_dict_config=None, optim_state_dict_config=None
    ) -> fsdp.StateDictSettings:
        """Set what ``state_dict()`` of a module's units and `optim_state_dict` return; return what was set before.

        FULL_STATE_DICT: whole tensors. SHARDED_STATE_DICT: shards, DTensors. What is loaded may be any of
        these, whatever is set. A local call, to be made on all ranks. Raises `InvalidArgument` for
        LOCAL_STATE_DICT: there is no flat parameter.
        """
        before = ShardedDataParallel.get_state_dict_type(module)
        settings = parse_state_dict_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for each in ShardedDataParallel.fsdp_modules(module):
            each._state_dict_settings = settings
        return before

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module: nn.Module, state_dict_type, state_dict_config=None, optim_state_dict_config=None):
        """Call `set_state_dict_type` for the time of a block."""
        before = [(each, each._state_dict_settings) for each in ShardedDataParallel.fsdp_modules(module)]
        ShardedDataParallel.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for each, settings in before:
                each._state_dict_settings = settings

    # ---- An optimizer's state. `group` changes nothing.

    @staticmethod
    def optim_state_dict(model: nn.Module, optim, optim_state_dict=None, group=None) -> dict[str, Any]:
        """Return an optimizer's state by names, as `set_state_dict_type` says; whole tensors are a collective.

        `optim_state_dict`: the result of the optimizer's own ``state_dict()``. None: call that now.
        """
        settings = ShardedDataParallel.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        made = optimizer_state(model, optim, raw=optim_state_dict)
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            return gather_optimizer_state(model, made, to_cpu=config.offload_to_cpu, rank0_only=config.rank0_only)
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, made) if config.offload_to_cpu else made

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim, optim_state_dict: dict[str, Any], is_named_optimizer: bool = False,
        load_directly: bool = False, group=None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what ``optim.load_state_dict`` takes, from whole tensors or shards by names.

        `load_directly`: load it, too. A collective where FULL_STATE_DICT with ``rank0_only`` is set:
        rank 0 alone has the state.
        """
        config = ShardedDataParallel.get_state_dict_type(model).optim_state_dict_config
        if getattr(config, "rank0_only", False):
            optim_state_dict = scatter_optimizer_state(model, optim_state_dict)
        local = local_optimizer_state(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(local)
        return local

    @staticmethod
    def full_optim_state_dict(model: nn.Module, optim, optim_input=None, rank0_only: bool = True, group=None):
        """Return an optimizer's whole state by names, on the host; `rank0_only`: {} on the others. A collective."""
        made = optimizer_state(model, optim)
        return gather_optimizer_state(model, made, to_cpu=True, rank0_only=rank0_only)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim, group=None) -> dict[str, Any]:
        """Return an optimizer's state by names, as DTensors. A local call."""
        return optimizer_state(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input=None, optim=None
    ) -> dict[str, Any]:
        """Return what ``optim.load_state_dict`` takes, from whole state that each rank has. A local call.

        `optim_input`: what the optimizer was made of. None: ``model.parameters()``.
        """
        return local_optimizer_state(model, optim or _optimizer_of(model, optim_input), full_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None, model: nn.Module, optim_input=None, optim=None, group=None
    ):
        """Return what ``optim.load_state_dict`` takes, from whole state that rank 0 has. A collective."""
        given = scatter_optimizer_state(model, full_optim_state_dict)
        return ShardedDataParallel.shard_full_optim_state_dict(given, model, optim_input, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim):
        """Return what ``optim.load_state_dict`` takes, from `sharded_optim_state_dict`'s result. A local call."""
        return local_optimizer_state(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any], optim_state_key_type, model: nn.Module, optim_input=None, optim=None
    ) -> dict[str, Any]:
        """Return whole optimizer state with the parameters' names as keys, or their numbers. A local call.

        `model`: an unsharded one, or a sharded one. `optim_input`: as of `shard_full_optim_state_dict`.
        """
        by_id = {id(param): name for name, param in model.named_parameters()}
        groups = (optim or _optimizer_of(model, optim_input)).param_groups
        names = [by_id[id(param)] for group in groups for param in group["params"]]
        by_name = parse_enum(fsdp.OptimStateKeyType, optim_state_key_type, "optim_state_key_type").name == "PARAM_NAME"
        pairs = list(enumerate(names))
        keys = {number: name if by_name else number for number, name in pairs}
        keys |= {name: name if by_name else number for number, name in pairs}
        unknown = [key for key in optim_state_dict["state"] if key not in keys]
        if unknown:
            raise InvalidArgument(f"the optimizer state is of another model: this one has no parameter {unknown[0]!r}")
        return {
            "state": {keys[key]: entries for key, entries in optim_state_dict["state"].items()},
            "param_groups": [
                {**group, "params": [keys[key] for key in group["params"]]}
                for group in optim_state_dict["param_groups"]
            ],
        }


def _optimizer_of(model: nn.Module, optim_input) -> torch.optim.Optimizer:
    """Return an optimizer that has only the parameter groups."""
    return torch.optim.Optimizer(model.parameters() if optim_input is None else optim_input, {})
