"""Parsing of ShardedDataParallel's arguments into units, their ranks and their policies."""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from ...arrays import kind_of
from ...comm.communicator import Communicator
from ...comm.engine import parse_device
from ...errors import InvalidArgument
from ...rendezvous.process_groups import get_communicator
from ..mesh import Ranks, resolve_ranks
from ..module import ShardedModule
from ..policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, check_floating, parse_offload_policy
from ..wrap import units_of
from .api import ShardingStrategy

__all__ = [
    "PrecisionPolicies",
    "parse_cpu_offload",
    "parse_device_id",
    "parse_enum",
    "parse_ignored",
    "resolve_fsdp1_ranks",
    "select_units",
    "unit_options",
]

_NAME = "ShardedDataParallel"
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_STAY_GATHERED = (
    ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.SHARD_OPTIMIZER,
    ShardingStrategy.NO_SHARD,
)  # fmt: skip


def parse_enum(kind, value, what: str):
    """Return an enum's member, from it, from its name, or from its value: for a `ShardingStrategy`,
    torch's.
    """
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if isinstance(value, enum.Enum) and any(value in (member, member.value) for member in kind):
        return kind(value)
    names = ", ".join(each for each in kind.__members__ if not each.startswith("_"))
    raise InvalidArgument(f"{what} must be a {kind.__name__} ({names}), not {value!r:.60}", op=_NAME)


def unit_options(strategy: ShardingStrategy) -> dict:
    """Return a unit's options for a strategy."""
    return {
        "reshard_after_forward": strategy not in _STAY_GATHERED,
        "persistent": strategy is ShardingStrategy.SHARD_OPTIMIZER,
        "strategy": strategy.name,
    }


def parse_device_id(device) -> torch.device | None:
    """Return the device that FSDP1's ``device_id`` names."""
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool):
        if device >= torch.cuda.device_count():
            raise InvalidArgument(
                f"device_id={device}: there are {torch.cuda.device_count()} GPUs here; leave it out, or give "
                "torch.device('cpu')",
                op=_NAME,
            )
        return torch.device("cuda", device)
    device = parse_device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def resolve_fsdp1_ranks(module: nn.Module, strategy, group, mesh, comm: Communicator | None, device) -> Ranks:
    """Return the ranks that share the parameters, and those that have replicas. A collective at
    first use.
    """
    if sum(each is not None for each in (group, mesh, comm)) > 1:
        raise InvalidArgument("process_group, device_mesh and comm all say which ranks: give one of them", op=_NAME)
    if mesh is not None and mesh.ndim == 2 and strategy not in _HYBRID:
        raise InvalidArgument(f"a mesh of two dimensions is for HYBRID_SHARD, not {strategy.name}", op=_NAME)
    if isinstance(group, tuple):
        return _resolve_two_groups(module, strategy, group, device)
    whole = strategy is ShardingStrategy.NO_SHARD
    ranks = resolve_ranks(module, comm, mesh, group=group, replicated=whole, device=device)
    if strategy in _HYBRID and ranks.replicas is None and ranks.shard is not None:
        world, here = ranks.world, ranks.world.local_size
        if world.size % here:
            raise InvalidArgument(f"{world.size} ranks are no multiple of the {here} of this machine", op=_NAME)
        if here < world.size:  # shards inside a node, replicas on the other nodes
            return Ranks(world.split(world.rank // here), world.split(world.rank % here), world)
    return ranks


def _resolve_two_groups(module, strategy, groups: tuple, device) -> Ranks:
    if strategy not in _HYBRID or len(groups) != 2:
        raise InvalidArgument("two process groups are for HYBRID_SHARD: the pieces' and the replicas'", op=_NAME)
    world = resolve_ranks(module, None, None, group=dist.group.WORLD, device=device).world
    shards, replicas = (get_communicator(each, world.device) for each in groups)
    if shards.size * replicas.size != world.size:
        raise InvalidArgument(
            f"groups of {shards.size} and {replicas.size} ranks don't make up the default group's {world.size}",
            op=_NAME,
        )
    return Ranks(None if shards.size == 1 else shards, None if replicas.size == 1 else replicas, world, groups[0])


def parse_ignored(module: nn.Module, modules, states) -> tuple[set[nn.Module], list[nn.Parameter]]:
    """Return the modules, and the parameters, that stay as they are."""
    modules, states = list(modules or ()), list(states or ())
    parameters = [each for each in states if isinstance(each, nn.Parameter)]
    modules += [each for each in states if isinstance(each, nn.Module)]
    if not all(isinstance(each, nn.Module) for each in modules) or len(parameters) + len(modules) < len(states):
        raise InvalidArgument("ignored_modules must be modules, ignored_states modules or parameters", op=_NAME)
    if module in modules:
        raise InvalidArgument("ignored_modules holds the module itself: there is nothing left to shard", op=_NAME)
    return set(modules), parameters + [param for each in modules for param in each.parameters()]


def parse_cpu_offload(given) -> CPUOffloadPolicy | None:
    """Return the policy for FSDP1's ``cpu_offload``."""
    if given is None or isinstance(given, OffloadPolicy):
        return parse_offload_policy(given)
    if not isinstance(given, CPUOffload):
        raise InvalidArgument(f"cpu_offload must be a CPUOffload, not {kind_of(given)}", op=_NAME)
    return CPUOffloadPolicy() if given.offload_params else None


class PrecisionPolicies:
    """FSDP1's ``mixed_precision`` as policies: of `inner` units, and of the `root`.

    `exempt`: classes of modules that compute in their own dtype.
    """

    def __init__(self, given):
        self.buffer_dtype = None
        self.exempt: tuple[type, ...] = ()
        self.inner = self.root = MixedPrecisionPolicy()
        if given is None:
            return
        if isinstance(given, MixedPrecisionPolicy):
            self.inner = self.root = given
            return
        if not isinstance(given, MixedPrecision):
            raise InvalidArgument(f"mixed_precision must be a MixedPrecision, not {kind_of(given)}", op=_NAME)
        check_floating(given, "param_dtype", "reduce_dtype", "buffer_dtype")
        if given.keep_low_precision_grads:
            raise InvalidArgument(
                "keep_low_precision_grads: gradients of another dtype than their parameters are not supported: leave "
                "it out, and the pieces' gradients are of the parameters' own dtype"
            )
        self.buffer_dtype = given.buffer_dtype
        casts = given.cast_forward_inputs, given.cast_root_forward_inputs
        self.inner, self.root = (
            MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype, cast_forward_inputs=each) for each in casts
        )
        if given.param_dtype is not None:
            self.exempt = tuple(given._module_classes_to_ignore or ())

    def exempt_policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        """Return the policy of a unit that computes in its own dtype, between other units."""
        own = next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)
        return MixedPrecisionPolicy(own, output_dtype=self.inner.param_dtype)


def select_units(
    module: nn.Module, policy, precision: PrecisionPolicies, modules, parameters
) -> list[tuple[nn.Module, dict]]:
    """Return the submodules that become units, children first, with the options of each."""
    chosen = [] if policy is None else units_of(module, policy, modules, parameters)
    how = {each: own for each, own in chosen if not isinstance(each, ShardedModule)}
    if precision.exempt:
        for each in module.modules():
            if isinstance(each, precision.exempt) and each is not module and each not in modules:
                if any(True for _ in each.parameters()) and not isinstance(each, ShardedModule):
                    how[each] = {**how.get(each, {}), "mp_policy": precision.exempt_policy(each)}
    inside_first = units_of(module, lambda module, recurse, nonwrapped_numel: recurse or module in how, modules)
    return [(each, how[each]) for each, _ in inside_first]
