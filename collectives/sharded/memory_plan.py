"""Memory plan: the bytes that a rank needs for a step of a sharded module, computed before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument
from ..torch_compat import can_swap_storage_memory
from .fsdp1_arguments import ShardingStrategy, parse_enum
from .managed_params import managed_parameters, units_in
from .mesh import find_device
from .module import ShardedModule
from .optimizer_cost import OptimizerCost
from .policies import dtypes_of, parse_mp_policy
from .wrap import units_of

__all__ = ["MemoryPlan", "memory_plan"]

_OP = "memory_plan"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank; ``print`` shows them.

    Attributes:
        parameters: This rank's shards.
        gradients: Those of the shards, until a forward that finds them None.
        optimizer: Its state.
        buffers: The module's.
        arena: Memory for gathered parameters and packed gradients, which stays between steps.
        full_gradients: The most at one time in a backward.
        work: The optimizer's temporaries.
        activations: As given.
        on_host: What lies on the host beside a GPU, with offloading. None of the others counts it.
        peaks: The most at one time, in the forward, the backward and the optimizer's step.
        replicas: How many ranks have the same shard.
        units: Name, elements, and bytes when gathered, of each unit, outermost first.
    """

    ranks: int
    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    arena: int
    full_gradients: int
    work: int
    activations: int
    on_host: int
    peaks: dict[str, int]
    replicas: int
    units: list[tuple[str, int, int]]

    @property
    def peak_in(self) -> str:
        """The part of a step that needs the most: "forward", "backward" or "step"."""
        return max(self.peaks, key=self.peaks.get)

    @property
    def peak(self) -> int:
        """The most at one time."""
        return self.peaks[self.peak_in]

    def __str__(self):
        counts = {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer,
            "buffers": self.buffers, "gathered parameters, packed gradients": self.arena,
            "full gradients, in the backward": self.full_gradients, "temporaries of the optimizer's step": self.work,
            "activations": self.activations, "on the host": self.on_host,
            f"peak, in the {self.peak_in}": self.peak,
        }  # fmt: skip
        replicas = f", each shard on {self.replicas} of them" if self.replicas > 1 else ""
        lines = [f"{self.strategy} on {self.ranks} ranks{replicas}; {len(self.units)} units"]
        lines += [f"{count / 2**20:12,.2f} MiB  {name}" for name, count in counts.items() if count]
        return "\n".join(lines)


