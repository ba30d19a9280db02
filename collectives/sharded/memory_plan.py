"""Memory plan: the bytes that a rank needs for a step of a sharded module, predicted before
anything is started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument
from .dry_run import CUDA_BLOCK, DryRun, NoOpCommunicator, Skeleton
from .fsdp1.api import ShardingStrategy
from .managed_params import managed_parameters
from .mesh import Ranks
from .module import ShardedModule
from .module_group import ModuleGroup, members_of, parse_modules
from .optimizer_cost import OptimizerCosts
from .policies import MixedPrecisionPolicy
from .unit import Unit
from .wrap import units_of

__all__ = ["MemoryPlan", "memory_plan"]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_STEPS = 4  # until the pool's blocks have their final sizes


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, the one with the fullest shard; ``print`` shows them.

    Always there: `parameters`, `gradients` (of the shard, when all are there), `optimizer` (its
    state and master weights) and `buffers` (the module's). At the peak: `gathered` (parameters of
    unsharded units), `full_gradients`, `flat` (gradients that are being reduced), `idle` (free
    blocks of the host's pool), `work` (temporaries of the optimizer) and `activations`, which the
    caller gave. `peak` is the most at one time, with the gradients' shards that are there then;
    `peak_in`: forward, backward or step; `peak_at`: the unit; `peaks`: of each of the three.
    `replicas`: how many ranks have the same shard of the gradients and the optimizer's state.
    `on_host`: what lies on the host beside a GPU, with offloading; none of the others counts it.
    `units`: their names, elements, and bytes when gathered, outermost first.
    """

    ranks: int
    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    full_gradients: int
    flat: int
    idle: int
    work: int
    activations: int
    replicas: int
    on_host: int
    peak: int
    peak_in: str
    peak_at: str
    peaks: dict[str, int]
    units: list[tuple[str, int, int]]

    def __str__(self):
        where = f"in the {self.peak_in}" + (f" of {self.peak_at}" if self.peak_at else "")
        rows = [
            ("parameters", self.parameters, "this rank's shards" if self.ranks > self.replicas else "all of them"),
            ("gradients", self.gradients, "of the shards"),
            ("optimizer", self.optimizer, "its state"),
            ("buffers", self.buffers, "the module's"),
            ("gathered", self.gathered, "live units at the peak"),
            ("full gradients", self.full_gradients, "at the peak"),
            ("flat buffers", self.flat, "gradients on their way at the peak"),
            ("idle", self.idle, "free in the pool at the peak"),
            ("work", self.work, "the optimizer's, at the peak"),
            ("activations", self.activations, "as given"),
            ("on the host", self.on_host, "beside the GPU"),
        ]
        several = f", each shard on {self.replicas} of them" if self.replicas > 1 else ""
        lines = [f"{self.strategy} on {self.ranks} ranks{several}; {len(self.units)} units"]
        lines += [f"{name:<15}{_format_bytes(count):>12}  {what}" for name, count, what in rows if count]
        lines += [f"{'peak':<15}{_format_bytes(self.peak):>12}  {where}"]
        lines += [f"  {phase:<13}{_format_bytes(count):>12}" for phase, count in self.peaks.items()]
        return "\n".join(lines)


def _format_bytes(nbytes: int) -> str:
    return f"{nbytes:,} B" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):,.2f} MiB"


