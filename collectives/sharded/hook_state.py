"""A `HookState` over units: its wire, statistics, clipping, and its optimizer in the backward.

A backward of the state begins with the first reduction of any of its units. It ends with the
scheduler's backward; then the stages of the state's pipeline run.
"""

from __future__ import annotations

import functools
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..arrays import kind_of
from ..compression import Bucket, NoCompression, Scaling, measure_grads
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.grad_norm import norm_over_ranks
from ..gradients.optimizer_in_backward import OptimizerInBackward
from ..gradients.options import parse_streams
from ..gradients.state import HookState
from ..torch_compat import tree_map_only
from .mesh import Ranks
from .param import ParamGroup, ShardedParam, as_real
from .quantized_gather import QuantizedAllGather
from .ragged_tensor import RaggedTensor
from .reduction import ReduceStages, reduce, ring_elements
from .scheduler import living
from .unit import Unit

__all__ = ["HookReducer", "UnitStep", "get_reducer", "ranks_of"]


def ranks_of(state: HookState | None) -> tuple:
    """Return the communicator, or the process group, that a state names: (comm, None), (None, group) or two Nones."""
    if state is None:
        return None, None
    _check_kind(state)
    return state.comm, None if state.comm is not None else state.process_group


def _check_kind(state) -> None:
    if not isinstance(state, HookState):
        raise InvalidArgument(
            f"hook_state must be a collectives.HookState or None, not {kind_of(state)}", op="fully_shard"
        )