def memory_plan(
    module: nn.Module, ranks: int, optimizer="adamw", strategy: ShardingStrategy | str | None = None, *, units=None,
    mp_policy=None, reshard_after_forward: bool | int | None = None, replicas: int = 1, accumulate: bool = False,
    offload: bool = False, activations: int = 0, device: torch.device | str | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> MemoryPlan:  # fmt: skip
    """Compute the bytes of a rank that trains a module on `ranks` ranks. Starts nothing.

    Counted are steps from the fifth on, within 10% of measured peaks with torch from 2.12 on. The plan assumes
    that all ranks are on one host, if they compute on CPUs. Not counted: activations, temporaries inside
    operations of the model, the memory of libraries, padding.

    Args:
        module: As it is, on the meta device, or sharded already: its units and their settings are
            its own then.
        ranks: Their number.
        optimizer: An instance, a class, a function of parameters, "sgd", "adam", "adamw" (those of
            `collectives.optim`), or None.
        strategy: A `ShardingStrategy` or its name. None: that of a sharded module, or FULL_SHARD.
        units: A wrap policy, or the submodules that are units besides the module itself.
        mp_policy: As in `fully_shard`.
        reshard_after_forward: As in `fully_shard`.
        replicas: With a hybrid strategy, how many ranks have the same shard.
        accumulate: Several backwards a step, whose full gradients are kept until the last one.
        offload: Shards and optimizer on the host.
        activations: Their bytes at the end of the forward.
        device: Where it computes. None: where the module is, and a GPU for the meta device if there is one.
        ignored_params: As in `fully_shard`.

    Raises:
        InvalidArgument: By name.
    """
    if strategy is None and isinstance(module, ShardedModule):
        strategy, own_replicas = _strategy_of(module._sharded_unit)
        replicas = own_replicas if replicas == 1 else replicas
    _check(module, ranks, units, replicas)
    strategy = parse_enum(ShardingStrategy, strategy or "FULL_SHARD", "strategy")
    if strategy.shape == "replicate":
        replicas = ranks
    shards = ranks // replicas
    reshards = strategy.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
    if reshards is not None and not isinstance(reshards, bool) and (reshards < 2 or shards % reshards):
        raise InvalidArgument(f"reshard_after_forward must divide {shards} ranks", op=_OP)
    device = find_device(module, None) if device is None else torch.device(device)
    keeps = strategy is ShardingStrategy.SHARD_OPTIMIZER
    in_place = device.type == "cpu" and can_swap_storage_memory() and not keeps
    planned = _plan_units(module, units, shards, mp_policy, in_place, list(ignored_params), reshards)
    groups = [group for unit in planned for group in unit.groups]
    trainable = [group for group in groups if group.trains]

    cost = OptimizerCost(optimizer, on_gpu=device.type == "cuda")
    state, work = cost.of([param for group in trainable for param in group.params], shards)
    kept = {
        "parameters": sum(group.nbytes for group in groups) // shards,
        "gradients": sum(group.nbytes for group in trainable) // shards,
        "optimizer": state,
    }
    on_host = 0
    if offload and device.type == "cuda":
        on_host, work, kept = sum(kept.values()), 0, dict.fromkeys(kept, 0)
    gathered, packed = _arena_bytes(planned, prefetches=device.type == "cuda", keeps=keeps)
    full_gradients = _most_on_a_path(planned, lambda unit: sum(group.full_grads for group in unit.groups))
    if accumulate:
        largest = max((param.numel() * group.computes_in.itemsize for group in trainable for param in group.params),
                      default=0)  # fmt: skip
        full_gradients = sum(group.full_grads for group in trainable) + largest
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    resident = sum(kept.values()) + buffers + packed
    # Before torch 2.12 gathered parameters lie in memory of torch's allocator, which a reshard frees.
    always = resident + (gathered if keeps or can_swap_storage_memory() else 0)
    passes = resident + gathered + activations + sum(unit.kept_after_forward for unit in planned)
    accumulated = full_gradients if accumulate else 0
    # A forward frees the shards' gradients at its begin. In a backward they come while the activations go, or
    # accumulated full gradients.
    less = min(activations + accumulated, kept["gradients"])
    peaks = {
        "forward": max(always, passes - kept["gradients"] + accumulated),
        "backward": passes - less + full_gradients + max((group.output for group in groups), default=0) // shards,
        "step": always + work,
    }
    return MemoryPlan(
        ranks=ranks, strategy=strategy.name, **kept, buffers=buffers, arena=gathered + packed,
        full_gradients=full_gradients, work=work, activations=activations, on_host=on_host, peaks=peaks,
        replicas=replicas, units=[(unit.name or type(module).__name__, unit.count, unit.gathered) for unit in planned],
    )  # fmt: skip


def _check(module, ranks, units, replicas) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"module must be a torch.nn.Module, not {kind_of(module)}", op=_OP)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidArgument(f"ranks must be an int from 1, not {ranks!r:.40}", op=_OP)
    if not isinstance(replicas, int) or replicas < 1 or ranks % replicas:
        raise InvalidArgument(f"replicas must divide {ranks} ranks, not {replicas!r:.40}", op=_OP)
    if units is not None and isinstance(module, ShardedModule):
        raise InvalidArgument("the module is sharded: its units are what they are; leave units out", op=_OP)


def _strategy_of(unit) -> tuple[ShardingStrategy, int]:
    """Return the strategy of a sharded module's outermost unit, and its number of replicas."""
    replicas = unit.world.size // unit.comm.size
    if not unit.reshard_after_backward:
        return ShardingStrategy.SHARD_OPTIMIZER, replicas
    if unit.comm.size == 1 < replicas:
        return ShardingStrategy.NO_SHARD, 1  # of any number of ranks
    if replicas > 1:
        return ShardingStrategy.HYBRID_SHARD, replicas
    return ShardingStrategy.FULL_SHARD, 1


# ---- Units.


