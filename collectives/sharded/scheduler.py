"""Scheduler: the order of a communicator's units in forward and backward, their prefetch, and the
end of a backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy
import torch

from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from ..gradients.step_count import StepCount
from ..gradients.streams import should_overlap
from ..rendezvous.control import open_control
from ..torch_compat import current_graph_task_id
from .agreement import Agreement
from .buffer_pool import BufferPool
from .managed_params import units_in
from .negotiation import known_to_all
from .plans import PassPlanner
from .reduction import PendingReductions
from .streams import HostCopies
from .unit import State, Unit
from .unit_registry import (
    DONE,
    GATHER,
    STEP,
    OptimizerRegistry,
    UnitRegistry,
    gather_code,
    gathers_masters,
    is_post_forward,
    kind_of,
    living,
)

__all__ = [
    "Scheduler", "find_schedulers", "find_units", "get_scheduler", "known_units", "open_schedulers", "schedulers_in",
]  # fmt: skip

# id of a communicator -> its scheduler, which holds the communicator
_schedulers: dict[int, Scheduler] = {}


def get_scheduler(comm: Communicator) -> Scheduler:
    """Return the scheduler of a communicator's units. The first call creates it, and all ranks must
    make that one.
    """
    for key, scheduler in list(_schedulers.items()):
        if scheduler.comm.closed:
            del _schedulers[key]
            scheduler.agreement.close()
    if id(comm) not in _schedulers:
        _schedulers[id(comm)] = Scheduler(comm, open_control(comm))
    return _schedulers[id(comm)]


class Scheduler:
    """Unshards, prefetches, reshards and reduces the units of one communicator, in forward and
    backward.

    Before each collective it calls its `agreement` with the other ranks, which calls it back for
    collectives that only others need. `control`: the communicator over which they agree, or None.
    """

    def __init__(self, comm: Communicator, control: Communicator | None):
        self.comm = comm
        self.registry = UnitRegistry()
        self.agreement = Agreement(comm, control, self.registry, self._join, self._reset)
        self.planner = PassPlanner(self.agreement, self.registry)
        self.pool = BufferPool()
        self.host_copies = HostCopies()
        self.full_param_optimizers = OptimizerRegistry()
        self._step_count = StepCount()
        self.agreement.follower.after_error = self._step_count.reset  # of all ranks
        # Whether collectives overlap with the computation: on a GPU, or on spare cores.
        self.should_overlap = not comm._on_host or should_overlap(comm)
        self.depth = 0  # nesting of units' forwards
        self.is_last_backward = True
        self._resharded_in_backward = False  # in the backward in progress
        self._current_forward: list[Unit] = []
        self._current_backward: list[Unit] = []
        self.graph_task: int | None = None  # id of the backward in progress
        self._params_with_accumulate_hooks: list = []  # shards with post-accumulate-grad hooks to call
        self._reductions = PendingReductions(comm.device)

    @property
    def units(self) -> list[Unit]:
        """The units that are alive."""
        return self.registry.living()

    def count_step(self) -> None:
        """Count a step of an optimizer, the first one since a backward: from now on the ranks compare
        it with each collective of the shards.
        """
        if not self._step_count.has_stepped:
            self._step_count.has_stepped = True
            ranks = [unit.ranks for unit in self.units]
            found = {id(comm): comm for each in ranks for comm in (each.shard, each.replicas) if comm is not None}
            self._step_count.advance(*{id(self.comm): self.comm, **found}.values())

    def forget_steps(self) -> None:
        """Count steps anew: all ranks have loaded the same parameters."""
        self._step_count.reset()

    # ---- Gathering.

    @torch.inference_mode(False)
    @torch.no_grad()
    def all_gather_master_shards(self, unit: Unit) -> list[torch.Tensor]:
        """All-gather a unit's shards in their own dtype; what it has gathered for forward and
        backward stays.

        Returns a flat buffer for each of the unit's groups; the caller should drop it soon.
        """
        try:
            unit.check()
        except Exception:
            self.agreement.fail()
            raise
        if unit.gathers:
            self.agreement.gather(unit, masters=True)
        return [group.all_gather_master_shards() for group in unit.groups]

    def unshard(self, unit: Unit, *, async_op: bool = False) -> None:
        """Agree on a unit's all-gather and begin it, unless it is gathered already. `async_op`: as
        in `Unit.unshard`.
        """
        if unit.state is State.SHARDED:
            post_forward, alone = unit.is_sharded_post_forward, unit.gathers and not self.agreement.follower.in_pass
            if unit.gathers:
                _prepare_window(unit, self.agreement)
                if alone:
                    self.agreement.follower.begin_pass(("unshard", unit.index), gather_code(unit))
                post_forward = self.agreement.gather(unit, post_forward=post_forward) and post_forward
            unit.unshard(async_op=async_op, post_forward=post_forward)
            if alone:
                self.agreement.end_pass()

    def _join(self, code: int) -> None:
        """Take part in what only others need: a collective, or DONE, their reducers' last exchange."""
        if kind_of(code) == DONE:
            self._reductions.wait()
            for reducer in _reducers(self.units):
                reducer.join_end()
            return
        if kind_of(code) == STEP:
            self.full_param_optimizers.join_step(code, self.agreement.follower.plan)
            return
        unit = self.registry.of(code)
        if kind_of(code) == GATHER:
            _join_all_gather(unit, masters=gathers_masters(code), post_forward=is_post_forward(code))
        elif self.graph_task is not None:
            self._reduce(unit)
        else:
            with self._dropping_gradients([unit]):
                self._reduce(unit)

    @contextlib.contextmanager
    def _dropping_gradients(self, units: list[Unit]) -> Iterator[None]:
        """Drop what reductions store inside the block, of an iteration that this rank has left: users
        may have zeroed its gradients already.
        """
        shards = [param.shard for unit in units for param in unit.params]
        kept = [None if shard.grad is None else shard.grad.clone() for shard in shards]
        for shard in shards:
            shard.grad = None
        try:
            yield
            self._reductions.wait()
            self.host_copies.wait()
        finally:
            for shard, grad in zip(shards, kept, strict=True):
                shard.grad = grad

    def ensure_unsharded(self, unit: Unit) -> None:
        """Unshard a unit and register its full parameters, unless they are."""
        if not unit.is_unsharded_registered:
            self.unshard(unit)
            unit.wait_for_unshard()

    def unshard_for_backward(self, unit: Unit) -> None:
        """Unshard a unit with the values that the forward has used."""
        if unit.reducer is not None:
            unit.reducer.check_use(unit)
        self.ensure_unsharded(unit)

    def _prefetch(self, unit: Unit, named: list[Unit] | None, order: list[weakref.ref]) -> None:
        """Prefetch: begin the all-gathers of the units that come after `unit`.

        `named`: the units that the user has set to be prefetched after it; None: the next one in
        `order`.
        """
        if named is None:
            upcoming = living(order) if self.should_overlap else []
            if unit not in upcoming:
                return
            at = upcoming.index(unit) + 1
            named = [] if State.GATHERING in [each.state for each in upcoming] else upcoming[at : at + 1]
        for each in named:
            if self.graph_task is None or each.unshard_in_backward:
                self.unshard(each, async_op=True)

    # ---- Forward.

    def enter_forward(self, unit: Unit, in_backward: bool) -> None:
        """Note that a unit's forward begins; reset first, if the last backward did not end."""
        if not in_backward:
            self.abort_backward()
        if self.depth == 0 and not in_backward:
            self._current_forward = []
            self.planner.begin_forward(unit, self.should_overlap)
        self.depth += 1

    def pre_forward(self, unit: Unit, in_backward: bool, *, prefetch: bool = True) -> None:
        """Unshard a unit for a forward that needs its parameters, and prefetch the next one."""
        try:
            unit.check()
        except Exception as error:
            self.agreement.fail()
            known_to_all(error)
            raise
        if unit.groups and not in_backward and unit not in self._current_forward:
            self._current_forward.append(unit)
        self.unshard_for_backward(unit) if in_backward else self.ensure_unsharded(unit)
        if prefetch and not in_backward:
            self._prefetch(unit, unit.forward_prefetch, self.planner.forward.order if unit.prefetch_in_forward else [])

    def post_forward(self, unit: Unit, in_backward: bool) -> None:
        """Note that a unit's forward has ended; after the outermost one, register the shards on all
        modules.
        """
        self.depth -= 1
        if self.depth == 0 and not in_backward:
            seen, self._current_forward = self._current_forward, []
            self.planner.end_forward(seen)
            # Outside a forward, the modules hold shards, and users may write to them: buffers stay
            # gathered only for a backward.
            for each in seen:
                _end_forward(each, self.reshards_after_forward(each))
            if not torch.is_grad_enabled():
                self.host_copies.wait()  # users may write to shards on the host now
            self.agreement.end_pass()

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether a unit is resharded after its forward; the backward's first units are not."""
        if not unit.reshard_after_forward or unit.is_read:
            return False
        return not torch.is_grad_enabled() or unit not in living(self.planner.forward.kept)

    def abort_backward(self) -> None:
        """Reset to a state in which a forward can begin, if the last backward did not end."""
        if self.graph_task is not None:
            self.graph_task = None
            with self._dropping_gradients(self.units):
                self._reductions.wait()
            self.agreement.interrupt(True)
            self._reset()

    def abort_forward(self, error: BaseException, in_backward: bool) -> None:
        """Reset to a state in which a forward can begin, after an exception has left one."""
        self.depth -= 1
        if self.depth == 0 and not in_backward:
            if not getattr(error, "known_to_all", False):
                self.agreement.interrupt(torch.is_grad_enabled())
            self._reset()

    def _reset(self) -> None:
        """Drop the forward or backward in progress, and reshard all units."""
        self.graph_task = None
        self._current_forward, self._current_backward = [], []
        self._params_with_accumulate_hooks = []
        self.planner.reset()
        self._reductions.wait()
        self.host_copies.wait()
        for reducer in _reducers(self.units):
            reducer.reset()
        for unit in self.units:
            unit.reshard()
            unit.end_backward(drop=True)

    # ---- Backward.

    def begin_backward(self) -> None:
        """Note that a backward is in progress, and queue its final callback. Called by the
        backward's first hook.
        """
        if self.graph_task is None:
            self.graph_task = current_graph_task_id()
            self._current_backward = []
            self._step_count.has_stepped = False
            self._resharded_in_backward = False
            self.planner.begin_backward(in_forward=self.depth > 0, is_last=self.is_last_backward)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def pre_backward(self, unit: Unit) -> None:
        """Unshard a unit for its backward, and prefetch the next one."""
        self.begin_backward()
        is_first = unit.groups and unit not in self._current_backward
        if is_first:
            self._current_backward.append(unit)
            self.planner.units_before_reshard += not self._resharded_in_backward
        if unit.unshard_in_backward:
            self.ensure_unsharded(unit)
        if is_first and not unit.prefetch_post_backward:
            self._prefetch_in_backward(unit)

    def post_backward(self, unit: Unit) -> None:
        """Reduce the gradients of a unit whose last gradient was computed, and reshard it."""
        # Frozen parameters may still be needed, until the inputs' gradients are computed.
        stays = unit.pending_backwards > 0 and len(unit.gradients.trainable) < len(unit.groups)
        if unit.reduce_grads:
            if not self.agreement.reduce(unit):
                return  # the final callback reduces it
            if unit.reshard_after_backward and not stays:
                unit.reshard()  # before the reduction, which can pack the gradients where the parameters were
            self._reduce(unit)
        if not stays:
            self.reshard_in_backward(unit)

    def reshard_in_backward(self, unit: Unit) -> None:
        """Reshard a unit that this backward needs no more."""
        self._resharded_in_backward = True
        if unit.reshard_after_backward:
            unit.reshard()
        if unit.prefetch_post_backward:
            self._prefetch_in_backward(unit)

    def _prefetch_in_backward(self, unit: Unit) -> None:
        self._prefetch(unit, unit.backward_prefetch, self.planner.backward.order if unit.prefetch_in_backward else [])

    def _reduce(self, unit: Unit) -> None:
        """Begin to reduce a unit's gradients, after the reduction before has ended."""
        self._reductions.finish()  # one at a time
        self._reductions.pending = unit.start_reduce(async_op=self.should_overlap)
        if not self.should_overlap:
            self._reductions.wait()

    def _end_backward(self) -> None:
        """Final callback of a backward: reduce what is left, reshard, and call users' hooks."""
        if self.graph_task is None:
            return  # it was aborted
        units = self.units
        seen, self._current_backward = self._current_backward, []
        self.planner.end_backward(seen)
        if not self.is_last_backward:
            self.agreement.end_pass()
            self.graph_task = None
            if self.depth:
                self.planner.resume_forward()
            return
        if _reduces(self.planner, units, seen):
            repeated = self._reduce_remaining(units)
        else:
            repeated = self.agreement.end_pass()
        if self.depth:
            self.planner.resume_forward()
        self._reductions.wait()
        self.host_copies.wait()
        for reducer in _reducers(self.units):
            reducer.end()
        self.graph_task = None
        for unit in units:
            if unit.reshard_after_backward:
                unit.reshard()
            unit.to_sharded()
            unit.end_backward(repeated=repeated)
        accumulated, self._params_with_accumulate_hooks = self._params_with_accumulate_hooks, []
        for shard, hook in [(each, hook) for each in accumulated for hook in each._post_accumulate_grad_hooks.values()]:
            hook(shard)

    def _reduce_remaining(self, units: list[Unit]) -> bool:
        """Reduce what still waits on any rank, and drop the gradients of parameters that no rank
        has used. Return whether the backward has followed a schedule.
        """
        self.agreement.reach_end()
        count = len(self.registry)
        flags = self.agreement.end_backward(self.registry.gradient_flags())
        used = flags[count:].tolist()
        for unit in units:
            unit.gradients.extend_trainable(used[unit.first_param : unit.first_param + len(unit.params)])
        for index in numpy.flatnonzero(flags[:count]).tolist():
            unit = self.registry.get(index)
            if unit is None:
                text = f"other ranks have gradients of unit {index}, of a module that is gone here"
                raise InvalidUsage(text, op="fully_shard", rank=self.comm.rank)
            for param in unit.params:
                param.has_unreduced_grad |= param.full.grad is not None
            self.agreement.reduce_at_end(unit)
            self._reduce(unit)
        repeated = self.agreement.finish_backward()
        self._reductions.wait()
        self.host_copies.wait()
        for unit in units:
            flags = used[unit.first_param : unit.first_param + len(unit.params)]
            self._params_with_accumulate_hooks += unit.gradients.drop_unused(flags)
        return repeated


