"""Gradient reducer of a HookState: how units' gradients are reduced, clipped and stepped, and the
all-gather's format.

A backward begins with the first reduction of any of the state's units, and ends when the scheduler
ends it. What needs all gradients comes then: the norm, non-finite values, a GradScaler. The
statistics are those of DDP's hook, in the state itself.
"""

from __future__ import annotations

import functools
import math
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
    reduce_op,
    remaining_scale,
    ring_bytes,
)
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.options import parse_streams
from ..gradients.state import HookState
from ..gradients.streams import get_comm_streams
from ..rendezvous.process_groups import get_communicator
from .clip import global_norm, owns_shard
from .optimizer_in_backward import OptimizerInBackward
from .quantized_gather import QuantizedAllGather
from .streams import current_stream, release

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
        (state.local_steps is not None,
         "local_steps: with post-local SGD the ranks' parameters differ, and here each parameter is there once"),
        (state.hierarchical is True,
         "hierarchical=True: each rank gets the sum of its own piece, which a flat reduce-scatter gives it"),
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
    """Reduces the gradients of one communicator's units as a `HookState` says; it is `state.units`."""

    def __init__(self, state: HookState, comm):
        self.state = state
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
        self._bytes_sent = self._bytes_as_fp32 = 0
        self._scaler = None

    # ---- Units.

    @property
    def align(self) -> int:
        """Number of elements of which a rank's shard is a multiple."""
        return self.wire.align

    def describe(self) -> str:
        """Return a description of the options, which must be the same on all ranks."""
        return ", ".join(f"{name}={value!r:.60}" for name, value in self.state.describe_options().items())

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

    @property
    def units(self) -> list:
        """The units that are alive."""
        return [unit for unit in (reference() for reference in self._units) if unit is not None]

    def _register_names(self) -> None:
        """Register the full parameters' names, by which residuals are saved: those of the outermost
        module.
        """
        named = {}
        for reference in reversed(self._unnamed):
            unit = reference()
            module = None if unit is None or unit.module is None else unit.module()
            if unit is None or unit in named:
                continue
            named[unit] = ""
            for name, inner in () if module is None else module.named_modules():
                other = getattr(inner, "_unit", None)
                if other is not None and other is not unit and other not in named:
                    named[other] = f"{name}."
        self._unnamed = []
        self.state.parameter_names.add(
            (prefix + param.name, param.full) for unit, prefix in named.items() for param in unit.params
        )

    # ---- The optimizer.

    def stepping(self, optimizer) -> OptimizerInBackward:
        """Return an object that steps an optimizer inside the backward."""
        return OptimizerInBackward(optimizer, lambda: self.units)

    @property
    def _step(self) -> OptimizerInBackward | None:
        return self.state.reducer.sharded_step

    @property
    def steps(self) -> bool:
        """Whether the optimizer is stepped inside the backward."""
        return self._step is not None

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

    def _needs_stats(self) -> bool:
        state = self.state
        return state.max_norm is not None or state.check_finite or (self.steps and self._scaler is not None)

    def _begin(self) -> None:
        state, reduction = self.state, self.state.reducer
        self.reset()
        reduction.verify_options(self.comm)
        if not reduction.comm_streams or reduction.comm_streams[0].comm is not self.comm:
            reduction.comm_streams = get_comm_streams(self.comm, 1)
        self._scaler = state.find_scaler() if state.max_norm is not None or self.steps else None
        self.wire.begin_backward()
        if self.steps:
            self._step.begin()
            if self.comm._on_host:
                reduction.compare_hyperparameters(self.comm)
        self._begun = True

    def _scaling(self, unit, size: int) -> Scaling:
        if unit.gradient_divide_factor is not None:
            return Scaling(prescale=1.0 / unit.gradient_divide_factor)
        return self.state.reducer.get_scaling(size)

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
        self.state.reducer.totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        return [*ends, functools.partial(self._step_when_complete, unit)]

    def _reduce(self, unit, group, async_op: bool):
        """Begin to reduce a group's gradients; return the function that waits and stores the
        result.
        """
        ranks, number = unit.ranks, self._numbers[group]
        grad_stats = torch.zeros(2, dtype=torch.float64, device=unit.device) if self._needs_stats() else None
        if any(param.shard.grad is not None for param in group.params):
            self._accumulated.add(number)
        self._reduced[number] = (unit, group)
        self._grad_stats[number] = grad_stats
        flat = group.gradients.pack()
        whole = ranks.shard is None or ranks.replicas is not None  # then all ranks get all of it
        comm = ranks.world if whole else ranks.shard
        scaling = self._scaling(unit, comm.size)
        self._bytes_as_fp32 += (2 if whole else 1) * (comm.size - 1) * flat.numel() * 4 // comm.size
        send = _real(flat)
        shard_numel = send.numel() // ranks.size
        own = slice(ranks.rank * group.shard_numel, (ranks.rank + 1) * group.shard_numel)
        if type(self.wire) is NoCompression:
            return self._reduce_uncompressed(comm, group, flat, own, whole, scaling, grad_stats, async_op)
        offsets = [param.offset << flat.is_complex() for param in group.params]
        bucket = Bucket(send, [param.full for param in group.params], offsets, number, self.state.parameter_names)
        if whole:
            self._bytes_sent += self.wire.reduce(comm, bucket, scaling, grad_stats=grad_stats)
        else:
            self._bytes_sent += self.wire.reduce_scatter(comm, bucket, scaling, shard_numel, grad_stats=grad_stats)
        in_place = flat is group.gradients.flat
        return functools.partial(group.gradients.set_gradients, flat if in_place else flat[own], in_place)

    def _reduce_uncompressed(self, comm, group, flat, own, whole, scaling, grad_stats, async_op):
        """Reduce in the gradients' own dtype, into the memory of the shards' gradients, overlapped
        where possible.
        """
        home = current_stream(flat.device)
        op, postscale = reduce_op(scaling, comm.size), remaining_scale(scaling, comm.size)
        algorithm = self.wire.choose_algorithm(comm)
        counted = grad_stats is not None and has_fused_stats(comm, algorithm)
        options = {"share": grad_stats} if counted else {"algorithm": algorithm}
        send = _real(flat)
        if whole:
            out, in_place = flat, flat is group.gradients.flat
            work = comm.all_reduce(send, op, async_op=async_op, **options)
        else:
            out, in_place = group.gradients.reduce_output()
            work = comm.reduce_scatter(_real(out), send, op, async_op=async_op, **options)
        self._bytes_sent += ring_bytes(send, comm.size, 2 if whole else 1)

        def end():
            if work is not None:
                work.wait()
                release(work, home, flat.device)
            if postscale != 1.0:
                out.mul_(postscale)
                if counted:
                    grad_stats[0] *= postscale * postscale
            if grad_stats is not None and not counted:
                add_grad_stats(_real(out) if not whole else _real(out).tensor_split(comm.size)[comm.rank], grad_stats)
            part = out if not whole or out.numel() == group.shard_numel else out[own]
            group.gradients.set_gradients(part, in_place)

        return end

    def _step_when_complete(self, unit) -> None:
        """Step a unit whose gradients are all there, unless the step is deferred."""
        if not self.steps or self._defers_step() or len(unit.gradients.trainable) < len(unit.groups):
            return  # frozen parameters may still be needed
        if any(group.offloads for group in unit.groups):
            return  # the gradients are being copied to the host until the backward's end
        if all(param.has_unreduced_grad for param in unit.params):
            self._step.update(unit)
            self._stepped.add(unit)

    def _defers_step(self) -> bool:
        """Whether the optimizer's step must wait for the last unit."""
        return self._needs_stats() or self._scaler is not None

    def end(self) -> None:
        """End a backward: what needs all its gradients. A collective, which the ranks make in the
        same order.
        """
        if not self._begun:
            return
        begun = time.perf_counter_ns()
        reduction, state = self.state.reducer, self.state
        reduction.norm = reduction.nonfinite = None
        reduction.bytes_on_wire = self._bytes_sent
        reduction.world_size = self.comm.size
        clip = self._clip_factor() if self._needs_stats() else None
        units = list({id(unit): unit for unit, _ in self._reduced.values()}.values())
        if self.steps and self._scaler is not None:
            self._step.defer(units, reduction.norm, state.max_norm, reduction.nonfinite)
        elif self.steps:
            found = reduction.nonfinite if state.check_finite else None
            for unit in units:
                if unit not in self._stepped:
                    self._step.update(unit, clip=clip, found=found)
        elif clip is not None and not (isinstance(clip, float) and clip == 1.0):
            kinds: dict[torch.device, list] = {}
            for grad in self._gradients():
                kinds.setdefault(grad.device, []).append(grad)
            for device, grads in kinds.items():
                torch._foreach_mul_(grads, clip if isinstance(clip, float) else clip.to(device))
        totals = reduction.totals
        totals["backwards"] += 1
        totals["buckets"] += len(self._reduced)
        totals["bytes_on_wire"] += self._bytes_sent
        totals["bytes_as_fp32"] += self._bytes_as_fp32
        totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        if self.quantized_gather is not None:
            totals["bytes_gathered"] = self.quantized_gather.sent
        self.reset()

    # ---- What needs all gradients.

    def _gradients(self, *, here: bool = False) -> list[torch.Tensor]:
        """Return the shards' gradients that this backward has reduced; `here`: those that count on
        this rank.
        """
        return [
            param.shard.grad
            for unit, group in self._reduced.values()
            if not here or owns_shard(unit)
            for param in group.params
            if param.shard.grad is not None
        ]

    def _clip_factor(self):
        """Sum the ranks' statistics; return the factor that clips, or None."""
        state, reduction, comm = self.state, self.state.reducer, self.comm
        total = torch.zeros(2, dtype=torch.float64, device=comm.device)
        for number in sorted(self._reduced):
            unit, group = self._reduced[number]
            grad_stats = self._grad_stats[number]
            if number in self._accumulated:  # the statistics are of the sum
                grad_stats = torch.zeros_like(grad_stats)
                for param in group.params if owns_shard(unit) else ():
                    if param.shard.grad is not None:
                        on_its_device = torch.zeros(2, dtype=torch.float64, device=param.shard.grad.device)
                        add_grad_stats(_real(param.shard.grad.reshape(-1)), on_its_device)
                        grad_stats += on_its_device.to(grad_stats.device)
            total += grad_stats.to(total.device)
        NoCompression().reduce(comm, Bucket(total, [], [], 0), Scaling())
        on_host = comm._on_host
        reduction.nonfinite = int(total[1]) if on_host else total[1]
        if state.norm_type == 2:
            norm = total[0].sqrt()
        else:
            norm = global_norm(comm, self._gradients(here=True), float(state.norm_type))
        reduction.norm = norm.item() if on_host else norm
        if state.max_norm is None:
            return None
        if self._scaler is not None and not self.steps:
            scale = self._scaler._scale
            reduction.norm = reduction.norm / (scale.item() if on_host else scale.to(torch.float64))
        factor = state.max_norm / (reduction.norm + 1e-6)
        if on_host:
            return min(1.0, factor) if not math.isnan(factor) else math.nan
        return factor.clamp(max=1.0)


def _real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
