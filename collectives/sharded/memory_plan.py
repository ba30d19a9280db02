"""Memory plan: the bytes that a rank needs for a step of a sharded module, predicted before
anything is started.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import torch
from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument
from .fsdp1.api import ShardingStrategy
from .managed_params import managed_parameters
from .module import ShardedModule
from .optimizer_cost import OptimizerCosts
from .policies import MixedPrecisionPolicy
from .step_simulation import GroupPlan, StepSimulation, UnitPlan
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
    are units besides the module itself. `reshard_after_forward`: as in `fully_shard`; None: as the
    strategy says. `replicas`: with a hybrid strategy, how many ranks have the same shard.
    `accumulate`: several backwards a step, with the full gradients kept until the last.
    `master_weights`: as in the optimizers of `collectives.optim`. `offload`: shards and optimizer
    on the host. `activations`: their bytes, counted through forward and backward. `overlap`:
    whether collectives overlap with the computation; None: always on a GPU, on the host as
    COLLECTIVES_OVERLAP says or where the ranks leave cores to spare. `device`: None: the module's.
    `ignored_params`: left out.

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
    root, flats, everything = sharding.units(module, units, set(map(id, ignored_params)))
    gpu = sharding.device.type == "cuda"
    costs = OptimizerCosts(optimizer, master_weights=master_weights, gpu=gpu)
    params = [param for flat in flats if flat.trainable for param in flat.params]
    state, host_bytes, work = _optimizer(costs, [flat for flat in flats if flat.trainable], params, gpu)
    shards = sum(
        _block_bytes(flat.dtype, flat.unsharded_numel if flat.persistent else flat.shard_numel, gpu) for flat in flats
    )
    own = sum(_block_bytes(flat.dtype, flat.shard_numel, gpu) for flat in flats if flat.trainable)
    stubs = sum(_block_bytes(flat.gather_dtype, 1, gpu) for flat in flats)
    buffers = sum(_block_bytes(each.dtype, each.numel(), gpu) for each in module.buffers()) + stubs
    on_host = host_bytes if gpu else 0
    kept = {"parameters": shards, "optimizer": state + (0 if gpu else host_bytes), "buffers": buffers}
    gradients = own
    if sharding.offloads:
        on_host += shards + own + state
        kept.update(parameters=0, optimizer=0)
        gradients = work = 0
    overlaps = _overlaps(module, ranks, gpu, sharded) if overlap is None else bool(overlap)
    simulation = StepSimulation(root, gpu=gpu, overlaps=overlaps, kept=kept, activations=activations)
    for _ in range(_STEPS):
        simulation.step(work, accumulate=accumulate)
    phase = max(simulation.peaks, key=lambda each: simulation.peaks[each][0])
    peak, where, what = simulation.peaks[phase]
    return MemoryPlan(
        ranks=ranks, strategy=sharding.named, parameters=kept["parameters"], gradients=gradients,
        optimizer=kept["optimizer"], buffers=buffers, gathered=what["gathered"], full_gradients=what["full_gradients"],
        flat=what["flat"], idle=what["idle"], work=what["work"], activations=what["activations"],
        replicas=ranks // (1 if sharding.shards == 1 else sharding.shards), on_host=on_host, peak=peak, peak_in=phase,
        peak_at=where, peaks={each: found[0] for each, found in simulation.peaks.items()},
        units=[(unit.name, sum(sum(flat.counts) for flat in unit.flats), _gathered(unit)) for unit in everything],
    )  # fmt: skip


def _gathered(unit: UnitPlan) -> int:
    return sum(flat.unsharded_numel * flat.gather_dtype.itemsize for flat in unit.flats)


def _block_bytes(dtype: torch.dtype, count: int, gpu: bool) -> int:
    nbytes = count * dtype.itemsize
    return -(-nbytes // 512) * 512 if gpu else nbytes


def _optimizer(costs: OptimizerCosts, flats: list[GroupPlan], params, gpu: bool) -> tuple[int, int, int]:
    """Return the bytes of the optimizer's state, those on the host in any case, and those of its
    temporaries.
    """
    known = costs.has(params)
    state = host_bytes = of_all = one = last = 0
    for flat in flats:
        for param, count in zip(flat.params, flat.shard_counts(), strict=True):
            cost = costs.of(param, known=known)
            state += sum(_block_bytes(torch.uint8, each * count, gpu) for each in cost.states)
            host_bytes += cost.host_bytes
            of_all += cost.of_all * count
            one = max(one, last + cost.of_each * count)
            last = cost.of_last * count
    return state, host_bytes, int(of_all + one)


def _overlaps(module, ranks: int, gpu: bool, sharded: bool) -> bool:
    if sharded and module._scheduler.comm.size == ranks:
        return module._scheduler.should_overlap
    named = os.environ.get("COLLECTIVES_OVERLAP", "").strip()
    if gpu or named:
        return gpu or named == "1"
    return len(os.sched_getaffinity(0)) // ranks > torch.get_num_threads()


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
        self.replicas = replicas
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

    def units(self, module: nn.Module, given, ignored: set[int]) -> tuple[UnitPlan, list[GroupPlan], list[UnitPlan]]:
        """Return the root unit, all groups, and all units, outermost first."""
        names = {each: name for name, each in module.named_modules()}
        if isinstance(module, ShardedModule) or given is None:
            chosen = [each for each in module.modules() if isinstance(each, ShardedModule)]
        elif isinstance(given, list | tuple | set | frozenset):
            chosen = list(given)
            if not all(each in names for each in chosen):
                raise InvalidArgument("units must be submodules of the module, or a wrap policy", op="memory_plan")
        else:
            chosen = [each for each, _ in units_of(module, given)]
        chosen = {*chosen, module}
        found = {each: self._unit(each, names[each], chosen, ignored) for each in names if each in chosen}
        places = {place: (unit, use) for unit, holders in found.values() for place, use in holders.items()}
        seen: set[nn.Module] = set()
        flows = False

        def visit(each: nn.Module, unit: UnitPlan) -> None:
            nonlocal flows
            seen.add(each)
            for attribute in each._parameters:
                if (id(each), attribute) in places:
                    owner, use = places[id(each), attribute]
                    owner.uses.append(use)
                    flows |= use[0].trainable
            for child in each._modules.values():
                if child is not None and child not in seen:
                    inner = found[child][0] if child in found else unit
                    if inner is not unit:
                        unit.uses.append(inner)
                        inner.continues_backward = flows
                    visit(child, inner)
                    if inner is not unit:
                        inner.reaches_backward = flows

        root = found[module][0]
        root.continues_backward = False
        visit(module, root)
        root.reaches_backward = flows
        everything = [unit for unit, _ in found.values()]
        return root, [flat for unit in everything for flat in unit.flats], everything

    def _unit(self, module, name, chosen, ignored) -> tuple[UnitPlan, dict]:
        plan = UnitPlan(name or type(module).__name__, reshards=bool(self.reshard), replicas=self.replicas)
        plan.post_forward_size = self.reshard if not isinstance(self.reshard, bool) else 0
        policy, persistent = self.policy, self.persistent
        if isinstance(module, ShardedModule):
            unit = module._unit
            found = [(param.names, param.places, param.shard, param.count) for param in unit.params]
            policy = unit.mp_policy if policy is None else policy
            if self.as_is:
                persistent = unit.persistent
            if not self.reshard_given:
                plan.reshards = unit.reshard_after_forward
                plan.post_forward_size = 0 if unit.post_forward_comm is None else unit.post_forward_comm.size
            plan.prefetch_in_forward, plan.prefetch_in_backward = unit.prefetch_in_forward, unit.prefetch_in_backward
            plan.prefetch_post_backward = unit.prefetch_post_backward
        else:
            managed = managed_parameters(module, stop=lambda each: each in chosen)
            found = [(names, places, param, param.numel()) for names, places, param in managed]
            found = [each for each in found if id(each[2]) not in ignored]
        policy = MixedPrecisionPolicy() if policy is None else policy
        kinds: dict[tuple, list] = {}
        for _, places, param, count in found:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((places, param, count))
        holders = {}
        for (dtype, trainable), members in kinds.items():
            casts = dtype.is_floating_point
            gather = policy.param_dtype if casts and policy.param_dtype is not None else dtype
            flat = GroupPlan(
                counts=[count for _, _, count in members], params=[param for _, param, _ in members], dtype=dtype,
                gather_dtype=gather, trainable=trainable, persistent=persistent, ranks=self.shards,
                offloaded=self.offloads,
                reduce_dtype=policy.reduce_dtype if casts and policy.reduce_dtype is not None else gather,
            )  # fmt: skip
            plan.flats.append(flat)
            for number, (places, _, _) in enumerate(members):
                for holder, attribute in places:
                    holders[id(holder), attribute] = (flat, number)
        return plan, holders