def _reduces(planner: PassPlanner, units: list[Unit], seen: list[Unit]) -> bool:
    """Return whether a backward reduces gradients, or all of them wait for a later one, the same on
    all ranks. `seen`: the units that it has run.
    """
    used = planner.units_of_backward() or units
    if any(unit.reduce_grads for unit in used):
        return True
    return any(unit.reduce_grads and (unit in seen or unit.gradients.has_gradients()) for unit in units)


def _end_forward(unit: Unit, reshards: bool) -> None:
    """Register the shards on a unit's modules after an outermost forward. `reshards`: whether it is
    resharded where only some of its modules have run.
    """
    partly = unit.module_group is not None and bool(unit.module_group.left)
    if partly:
        unit.module_group.left.clear()
    if partly and reshards and torch.is_grad_enabled():
        unit.reshard(post_forward=True)
    elif torch.is_grad_enabled() or unit.pending_backwards:
        unit.to_sharded()
    elif unit.state is State.UNSHARDED:
        unit.reshard()


@torch.no_grad()
def _join_all_gather(unit: Unit, *, masters: bool, post_forward: bool) -> None:
    """Take part in an all-gather that only other ranks need, of `masters`, the shards in their own
    dtype, or of post-forward shards; this rank's parameters stay as they are.
    """
    if masters:
        for group in unit.groups:
            group.all_gather_master_shards()
        return
    if unit.window.is_used:
        unit.move_gathered()
    for group, out in zip(unit.groups, unit.window.acquire(post_forward), strict=True):
        if post_forward:
            group.join_post_forward(unit.post_forward_comm)
        else:
            group.join_all_gather(unit.custom_all_gather, out)
    unit.window.release()


