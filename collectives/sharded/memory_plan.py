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
from .layout import plan_layout
from .managed_params import managed_parameters, units_in
from .module import ShardedModule
from .optimizer_cost import OptimizerCost
from .policies import parse_mp_policy
from .wrap import units_of

__all__ = ["MemoryPlan", "memory_plan"]


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank; ``print`` shows them.

    Attributes:
        parameters: This rank's shards.
        gradients: Those of the shards, until a forward that finds them None.
        optimizer: Its state and master weights.
        buffers: The module's.
        arena: Memory for gathered parameters and packed gradients, which stays between steps. The ranks of
            one host gather in place, without any, where the dtype stays.
        full_gradients: The most at one time in a backward.
        work: The optimizer's temporaries.
        activations: As given.
        on_host: What lies on the host beside a GPU, with offloading. None of the others counts it.
        peak: The most at one time; `peak_in`: forward, backward or step; `peaks`: of each of these.
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
    peak: int
    peak_in: str
    peaks: dict[str, int]
    replicas: int
    units: list[tuple[str, int, int]]

    def __str__(self):
        rows = [
            ("parameters", self.parameters, "this rank's shards" if self.ranks > self.replicas else "all of them"),
            ("gradients", self.gradients, "of the shards"),
            ("optimizer", self.optimizer, "its state"),
            ("buffers", self.buffers, "the module's"),
            ("arena", self.arena, "gathered parameters, packed gradients"),
            ("full gradients", self.full_gradients, "in the backward"),
            ("work", self.work, "the optimizer's, in its step"),
            ("activations", self.activations, "as given"),
            ("on the host", self.on_host, "beside the GPU"),
        ]
        several = f", each shard on {self.replicas} of them" if self.replicas > 1 else ""
        lines = [f"{self.strategy} on {self.ranks} ranks{several}; {len(self.units)} units"]
        lines += [f"{name:<15}{_format_bytes(count):>12}  {what}" for name, count, what in rows if count]
        lines += [f"{'peak':<15}{_format_bytes(self.peak):>12}  in the {self.peak_in}"]
        lines += [f"  {phase:<13}{_format_bytes(count):>12}" for phase, count in self.peaks.items()]
        return "\n".join(lines)


def _format_bytes(nbytes: int) -> str:
    return f"{nbytes:,} B" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):,.2f} MiB"


def memory_plan(
    module: nn.Module, ranks: int, optimizer="adamw", strategy: ShardingStrategy | str | None = None, *, units=None,
    mp_policy=None, reshard_after_forward: bool | int | None = None, replicas: int = 1, accumulate: bool = False,
    master_weights: bool | None = None, offload: bool = False, activations: int = 0,
    device: torch.device | str | None = None, ignored_params: Iterable[nn.Parameter] = (),
) -> MemoryPlan:  # fmt: skip
    """Compute the bytes of a rank that trains a module on `ranks` ranks. Starts nothing.

    Counted are steps from the fifth on. The plan assumes that inner units run in the order in which
    they are registered, once in each forward, and that all ranks are on one host, if they compute on
    CPUs. Not counted: activations, temporaries inside operations of the model, the memory of libraries.

    Args:
        module: As it is, on the meta device, or sharded already: its units and their settings are
            its own then.
        ranks: Their number.
        optimizer: An instance, a class, a function of parameters, "sgd", "sgd+momentum", "adam",
            "adamw" (those of `collectives.optim`), or None.
        strategy: A `ShardingStrategy` or its name. None: FULL_SHARD.
        units: A wrap policy, or the submodules that are units besides the module itself.
        mp_policy: As in `fully_shard`.
        reshard_after_forward: As in `fully_shard`.
        ignored_params: As in `fully_shard`.
        replicas: With a hybrid strategy, how many ranks have the same shard.
        accumulate: Several backwards a step, whose full gradients are kept until the last one.
        master_weights: As in the optimizers of `collectives.optim`.
        offload: Shards and optimizer on the host.
        activations: Their bytes at the end of the forward.
        device: Where it computes. None: where the module is, and a GPU for the meta device if there is one.

    Raises:
        InvalidArgument: By name.
    """
    _check(module, ranks, units, replicas)
    strategy = parse_enum(ShardingStrategy, strategy or "FULL_SHARD", "strategy")
    if strategy.shape == "replicate":
        replicas = ranks
    reshards = strategy.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
    shards = ranks // replicas
    if reshards is not None and not isinstance(reshards, bool) and (reshards < 2 or shards % reshards):
        raise InvalidArgument(f"reshard_after_forward must divide {shards} ranks", op="memory_plan")
    device = _find_device(module, device)
    keeps = strategy.name == "SHARD_OPTIMIZER"
    on_one_host = device.type == "cpu" and can_swap_storage_memory() and not keeps
    planned = _plan_units(module, units, shards, mp_policy, on_one_host, set(map(id, ignored_params)), reshards)
    arena = _Arena(planned, prefetches=device.type == "cuda", keeps=keeps)
    groups = [group for unit in planned for group in unit.groups]
    trainable = [group for group in groups if group.trains]
    cost = OptimizerCost(optimizer, master_weights=master_weights, on_gpu=device.type == "cuda")
    state, work = cost.of([param for group in trainable for param in group.params], shards)
    kept = {
        "parameters": sum(group.part * group.dtype.itemsize for group in groups),
        "gradients": sum(group.part * group.dtype.itemsize for group in trainable),
        "optimizer": state,
    }
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    on_host = 0
    if offload and device.type == "cuda":
        on_host, work, kept = sum(kept.values()), 0, dict.fromkeys(kept, 0)
    full_gradients = arena.full_gradients
    if accumulate:
        full_gradients = sum(group.full_grads for group in trainable) + max(
            (param.numel() * group.gather_dtype.itemsize for group in trainable for param in group.params), default=0
        )
    always = sum(kept.values()) + buffers + arena.total
    passes = always + activations + sum(unit.kept_after_forward for unit in planned)
    # In a backward the gradients of the shards come while the activations go, or accumulated full gradients.
    less = min(activations + (full_gradients if accumulate else 0), kept["gradients"])
    peaks = {
        "forward": passes - kept["gradients"] + (full_gradients if accumulate else 0),
        "backward": passes - less + full_gradients + arena.outputs,
        "step": always + work,
    }
    peak_in = max(peaks, key=peaks.get)
    return MemoryPlan(
        ranks=ranks, strategy=strategy.name, **kept, buffers=buffers, arena=arena.total, full_gradients=full_gradients,
        work=work, activations=activations, on_host=on_host, peak=peaks[peak_in], peak_in=peak_in, peaks=peaks,
        replicas=replicas, units=[(unit.name, unit.count, unit.gathered) for unit in planned],
    )  # fmt: skip


