"""Sharded units' adapter of the gradient pipeline of a HookState, and the all-gather's format.

A backward begins with the first reduction of any of the state's units, and ends when the scheduler
ends it; then the pipeline's stages run.
"""

from __future__ import annotations

import functools
import time
import weakref

import torch

from ..arrays import kind_of
from ..compression import (
    Bucket,
    NoCompression,
    Scaling,
    add_grad_stats,
    has_fused_stats,
    measure_grads,
    plan_reduction,
    ring_bytes,
)
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.grad_norm import norm_over_ranks
from ..gradients.options import parse_streams
from ..gradients.state import HookState
from ..rendezvous.process_groups import get_communicator
from .managed_params import named_params
from .optimizer_in_backward import UnitStep
from .quantized_gather import QuantizedAllGather
from .reduction import as_real, start_compressed, start_reduction
from .unit_registry import living

__all__ = ["ShardedGradReducer", "get_reducer"]


def get_reducer(state: HookState | None, world) -> ShardedGradReducer | None:
    """Return a state's reducer for the units of a communicator. It is made at the first unit, and
    checked at each.

    Raises `InvalidArgument` for options that are not supported here, with the reason;
    `InvalidUsage` for a state of other ranks.
    """
    if state is None:
        return None
    if not isinstance(state, HookState):
        raise InvalidArgument(
            f"hook_state must be a collectives.HookState or None, not {kind_of(state)}", op="fully_shard"
        )
    if state.units is None:
        _check(state)
        state.units = ShardedGradReducer(state, world)
    if state.units.comm is not world:
        raise InvalidUsage(
            "this HookState serves units over another communicator: a backward is a whole, give these a state of their "
            "own",
            op="fully_shard", rank=world.rank,
        )  # fmt: skip
    comm = state.comm
    if comm is None and state.process_group is not None:
        comm = get_communicator(state.process_group, world.device)
    if comm is not None and comm is not world:
        raise InvalidUsage(
            f"the HookState names its ranks ({comm!r:.80}), and this module is sharded over others ({world!r:.80}): "
            "leave comm and process_group out of one of them",
            op="fully_shard", rank=world.rank,
        )  # fmt: skip
    return state.units


def _check(state: HookState) -> None:
    wrong = [
        (state.streams > 1 and state.streams != parse_streams(None),
         "streams: the ranks agree on the order of a module's collectives, which are all over one communicator"),
        (not state.zero_copy, "zero_copy=False: a unit's buffers are the engine's own memory, and always shared"),
        (state.deterministic and state.max_norm is not None,
         "deterministic with max_norm: a norm is added up from the ranks' pieces, and depends on where these begin"),
    ]  # fmt: skip
    for bad, reason in wrong:
        if bad:
            raise InvalidArgument(f"fully_shard's HookState can't have {reason}", op="fully_shard")
    if state.optimizer is not None:
        raise InvalidUsage(
            "this HookState has an optimizer, made before the module is sharded: make it from the sharded module's "
            "parameters(), then set state.optimizer",
            op="fully_shard",
        )