def _prepare_window(unit: Unit, agreement: Agreement) -> None:
    """Empty the window of a unit that is gathered next; announce an error to the other ranks."""
    try:
        unit.window.prepare()
    except InvalidUsage as error:
        agreement.fail()
        known_to_all(error)
        raise


def _reducers(units: list[Unit]) -> list:
    """Return the units' gradient reducers, each once, in the same order on all ranks."""
    return list({unit.reducer: None for unit in units if unit.reducer is not None})


def open_schedulers() -> list[Scheduler]:
    """Return the schedulers of all communicators that are open."""
    return [scheduler for scheduler in _schedulers.values() if not scheduler.comm.closed]


def find_schedulers(params) -> list[Scheduler]:
    """Return the schedulers of the units whose shards are among these parameters."""
    schedulers = dict.fromkeys(unit.scheduler for unit in find_units(params))
    return [scheduler for scheduler in schedulers if not scheduler.comm.closed]


def schedulers_in(module: torch.nn.Module) -> list[Scheduler]:
    """Return the schedulers of a module's units, and of those inside."""
    return list(dict.fromkeys(unit.scheduler for unit in units_in(module)))


def known_units() -> list[Unit]:
    """Return the units of all communicators."""
    return [unit for scheduler in _schedulers.values() for unit in scheduler.units]


def find_units(params) -> list[Unit]:
    """Return the units whose shards are among these parameters."""
    members = set(map(id, params))
    return [unit for unit in known_units() if any(id(param.shard) in members for param in unit.params)]