def get_reducer(state: HookState | None, ranks: Ranks) -> HookReducer | None:
    """Return the reducer of a state for units of some ranks. A local call.

    Raises:
        InvalidArgument: For options that are not offered here, with the reason.
        InvalidUsage: For a state of other ranks, and for one that has an optimizer already.
    """
    if state is None:
        return None
    _check_kind(state)
    world = ranks.world
    if state.units is None:
        _check(state)
        state.units = HookReducer(state, world)
    if state.units.comm is not world:
        raise InvalidUsage(
            "this HookState serves units over another communicator: a backward is a whole, give these a state of their "
            "own",
            op="fully_shard", rank=world.rank,
        )  # fmt: skip
    others = state.comm is not None and state.comm is not world
    if state.process_group is not None:
        others = set(dist.get_process_group_ranks(state.process_group)) != set(ranks.mesh.mesh.flatten().tolist())
    if others:
        raise InvalidUsage(
            f"the HookState names its ranks ({state.comm or state.process_group!r:.80}), and this module is sharded "
            f"over others ({world!r:.80}): leave comm and process_group out of one of them",
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


class HookReducer:
    """Reduces the gradients of one communicator's units as a `HookState` says; it is `state.units`.

    It gives the pipeline what a backward has reduced (`gradients.pipeline.ReducedGradients`).

    Attributes:
        comm: The communicator of all ranks.
        gather_wire: The `QuantizedAllGather` of the parameters, or None.
        multiple: The number of elements of which a rank's part is a multiple.
        steps: Whether the optimizer is stepped inside the backward.
    """

    whole = False

    def __init__(self, state: HookState, comm):
        self.state, self.comm = state, comm
        self.pipeline = state.pipeline
        self.wire = state.compressor
        self.multiple = max(1, self.wire.align)
        self.gather_wire = None if state.gather is None else QuantizedAllGather(state.gather, state.block)
        self._units: list[weakref.ref[Unit]] = []
        self._numbers = weakref.WeakKeyDictionary()  # group -> its number in the state, the same on all ranks
        self._unnamed: list[weakref.ref[Unit]] = []  # units whose parameters' names are not registered
        self.reset()

    def reset(self) -> None:
        """Drop the backward in progress."""
        self._has_begun = False
        self._reduced: dict[Unit, None] = {}  # by the backward in progress
        self._stepped: set[Unit] = set()

    # ---- Units.

    @property
    def steps(self) -> bool:
        return self.pipeline.optimizer_step is not None

    def describe(self) -> str:
        """Return a description of the options, which must be the same on all ranks."""
        return ", ".join(f"{name}={value!r:.60}" for name, value in self.pipeline.describe_options().items())

    def add(self, unit: Unit) -> None:
        """Reduce a unit's gradients from now on. A local call, in the same order on all ranks."""
        for group in unit.groups:
            self._numbers[group] = len(self._units) << 8 | unit.groups.index(group)
        self._units.append(weakref.ref(unit))
        if not self._unnamed:
            self.state.parameter_names.add_lazily(self._register_names)
        self._unnamed.append(weakref.ref(unit))
        unit.reducer = self
        if unit.comm.size > 1:
            unit.wire = self.gather_wire

    def _register_names(self) -> None:
        """Register the parameters' names in the outermost modules, by which residuals are saved."""
        units, self._unnamed = living(self._unnamed), []
        by_place = {place: param.full for unit in units for param in unit.params for place in param.places}
        for unit in reversed(units):  # outermost ones first, since they are made last
            for root in unit.modules:
                for prefix, part in root.named_modules():
                    named = [(f"{prefix}.{each}".lstrip("."), by_place.get((part, each))) for each in part._parameters]
                    self.state.parameter_names.add((name, full) for name, full in named if full is not None)

    def make_step(self, optimizer) -> UnitStep:
        """Return an object that steps an optimizer inside the backward."""
        return UnitStep(optimizer, lambda: living(self._units))

    # ---- A backward.

    def reduce(self, unit: Unit, group: ParamGroup, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Reduce a group's packed gradients, and write this rank's part to `out`, as `reduction.reduce`.

        Raises:
            InvalidUsage: Where the optimizer has stepped the unit in this backward, or the last
                backward's step was not ended.
        """
        begun = time.perf_counter_ns()
        if unit in self._stepped:
            raise InvalidUsage(
                f"{unit!r} is needed in a backward that has stepped its parameters already: its gradients came in "
                "several parts, as with activation checkpointing's use_reentrant=True, or a parameter is used "
                "detached, too; step this model's optimizer after the backward, without HookState's optimizer",
                op="fully_shard",
            )
        if not self._has_begun:
            self._begin()
        self._reduced[unit] = None
        stages = self._make_stages(unit, group)
        elements = ring_elements(as_real(flat).numel(), unit.ranks, stages)
        if stages.wire is None:
            self.pipeline.count(1, elements * as_real(flat).itemsize, elements * 4)
        reduce(flat, out, unit.ranks, stages)
        self.pipeline.totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9

    def _begin(self) -> None:
        self.reset()
        self.pipeline.begin_backward(self.comm, streams=1)
        if self.steps and self.comm._on_host:
            self.pipeline.compare_hyperparameters()
        self._has_begun = True

    def _make_stages(self, unit: Unit, group: ParamGroup) -> ReduceStages:
        factor = unit.stages.divide_factor
        if type(self.wire) is NoCompression:
            factor = factor if self.state.average or factor is not None else 1
            return ReduceStages(factor, algorithm=self.wire.choose_algorithm(self.comm))
        return ReduceStages(factor, wire=functools.partial(self._send, unit, group))

    def _send(self, unit: Unit, group: ParamGroup, comm, flat: torch.Tensor, part: int | None) -> None:
        """Reduce by the state's wire format; see `ReduceStages.wire`."""
        factor = unit.stages.divide_factor
        scaling = self.pipeline.get_scaling(comm.size) if factor is None else Scaling(prescale=1.0 / factor)
        offsets = [param.offset << param.full.is_complex() for param in group.params]
        params = [param.full for param in group.params]
        bucket = Bucket(flat, params, offsets, self._numbers[group], self.state.parameter_names)
        if part is None:
            sent = self.wire.reduce(comm, bucket, scaling)
        else:
            sent = self.wire.reduce_scatter(comm, bucket, scaling, part)
        self.pipeline.count(1, sent, (2 if part is None else 1) * (comm.size - 1) * flat.numel() * 4 // comm.size)

    def finish(self, unit: Unit, reduced: list[tuple[ShardedParam, bool, bool]]) -> None:
        """Step a unit whose gradients are stored, if nothing must come first.

        `reduced`: what `Unit.reduce_grads` returns. Where this rank has not used a parameter, the step
        waits for the backward's end, when the ranks know whether others have.
        """
        is_offloaded = any(group.store != unit.device for group in unit.groups)  # the copies are in progress
        if self.pipeline.steps_at_once and not is_offloaded and all(is_used for _, is_used, _ in reduced):
            self.pipeline.optimizer_step.update(unit)
            self._stepped.add(unit)

    def end(self) -> None:
        """Run the stages after a backward's last reduction. A collective, if there was any."""
        if not self._has_begun:
            return
        begun = time.perf_counter_ns()
        self.pipeline.end_backward(self)
        totals = self.pipeline.totals
        totals["seconds_in_hook"] += (time.perf_counter_ns() - begun) * 1e-9
        if self.gather_wire is not None:
            totals["bytes_gathered"] = self.gather_wire.sent
        self.reset()

    # ---- What the stages read and change: `ReducedGradients`.

    def _gradients(self, *, once: bool = False) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients. `once`: only those that no rank before has, too."""
        return [
            param.sharded.grad._local_tensor
            for unit in self._reduced
            if not once or unit.ranks.replicas is None or unit.ranks.replicas.rank == 0
            for param in unit.params
            if param.sharded.grad is not None
        ]

    def sum_stats(self) -> torch.Tensor:
        """Return [sum of squares, number of non-finite values] of this rank's parts."""
        total = torch.zeros(2, dtype=torch.float64, device=self.comm.device)
        for device, grads in _by_device(self._gradients(once=True)).items():
            total += measure_grads([as_real(grad.view(-1)) for grad in grads], device).to(total.device)
        return total

    def norm(self, p: float) -> torch.Tensor:
        """Return the p-norm of all parts."""
        return norm_over_ranks(self.comm, self._gradients(once=True), p)

    def multiply(self, factor) -> None:
        """Multiply the gradients by a factor."""
        for device, grads in _by_device(self._gradients()).items():
            torch._foreach_mul_(grads, factor if isinstance(factor, float) else factor.to(device))

    def step(self, *, clip, found) -> None:
        """Step the optimizer for the units that the backward has not stepped."""
        for unit in self._reduced:
            if unit not in self._stepped:
                self.pipeline.optimizer_step.update(unit, clip=clip, found=found)

    def defer_step(self, *, norm, max_norm, found) -> None:
        """Leave the units' updates to ``optimizer.step()``."""
        for unit in self._reduced:
            self.pipeline.optimizer_step.defer(unit, norm, max_norm, found)


def _by_device(grads: list[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        found.setdefault(grad.device, []).append(grad)
    return found


class UnitStep(OptimizerInBackward):
    """Steps an optimizer of `collectives.optim` unit by unit, and frees the gradients.

    Args:
        optimizer: The optimizer. It has all trainable parameters of the units. Its other parameters
            must have no gradient.
        find_units: A function that returns the units.
    """

    items = "units"

    def __init__(self, optimizer, find_units):
        super().__init__(optimizer)
        self._find_units = find_units

    def forget(self) -> None:
        """Drop the cached positions of parameters."""
        self._places: dict[int, tuple[int, int]] | None = None

    # ---- A backward.

    def begin(self) -> None:
        """Begin a backward. Raises `InvalidUsage` where the last one's step was not ended, too."""
        if self.applied:
            raise InvalidUsage(
                "a backward comes after one that has stepped the optimizer: call optimizer.step() in between, which "
                "ends the step; accumulate gradients with set_requires_gradient_sync(False); and activation "
                "checkpointing with use_reentrant=True, which makes several backwards of one, can't be had with "
                "HookState's optimizer"
            )
        super().begin()

    @torch.no_grad()
    def update(self, unit: Unit, *, clip=None, found=None) -> None:
        """Step a unit's shards, and free their gradients and the gathered parameters. A local call.

        `clip`: a factor of the gradients. `found`: where it isn't 0, there is no step.
        """
        self.optimizer._step_params(self._members(unit), id(unit), clip=clip, found_nonfinite=found)
        for param in unit.params:
            param.sharded.grad = None
        for group in unit.groups:
            group.drop_output()
        unit.reshard()
        self.applied = True
        self.optimizer._opt_called = True  # lr schedulers check it

    def _step_item(self, item, *, scale, clip, found) -> None:
        self.update(item, clip=clip, found=found)  # the optimizer reads the scale itself

    def _check_unscaled(self) -> None:
        if self._max_norm is not None:
            raise InvalidUsage(
                "scaler.unscale_(optimizer) was called, and the HookState's max_norm has been compared to what was not "
                "unscaled: leave unscale_ out, or clip with clip_grad_norm_ in place of max_norm"
            )

    def _unreduced(self) -> list:
        return self._outside({id(param.sharded) for unit in self._find_units() for param in unit.params})

    def _members(self, unit: Unit) -> dict[int, list[int]]:
        """Return the optimizer's groups that have a unit's shards, with the indices of these shards."""
        if self._places is None:
            self._places = self._positions()
        found: dict[int, list[int]] = {}
        for param in unit.params:
            place = self._places.get(id(param.sharded))
            if place is not None:
                found.setdefault(place[0], []).append(place[1])
            elif param.sharded.requires_grad:
                raise InvalidArgument(
                    f"the HookState's optimizer doesn't have {param.name} of {unit!r}: give it all trainable "
                    "parameters of the modules that the state serves, or freeze this one (requires_grad=False)"
                )
        return {number: sorted(members) for number, members in found.items()}

    # ---- State.

    @torch.no_grad()
    def state_dict(self, full: bool = True, comm=None) -> dict:
        """Return the optimizer's state dict: full, or with this rank's parts."""
        take = DTensor.full_tensor if full else (lambda value: value._local_tensor)
        return tree_map_only(DTensor, take, self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a full state dict, of any number of ranks, or that of this rank's parts. A local call."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        names = {id(param.sharded): param.name for unit in self._find_units() for param in unit.params}
        states = {
            number: {key: _as_shard(key, value, params[number], names) for key, value in state.items()}
            for number, state in state_dict["state"].items()
        }
        self.optimizer.load_state_dict({**state_dict, "state": states})


def _as_shard(key: str, value, param: torch.Tensor, names: dict[int, str]):
    """Return a plain tensor of a parameter's state as a shard, from the whole or from this rank's part. The optimizer's
    own ``load_state_dict`` converts DTensors.
    """
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and key != "step"
    if not is_plain or not isinstance(param, RaggedTensor):
        return value
    local = param._local_tensor
    if value.shape == param.shape:
        value = param.ragged.cut(value, param.shard_rank)
    elif value.shape != local.shape:
        raise InvalidArgument(
            f"the {key} to load of {names.get(id(param), 'a parameter')} has the shape {tuple(value.shape)}: neither "
            f"the parameter's, {tuple(param.shape)}, nor this rank's part's, {tuple(local.shape)}"
        )
    return param.detach().like(value.to(local.device))