def _check(module, ranks, units, replicas) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"module must be a torch.nn.Module, not {kind_of(module)}", op="memory_plan")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidArgument(f"ranks must be an int from 1, not {ranks!r:.40}", op="memory_plan")
    if not isinstance(replicas, int) or replicas < 1 or ranks % replicas:
        raise InvalidArgument(f"replicas must divide {ranks} ranks, not {replicas!r:.40}", op="memory_plan")
    if units is not None and isinstance(module, ShardedModule):
        raise InvalidArgument("the module is sharded: its units are what they are; leave units out", op="memory_plan")


def _find_device(module: nn.Module, device) -> torch.device:
    if device is not None:
        return torch.device(device)
    for unit in units_in(module):
        return unit.device
    kinds = {param.device.type for param in module.parameters()} - {"meta"}
    return torch.device(kinds.pop() if kinds else "cuda" if torch.cuda.is_available() else "cpu")


class _Group:
    """The parameters of a unit with one dtype, trainable or frozen: sizes as of `param.ParamGroup`."""

    def __init__(self, params: list[nn.Parameter], shards: int, policy, on_one_host: bool):
        self.params = params
        self.dtype, self.trains = params[0].dtype, params[0].requires_grad
        casts = self.dtype.is_floating_point
        self.gather_dtype = policy.param_dtype if casts and policy.param_dtype is not None else self.dtype
        self.reduce_dtype = policy.reduce_dtype if casts and policy.reduce_dtype is not None else self.gather_dtype
        rows = [max(1, param.shape[1:].numel() if param.dim() else 1) for param in params]
        narrowest = min(dtype.itemsize for dtype in (self.dtype, self.gather_dtype, self.reduce_dtype))
        self.part = plan_layout([param.numel() for param in params], rows, shards, itemsize=narrowest).part
        shares_memory = (shards == 1 or on_one_host) and self.gather_dtype == self.dtype
        self.gathered = 0 if shares_memory else self.part * shards * self.gather_dtype.itemsize
        self.packed = self.part * shards * self.reduce_dtype.itemsize if self.trains else 0
        self.full_grads = sum(param.numel() for param in params) * self.gather_dtype.itemsize if self.trains else 0
        self.output = self.part * self.reduce_dtype.itemsize if self.trains and self.reduce_dtype != self.dtype else 0