def memory_plan(
    module: nn.Module,
    ranks: int,
    optimizer="adamw",
    strategy: ShardingStrategy | str | None = None,
    *,
    units=None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    replicas: int = 1,
    accumulate: bool = False,
    master_weights: bool | None = None,
    offload: bool = False,
    activations: int = 0,
    overlap: bool | None = None,
    device: torch.device | str | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> MemoryPlan:
    """Predict the bytes of a rank that trains this module on `ranks` ranks; starts nothing.

    `module`: as it is, on the meta device, or sharded already: then units, precision and what else
    isn't given are its own. `optimizer`: an instance, a class, a function of parameters, "sgd",
    "sgd+momentum", "adam", "adamw" (those of `collectives.optim`), or None. `strategy`: a
    `ShardingStrategy` or its name; None: FULL_SHARD. `units`: a wrap policy, or the submodules that
    are units besides the module itself, with lists of those that are one unit together.
    `reshard_after_forward`: as in `fully_shard`; None: as the strategy says. `replicas`: with a
    hybrid strategy, how many ranks have the same shard. `accumulate`: several backwards a step,
    with the full gradients kept until the last. `master_weights`: as in the optimizers of
    `collectives.optim`. `offload`: shards and optimizer on the host. `activations`: their bytes,
    counted through forward and backward. `overlap`: whether collectives overlap with the
    computation; None: always on a GPU, on the host as COLLECTIVES_OVERLAP says or where the ranks
    leave cores to spare. `device`: None: the module's. `ignored_params`: left out.

    Steps are counted from the third on, with gradients set to None before the forward. The plan
    assumes that inner modules run in the order in which they are registered, once each, and that
    autograd adds nothing of its own to gradients. Not counted: activations, the memory of the
    library and of the engine, temporaries inside operations. Raises `InvalidArgument`.
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"module must be a torch.nn.Module, not {kind_of(module)}", op="memory_plan")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidArgument(f"ranks must be an int from 1, not {ranks!r:.40}", op="memory_plan")
    sharded = isinstance(module, ShardedModule)
    if sharded and units is not None:
        raise InvalidArgument("the module is sharded: its units are what they are; leave units out", op="memory_plan")
    sharding = _ShardingPlan(
        module, ranks, strategy, mp_policy, reshard_after_forward, replicas, offload, device, sharded
    )
    dry_run, planned, sources = sharding.make_dry_run(module, units, set(map(id, ignored_params)), overlap)
    gpu = dry_run.on_gpu
    costs = OptimizerCosts(optimizer, master_weights=master_weights, gpu=gpu)
    groups = [group for unit in planned for group in unit.groups]
    trainable = [group for group in groups if group.requires_grad]
    params = [(sources[param], param.shard.numel()) for group in trainable for param in group.params]
    state, host_bytes, work = _optimizer_bytes(costs, params, gpu)
    shards = _sum_blocks(gpu, ((g.dtype, g.unsharded_numel if g.persistent else g.shard_numel) for g in groups))
    own = _sum_blocks(gpu, ((group.dtype, group.shard_numel) for group in trainable))
    buffers = _sum_blocks(gpu, ((each.dtype, each.numel()) for each in module.buffers()))
    buffers += _sum_blocks(gpu, ((group.gather_dtype, 1) for group in groups))  # the placeholders
    on_host = host_bytes if gpu else 0
    kept = {"parameters": shards, "optimizer": state + (0 if gpu else host_bytes), "buffers": buffers}
    gradients = own
    if sharding.offloads:
        on_host += shards + own + state
        kept["parameters"] = kept["optimizer"] = gradients = work = 0
    dry_run.run(_STEPS, work=work, accumulate=accumulate, kept=sum(kept.values()), activations=activations)
    peaks = dry_run.counter.peaks
    phase = max(peaks, key=lambda each: peaks[each][0])
    peak, where, what = peaks[phase]
    return MemoryPlan(
        ranks=ranks, strategy=sharding.named, parameters=kept["parameters"], gradients=gradients,
        optimizer=kept["optimizer"], buffers=buffers, gathered=what["gathered"], full_gradients=what["full_gradients"],
        flat=what["flat"], idle=what["idle"], work=what["work"], activations=what["activations"],
        replicas=ranks // sharding.shards, on_host=on_host, peak=peak, peak_in=phase, peak_at=where,
        peaks={each: found[0] for each, found in peaks.items()},
        units=[(unit.name, sum(param.count for param in unit.params), _gathered_bytes(unit)) for unit in planned],
    )  # fmt: skip


def _gathered_bytes(unit: Unit) -> int:
    return sum(group.unsharded_numel * group.gather_dtype.itemsize for group in unit.groups)


def _sum_blocks(gpu: bool, sizes: Iterable[tuple[torch.dtype, int]]) -> int:
    """Return the bytes of tensors of these dtypes and counts, as the device allocates them."""
    block = CUDA_BLOCK if gpu else 1
    return sum(-(-dtype.itemsize * count // block) * block for dtype, count in sizes)


def _optimizer_bytes(costs: OptimizerCosts, params: list[tuple[nn.Parameter, int]], gpu: bool) -> tuple[int, int, int]:
    """Return the bytes of the optimizer's state, those on the host in any case, and those of its
    temporaries.

    `params`: parameters, with the elements that this rank has of each.
    """
    known = costs.has(param for param, _ in params)
    state = host_bytes = of_all = one = last = 0
    for param, count in params:
        cost = costs.of(param, known=known)
        state += _sum_blocks(gpu, ((torch.uint8, each * count) for each in cost.states))
        host_bytes += cost.host_bytes
        of_all += cost.of_all * count
        one = max(one, last + cost.of_each * count)
        last = cost.of_last * count
    return state, host_bytes, int(of_all + one)


class _ShardingPlan:
    """How a module is to be sharded, from the arguments and from what is sharded already."""

    def __init__(self, module, ranks, strategy, mp_policy, reshard, replicas, offload, device, sharded):
        if isinstance(strategy, str) or (strategy is not None and not isinstance(strategy, ShardingStrategy)):
            name = getattr(strategy, "name", strategy)
            if name not in ShardingStrategy.__members__:
                names = ", ".join(ShardingStrategy.__members__)
                raise InvalidArgument(f"strategy must be one of {names}, not {strategy!r:.60}", op="memory_plan")
            strategy = ShardingStrategy[name]
        first = next((each._unit for each in module.modules() if isinstance(each, ShardedModule)), None)
        self.as_is = sharded and strategy is None
        if self.as_is and first.ranks.shard is None and first.ranks.world.size > 1:
            strategy = ShardingStrategy.NO_SHARD
        if self.as_is and first.ranks.replicas is not None:
            strategy, replicas = ShardingStrategy.HYBRID_SHARD, first.ranks.replicas.size
        strategy = strategy or ShardingStrategy.FULL_SHARD
        if replicas != 1 and (strategy not in _HYBRID or ranks % replicas):
            raise InvalidArgument(
                f"replicas={replicas} is for HYBRID_SHARD and divides the ranks, of which there are {ranks}",
                op="memory_plan",
            )
        self.named = strategy.name
        self.ranks, self.replicas = ranks, replicas
        self.shards = 1 if strategy is ShardingStrategy.NO_SHARD else ranks // replicas
        self.persistent = strategy is ShardingStrategy.SHARD_OPTIMIZER
        later = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
        self.reshard = strategy not in later if reshard is None else reshard
        self.reshard_given = reshard is not None or not self.as_is
        if not isinstance(self.reshard, bool) and (self.reshard < 2 or self.shards % self.reshard):
            raise InvalidArgument(f"reshard_after_forward must divide {self.shards} ranks", op="memory_plan")
        self.policy = mp_policy
        if device is not None:
            self.device = torch.device(device)
        elif first is not None:
            self.device = first.device
        else:
            found = {param.device.type for param in module.parameters()} - {"meta"}
            self.device = torch.device(found.pop() if found else "cuda" if torch.cuda.is_available() else "cpu")
        self.offloads = self.device.type != "cpu" and (
            offload or (first is not None and any(group.store.type == "cpu" for group in first.groups))
        )

    def make_dry_run(self, module: nn.Module, given, ignored: set[int], overlap: bool | None):
        """Return the dry run of the module's units; the units, outermost first; and the module's own
        parameters, by those of the units.
        """
        chosen = _chosen_units(module, given)
        members = {each: _parameters_of(each, chosen, ignored) for each in _group(module, chosen, given)}
        skeletons = _skeletons_of(module, members)
        if overlap is None and isinstance(module, ShardedModule) and module._scheduler.comm.size == self.ranks:
            overlap = module._scheduler.should_overlap
        dry_run = DryRun(skeletons[module], self._make_ranks(), overlap=overlap)
        units, sources = [], {}  # sources: by the first place of each parameter in the skeletons
        for each, found in reversed(members.items()):
            parameters = []
            for names, places, source, _ in found:
                places = [(skeletons[holder], attribute) for holder, attribute in places]
                holder, attribute = places[0]
                sources[holder, attribute] = source
                parameters.append((names, places, holder._parameters[attribute]))
            its = ModuleGroup(map(skeletons.get, each)) if isinstance(each, ModuleGroup) else skeletons[each]
            units.append(self._shard(dry_run, each, its, parameters))
        return dry_run, units[::-1], {param: sources[param.places[0]] for unit in units for param in unit.params}

    def _make_ranks(self) -> Ranks:
        def make(size: int) -> NoOpCommunicator:
            return NoOpCommunicator(size, on_host=self.device.type == "cpu")

        return Ranks(
            make(self.shards) if self.shards > 1 else None, make(self.replicas) if self.replicas > 1 else None,
            make(self.ranks),
        )  # fmt: skip

    def _shard(self, dry_run: DryRun, module: nn.Module, skeleton: Skeleton | ModuleGroup, parameters: list) -> Unit:
        reshards, policy, persistent = self.reshard, self.policy, self.persistent
        before = _unit_of(module)
        if before is not None:
            policy = before.mp_policy if policy is None else policy
            persistent = before.persistent if self.as_is else persistent
            if not self.reshard_given:
                reshards = before.reshard_after_forward
                if before.post_forward_comm is not None:
                    reshards = before.post_forward_comm.size
        unit = dry_run.shard(
            skeleton, parameters, mp_policy=policy, offloads=self.offloads, persistent=persistent,
            reshard_after_forward=reshards,
        )  # fmt: skip
        if before is not None:
            unit.prefetch_in_forward = before.prefetch_in_forward
            unit.prefetch_in_backward = before.prefetch_in_backward
            unit.prefetch_post_backward = before.prefetch_post_backward
        return unit


def _chosen_units(module: nn.Module, given) -> list[nn.Module]:
    """Return the modules that are units, outermost first, the module itself among them."""
    if isinstance(module, ShardedModule) or given is None:
        chosen = [each for each in module.modules() if isinstance(each, ShardedModule)]
    elif isinstance(given, list | tuple | set | frozenset):
        chosen = [each for one in given for each in (one if isinstance(one, list | tuple) else [one])]
        if not set(chosen) <= set(module.modules()):
            raise InvalidArgument("units must be submodules of the module, or a wrap policy", op="memory_plan")
    else:
        chosen = [each for each, _ in units_of(module, given)]
    chosen = {*chosen, module}
    return [each for each in module.modules() if each in chosen]


def _group(module: nn.Module, chosen: list[nn.Module], given) -> list[nn.Module]:
    """Return the modules that are units, those that are a unit together as a `ModuleGroup` in the
    place of the first one.
    """
    groups = {}
    for one in given if isinstance(given, list | tuple) else ():
        if isinstance(one, list | tuple):
            groups |= dict.fromkeys(one, parse_modules(one))
    for each in chosen:
        if isinstance(each, ShardedModule) and each._unit.module_group is not None:
            groups[each] = each._unit.module_group
    return list(dict.fromkeys(groups.get(each, each) for each in chosen))


def _unit_of(module: nn.Module) -> Unit | None:
    if isinstance(module, ModuleGroup):
        module = module[0]
    return module._unit if isinstance(module, ShardedModule) else None


def _parameters_of(module: nn.Module, chosen: list[nn.Module], ignored: set[int]) -> list[tuple]:
    """Return (names, places, parameter or shard, shape) of a unit's parameters."""
    unit = _unit_of(module)
    if unit is not None:
        return [(param.names, param.places, param.shard, param.shape) for param in unit.params]
    own = list(module) if isinstance(module, ModuleGroup) else []
    found = managed_parameters(module, stop=lambda each: each in chosen and each not in own)
    return [(names, places, param, param.shape) for names, places, param in found if id(param) not in ignored]


def _skeletons_of(module: nn.Module, members: dict[nn.Module, list[tuple]]) -> dict[nn.Module, Skeleton]:
    """Return the skeletons of a module and of those inside, with parameters on the meta device.

    A module that is there twice is in its first place only.
    """
    skeletons: dict[nn.Module, Skeleton] = {}
    params = {}
    named = {part for each in members for part in members_of(each)}
    for found in members.values():
        for _, places, source, shape in found:
            data = torch.empty(shape, dtype=source.dtype, device="meta")
            params |= dict.fromkeys(places, nn.Parameter(data, requires_grad=source.requires_grad))

    def visit(each: nn.Module, name: str, unit_name: str) -> Skeleton:
        if each in named:
            unit_name = name or type(each).__name__
        skeleton = skeletons[each] = Skeleton(unit_name)
        for attribute in each._parameters:
            if (each, attribute) in params:
                skeleton.register_parameter(attribute, params[each, attribute])
        for attribute, child in each._modules.items():
            if child is not None and child not in skeletons:
                path = f"{name}.{attribute}" if name else attribute
                skeleton.add_module(attribute, visit(child, path, unit_name))
        return skeleton

    visit(module, "", "")
    return skeletons