class ShardedGradReducer:
    """Reduces the gradients of one communicator's units by a `HookState`'s pipeline, and gives it
    what they have reduced (`ReducedGradients`); it is `state.units`.
    """

    whole = False

    def __init__(self, state: HookState, comm):
        self.state = state
        self.pipeline = state.pipeline
        self.comm = comm
        self.wire = state.compressor
        self.quantized_gather = None if state.gather is None else QuantizedAllGather(state.gather, state.block)
        self._units: list[weakref.ref] = []
        self._numbers = weakref.WeakKeyDictionary()  # group -> its number in the state, the same on all ranks
        self._next = 0
        self._unnamed: list[weakref.ref] = []  # units whose parameters' names are not registered
        self.reset()

    def reset(self) -> None:
        """Drop the backward in progress."""
        self._begun = False
        self._reduced: dict[int, tuple] = {}  # number of a group -> (unit, group)
        self._grad_stats: dict[int, torch.Tensor] = {}
        self._accumulated: set[int] = set()  # groups whose shards had gradients before this backward
        self._stepped: set = set()

    # ---- Units.

    @property
    def align(self) -> int:
        """Number of elements of which a rank's shard is a multiple."""
        return self.wire.align

    def describe(self) -> str:
        """Return a description of the options, which must be the same on all ranks."""
        return ", ".join(f"{name}={value!r:.60}" for name, value in self.pipeline.describe_options().items())

    def add(self, unit) -> None:
        """Add a unit whose gradients to reduce. A local call, in the same order on all ranks."""
        for group in unit.gradients.trainable:
            if not (group.dtype.is_floating_point or group.dtype.is_complex):
                raise InvalidArgument(f"gradients of {group.dtype} have no wire", op="fully_shard")
            self._numbers[group] = self._next
            self._next += 1
        self._units.append(weakref.ref(unit))
        if not self._unnamed:
            self.state.parameter_names.add_lazily(self._register_names)
        self._unnamed.append(weakref.ref(unit))
        unit.reducer = self

    def _register_names(self) -> None:
        """Register the full parameters' names, by which residuals are saved: those of the outermost
        module.
        """
        named = {}  # unit -> its parameters by their names
        for reference in reversed(self._unnamed):
            unit = reference()
            module = None if unit is None or unit.module is None else unit.module()
            if unit is None or unit in named:
                continue
            named[unit] = {param.name: param for param in unit.params}
            inside = {}
            for name, inner in () if module is None else module.named_modules():
                other = getattr(inner, "_unit", None)
                if other is not None and other is not unit and other not in named:
                    for param, names in named_params(other, inner):
                        if param not in inside.setdefault(other, {}).values():
                            inside[other][f"{name}.{names[0]}"] = param
            named |= inside
        self._unnamed = []
        pairs = [pair for params in named.values() for pair in params.items()]
        self.state.parameter_names.add((name, param.full) for name, param in pairs)

    # ---- The optimizer.

    def make_step(self, optimizer) -> UnitStep:
        """Return an object that steps an optimizer inside the backward."""
        return UnitStep(optimizer, lambda: living(self._units))

    @property
    def steps(self) -> bool:
        """Whether the optimizer is stepped inside the backward."""
        return self.pipeline.optimizer_step is not None

    def check_use(self, unit) -> None:
        """Raise `InvalidUsage` where a backward needs parameters of a unit that it has stepped."""
        if unit in self._stepped:
            raise InvalidUsage(
                f"{unit!r} is needed in a backward that has stepped its parameters already: its gradients came in "
                "several parts, as with activation checkpointing's use_reentrant=True, or a parameter is used "
                "detached, too; step this model's optimizer behind the backward, without HookState's optimizer",
                op="fully_shard",
            )

    # ---- A backward.

    def start_reduce(self, unit, *, async_op: bool) -> list:
        """Begin to reduce a unit's gradients, as `Unit.start_reduce` does. A collective of all
        ranks.
        """
        begun = time.perf_counter_ns()
        if unit.custom_reduce_scatter is not None or unit.custom_all_reduce is not None:
            raise InvalidUsage(
                "set_custom_reduce_scatter and set_custom_all_reduce say how gradients are reduced, and so does "
                "hook_state: use one of them",
                op="fully_shard",
            )
        self.check_use(unit)
        if not self._begun:
            self._begin()
        ends = [self._reduce(unit, group, async_op) for group in unit.gradients.trainable]
        self.pipeline.totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        return [*ends, functools.partial(self._step_when_complete, unit)]

    def _begin(self) -> None:
        self.reset()
        self.pipeline.begin_backward(self.comm, streams=1)
        if self.steps and self.comm._on_host:
            self.pipeline.compare_hyperparameters()
        self._begun = True

    def _reduce(self, unit, group, async_op: bool):
        """Begin to reduce a group's gradients; return the function that waits and stores the
        result.
        """
        ranks, number, pipeline = unit.ranks, self._numbers[group], self.pipeline
        # On a GPU one kernel at the end of the backward takes the statistics of all shards.
        counts = pipeline.needs_stats and unit.device.type != "cuda"
        grad_stats = torch.zeros(2, dtype=torch.float64, device=unit.device) if counts else None
        if any(param.shard.grad is not None for param in group.params):
            self._accumulated.add(number)
        self._reduced[number] = (unit, group)
        self._grad_stats[number] = grad_stats
        flat = group.gradients.pack()
        whole = ranks.shard is None or ranks.replicas is not None  # then all ranks get all of it
        comm = ranks.world if whole else ranks.shard
        scaling = pipeline.get_scaling(comm.size)
        if unit.gradient_divide_factor is not None:
            scaling = Scaling(prescale=1.0 / unit.gradient_divide_factor)
        halves = 2 if whole else 1
        as_fp32 = halves * (comm.size - 1) * flat.numel() * 4 // comm.size
        send = as_real(flat)
        if type(self.wire) is NoCompression:
            sent = ring_bytes(send, comm.size, halves)
            end = self._reduce_uncompressed(unit, group, flat, comm, whole, scaling, grad_stats, async_op)
        else:
            offsets = [param.offset << flat.is_complex() for param in group.params]
            bucket = Bucket(send, [param.full for param in group.params], offsets, number, self.state.parameter_names)
            reduce = functools.partial(self.wire.reduce, comm, bucket, scaling, grad_stats=grad_stats)
            if not whole:
                shard_numel = send.numel() // ranks.size
                reduce = functools.partial(
                    self.wire.reduce_scatter, comm, bucket, scaling, shard_numel, grad_stats=grad_stats
                )
            sent, end = start_compressed(unit, group, flat, reduce, async_op)
        pipeline.count(1, sent, as_fp32)
        return end

    def _reduce_uncompressed(self, unit, group, flat, comm, whole, scaling, grad_stats, async_op):
        """Reduce in the gradients' own dtype, into the memory of the shards' gradients, overlapped
        where possible.
        """
        algorithm = self.wire.choose_algorithm(comm)
        plan = plan_reduction(comm, scaling, as_real(flat).dtype, algorithm)
        counted = grad_stats is not None and has_fused_stats(comm, algorithm)

        def finish(reduced):
            if counted:
                grad_stats[0] *= plan.statistics_factor
            elif grad_stats is not None:
                own = as_real(reduced)
                add_grad_stats(own.tensor_split(comm.size)[comm.rank] if whole else own, grad_stats)

        return start_reduction(
            unit, group, flat, plan, whole=whole, async_op=async_op, finish=finish,
            **({"share": grad_stats} if counted else {"algorithm": algorithm}),
        )  # fmt: skip

    def _step_when_complete(self, unit) -> None:
        """Step a unit whose gradients are all there, unless the step is deferred."""
        if not self.pipeline.steps_at_once or len(unit.gradients.trainable) < len(unit.groups):
            return  # frozen parameters may still be needed
        if any(group.offloads for group in unit.groups):
            return  # the gradients are being copied to the host until the backward's end
        if all(param.has_unreduced_grad for param in unit.params):
            self.pipeline.optimizer_step.update(unit)
            self._stepped.add(unit)

    def end(self) -> None:
        """End a backward: what needs all its gradients. A collective, which the ranks make in the
        same order.
        """
        if not self._begun:
            return
        begun = time.perf_counter_ns()
        self.pipeline.end_backward(self)
        totals = self.pipeline.totals
        totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        if self.quantized_gather is not None:
            totals["bytes_gathered"] = self.quantized_gather.sent
        self.reset()

    def join_end(self) -> None:
        """Take part in the collectives of `end`, for the others, and change nothing."""
        if self._begun:
            self.pipeline.join_end_backward(self)

    # ---- What the stages read and change: `ReducedGradients`.

    def _gradients(self, *, here: bool = False) -> list[torch.Tensor]:
        """Return the shards' gradients that this backward has reduced; `here`: those that count on
        this rank.
        """
        return [
            param.shard.grad
            for unit, group in self._reduced.values()
            if not here or unit.ranks.is_first_replica
            for param in group.params
            if param.shard.grad is not None
        ]

    def sum_stats(self) -> torch.Tensor:
        """Return this rank's statistics, of all groups."""
        total = torch.zeros(2, dtype=torch.float64, device=self.comm.device)
        to_measure = []
        for number in sorted(self._reduced):
            unit, group = self._reduced[number]
            if number not in self._accumulated and self._grad_stats[number] is not None:
                total += self._grad_stats[number].to(total.device)
            else:  # the statistics are of the sum
                to_measure += group.gradients.unique_grads(unit.ranks)
        for device in dict.fromkeys(grad.device for grad in to_measure):
            grads = [as_real(grad) for grad in to_measure if grad.device == device]
            total += measure_grads(grads, device).to(total.device)
        return total

    def norm(self, p: float) -> torch.Tensor:
        """Return the p-norm of all shards' gradients."""
        return norm_over_ranks(self.comm, self._gradients(here=True), p)

    def multiply(self, factor) -> None:
        """Multiply the shards' gradients, on the devices where they are."""
        kinds: dict[torch.device, list] = {}
        for grad in self._gradients():
            kinds.setdefault(grad.device, []).append(grad)
        for device, grads in kinds.items():
            torch._foreach_mul_(grads, factor if isinstance(factor, float) else factor.to(device))

    def _units_reduced(self) -> list:
        return list(dict.fromkeys(unit for unit, _ in self._reduced.values()))

    def step(self, *, clip, found) -> None:
        """Step the optimizer for the units that the backward has not stepped."""
        for unit in self._units_reduced():
            if unit not in self._stepped:
                self.pipeline.optimizer_step.update(unit, clip=clip, found=found)

    def defer_step(self, *, norm, max_norm, found) -> None:
        """Leave the units' updates to ``optimizer.step()``."""
        for unit in self._units_reduced():
            self.pipeline.optimizer_step.defer(unit, norm, max_norm, found)