class _PlannedUnit:
    """A unit: its groups, and the units inside it, in the order in which they run."""

    def __init__(self, name: str, params: list[nn.Parameter], shards: int, policy, on_one_host: bool, reshards):
        kinds: dict[tuple, list] = {}
        for param in params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
        self.name, self.reshards = name, reshards
        self.count = sum(param.numel() for param in params)
        shares = on_one_host and reshards is not False
        self.groups = [_Group(members, shards, policy, shares) for members in kinds.values()]
        self.gathered = sum(group.gathered for group in self.groups)
        self.full_grads = sum(group.full_grads for group in self.groups)
        is_int = reshards is not None and not isinstance(reshards, bool)
        self.kept_after_forward = self.gathered // reshards if is_int and reshards < shards else 0
        self.inside: list[_PlannedUnit] = []


def _plan_units(
    module, given, shards: int, policy, on_one_host: bool, ignored: set[int], reshards
) -> list[_PlannedUnit]:
    """Return the units of a module, outermost first, whose first one has the others inside."""
    if isinstance(module, ShardedModule):
        members = {}
        for unit in units_in(module):
            params = [param.sharded for param in unit.params]
            its = unit.reshard_after_forward
            if unit.neighbours is not None:
                its = unit.comm.size // unit.neighbours.size
            members[unit] = unit.modules[0], params, policy or unit.mp_policy, its if reshards is None else reshards
    else:
        chosen = _choose(module, given)
        members = {}
        for each in (part for part in module.modules() if part in chosen):
            found = managed_parameters(each, stop=lambda part: part in chosen)
            params = [param for _, _, param in found if id(param) not in ignored]
            members[each] = each, params, parse_mp_policy(policy), reshards
    names = {part: name for name, part in module.named_modules()}
    made: dict[nn.Module, _PlannedUnit] = {}
    for each, params, its_policy, its in members.values():
        unit = _PlannedUnit(names[each] or type(each).__name__, params, shards, its_policy, on_one_host, its)
        outer = [part for part in made if any(each is inner for inner in part.modules())]
        if outer:
            made[outer[-1]].inside.append(unit)
        made[each] = unit
    return list(made.values())


def _choose(module: nn.Module, given) -> set[nn.Module]:
    if given is None:
        return {module}
    if not isinstance(given, list | tuple | set):
        return {module, *(each for each, _ in units_of(module, given))}
    if not all(isinstance(each, nn.Module) for each in given) or not set(given) <= set(module.modules()):
        raise InvalidArgument("units must be a wrap policy, or submodules of the module", op="memory_plan")
    return {module, *given}


class _Arena:
    """The blocks that a step takes and gives back, as of `arena.Arena`, until their number stays.

    `total`: bytes of all blocks. `full_gradients`, `outputs`: the most bytes at one time of gradients
    before, and of temporaries after their reduction.
    """

    def __init__(self, units: list[_PlannedUnit], *, prefetches: bool, keeps: bool):
        self._free: list[int] = []
        self._live: dict[_PlannedUnit, list[int]] = {}
        self.total = self.full_gradients = 0
        self.outputs = max((group.output for unit in units for group in unit.groups), default=0)
        self._prefetches, self._keeps, self._root = prefetches, keeps, units[0]
        self._order = units
        for _ in range(3):
            self._grads = 0
            self._late: list[_PlannedUnit] = []  # whose inputs want no gradients: reduced at the backward's end
            self._forward(units[0])
            self._backward(units[0], is_first=True)
            for unit in self._late:
                self._finish(unit)

    def _take(self, nbytes: int) -> int:
        fitting = [block for block in self._free if nbytes <= block]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.total += nbytes
        return nbytes

    def _gather(self, unit: _PlannedUnit) -> None:
        if unit not in self._live:
            self._live[unit] = [self._take(group.gathered) for group in unit.groups if group.gathered]

    def _reshard(self, unit: _PlannedUnit) -> None:
        self._free += self._live.pop(unit, [])

    def _forward(self, unit: _PlannedUnit) -> None:
        self._gather(unit)
        for each in unit.inside:
            self._forward(each)
        stays = unit.reshards is False or (unit.reshards is None and unit is self._root) or unit is self._order[-1]
        if not stays:
            self._reshard(unit)

    def _backward(self, unit: _PlannedUnit, *, is_first: bool) -> None:
        self._gather(unit)
        at = self._order.index(unit)
        if self._prefetches and at > 0 and not unit.inside:
            self._gather(self._order[at - 1])
        self._grads += unit.full_grads
        for number, each in reversed(list(enumerate(unit.inside))):
            self._backward(each, is_first=is_first and number == 0)
        self.full_gradients = max(self.full_gradients, self._grads)
        if is_first:
            self._late.append(unit)
        else:
            self._finish(unit)

    def _finish(self, unit: _PlannedUnit) -> None:
        if not self._keeps:
            self._reshard(unit)
        for group in unit.groups:
            if group.trains:
                self._free.append(self._take(group.packed))
        self._grads -= unit.full_grads