class _Group:
    """The parameters of a unit with one dtype, trainable or frozen: bytes of all ranks' parts."""

    def __init__(self, params: list[nn.Parameter], policy):
        self.params = params
        dtype, self.trains = params[0].dtype, params[0].requires_grad
        self.computes_in, reduces_in = dtypes_of(dtype, policy.param_dtype, policy.reduce_dtype)
        count = sum(param.numel() for param in params)
        self.casts = self.computes_in != dtype
        self.nbytes, self.full = count * dtype.itemsize, count * self.computes_in.itemsize
        self.full_grads = self.full if self.trains else 0
        self.packed = count * reduces_in.itemsize if self.trains else 0
        self.output = self.packed if reduces_in != dtype else 0  # before it is cast to the gradients' dtype


class _PlannedUnit:
    """A unit. `gathered`: the bytes that its full parameters take; 0 where they lie in the ranks' shards."""

    def __init__(self, name: str, params: list[nn.Parameter], shards: int, policy, in_place: bool, reshards):
        kinds: dict[tuple, list] = {}
        for param in params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
        self.name, self.stays = name, reshards is False
        self.count = sum(param.numel() for param in params)
        self.groups = [_Group(members, policy) for members in kinds.values()]
        copies_nothing = shards == 1 or (in_place and not self.stays)
        self.gathered = sum(group.full for group in self.groups if group.casts or not copies_nothing)
        is_int = reshards is not None and not isinstance(reshards, bool)
        self.kept_after_forward = self.gathered // reshards if is_int and reshards < shards else 0


def _plan_units(module, given, shards: int, policy, in_place: bool, ignored, reshards) -> list[_PlannedUnit]:
    """Return the units of a module, outermost first."""
    names = {part: name for name, part in module.named_modules()}
    made = []
    if isinstance(module, ShardedModule):
        for unit in units_in(module):
            its = unit.reshard_after_forward
            if unit.neighbours is not None:
                its = unit.neighbours.size
            its = its if reshards is None else reshards
            params = [param.sharded for param in unit.params]
            its_policy = policy or unit.mp_policy
            name = next((names[part] for part in unit.modules if part in names), "")
            made.append(_PlannedUnit(name, params, shards, its_policy, in_place, its))
        return made
    chosen = _choose(module, given)
    for each in (part for part in names if part in chosen):
        params = [param for _, _, param in managed_parameters(each, ignored, stop=lambda part: part in chosen)]
        made.append(_PlannedUnit(names[each], params, shards, parse_mp_policy(policy), in_place, reshards))
    return made


def _choose(module: nn.Module, given) -> set[nn.Module]:
    if given is None:
        return {module}
    if not isinstance(given, list | tuple | set):
        return {module, *(each for each, _ in units_of(module, given))}
    if not all(isinstance(each, nn.Module) for each in given) or not set(given) <= set(module.modules()):
        raise InvalidArgument("units must be a wrap policy, or submodules of the module", op=_OP)
    return {module, *given}


def _most_on_a_path(units: list[_PlannedUnit], nbytes) -> int:
    """Return the most bytes that a unit and those around it have together."""
    sizes = {unit.name: nbytes(unit) for unit in units}
    most = 0
    for name in sizes:
        parts = name.split(".") if name else []
        most = max(most, sum(sizes.get(".".join(parts[:depth]), 0) for depth in range(len(parts) + 1)))
    return most


def _arena_bytes(units: list[_PlannedUnit], *, prefetches: bool, keeps: bool) -> tuple[int, int]:
    """Return the bytes of the blocks that a step takes for what is gathered at one time, and those of further blocks.

    These are for a group's packed gradients, which take the memory of the unit's gathered parameters if they fit there
    and the parameters are freed before.
    """
    if keeps or any(unit.stays for unit in units):
        gathered = sum(unit.gathered for unit in units)
    else:
        gathered = _most_on_a_path(units, lambda unit: unit.gathered)
        if prefetches:
            gathered += sum(sorted((unit.gathered for unit in units[1:]), reverse=True)[1:2])
    packed = [(group.packed, unit.gathered) for unit in units for group in unit.groups]
    return gathered, max((nbytes for nbytes, freed in packed if keeps or nbytes > freed), default=0)
