"""The reduction of an optimizer's gradients: when each goes, and with which others.

In the first step every gradient is an operation of its own, under its parameter's name, so that the ranks compare names
and shapes and find an order in which the gradients become ready. From the second step on that order's neighbours share
a `Unit`. What a rank can't know by itself, whether others have a gradient where it has none, and whether that is
sparse, the ranks tell each other by numbers.
"""

from __future__ import annotations

import contextlib
import functools
import weakref

import torch

from ..gradients.streams import has_spare_cores
from ..layout import pad_count
from .basics import current
from .controller import Coordinator
from .exceptions import HorovodInternalError
from .gradient_memory import Compressed, Member, Sparse, Unit, can_pack, element_type
from .messages import Signature, Submission, request_of
from .operations import Average, Sum, allreduce_async, name_of_op, synchronize
from .process_sets import ProcessSet

__all__ = ["GradientReducer"]

_FIRST_CAP, _CAP = 1 << 20, 25 << 20  # bytes of the first unit, which is to start early, and of the others
_ALONE = 1 << 20  # bytes; on the host the copies to a flat piece and back then take longer than a call of its own
_SPARSE = 1 << 16  # what a rank with a sparse gradient adds; one with a dense gradient adds 1
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class GradientReducer:
    """Reduces the gradients of an optimizer's parameters; arguments as `DistributedOptimizer` has read them.

    ``fired``: whether a backward has come since the last step; ``synchronized``: whether gradients are reduced;
    ``scaled``: whether a GradScaler has had them reduced; ``skips``: whether a step is not to reduce.
    """

    steps_locally = False

    def __init__(
        self, names: dict[int, str], prefix: str, compression, passes: int, op, predivide: float, groups,
        sparse_as_dense: bool, process_set: ProcessSet, *, views: bool,
    ):  # fmt: skip
        self.op = op
        self.passes = passes
        self.fired = self.synchronized = self.scaled = self.skips = False
        self._names = names
        self._prefix = prefix
        self._compression = compression
        self._groups = groups
        self._dense = sparse_as_dense
        self._process_set = process_set
        self._views = views
        self._reduction = {
            "op": name_of_op(op), "prescale": 1.0 / predivide, "postscale": float(predivide),
            "wire": getattr(compression, "wire", ""),
        }  # fmt: skip
        self._members: dict[int, Member] = {}  # by id of the parameter
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._units: list = []  # what all ranks have agreed on
        self._early: list[Member] = []  # in no unit yet, in the order in which they became ready
        self._coordinator: Coordinator | None = None
        self._overlaps = False
        self._active = False
        self._end = weakref.finalize(self, _unhook, self._hooks)
        self._end.atexit = False
        self._look_around()

    # ---- Parameters and their hooks.

    def attach(self, optimizer) -> None:
        """Take in parameters that have been added or unfrozen."""
        members = self._members
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                key = id(param)
                if key in self._hooks or not param.requires_grad:
                    continue
                if key not in members:
                    name = self._names.get(key) or f"allreduce.added.{number}.{index}"
                    members[key] = Member(name, param, self.passes)
                self._hooks[key] = param.register_post_accumulate_grad_hook(_hook(members[key], weakref.ref(self)))

    def _ready(self, member: Member) -> None:
        """A backward has made a gradient."""
        if not self._active:
            return
        if member.left <= 0:
            raise AssertionError(_TOO_MANY)
        if member.param.grad.requires_grad:
            raise AssertionError(
                f"the gradient of {member.name} requires a gradient itself, after backward(create_graph=True): take "
                "inner derivatives by torch.autograd.grad(..., create_graph=True), which leaves .grad alone"
            )
        member.left -= 1
        self.fired = True
        self.synchronized = self.scaled = False
        if not member.left:
            unit = member.unit
            if unit is None:
                self._early.append(member)
                member.see()
                return
            if member.slot is not None:
                member.move()
            if not unit.ready():
                member.see()
                return
            unit.collect()
            overlaps = self._overlaps and self._now() is self._coordinator
            if unit.apart or not overlaps:  # else what is seen now is written to by the reduction
                for each in unit.members:
                    each.see()
            if overlaps:
                unit.submit(self._coordinator, waits=False)

    def set_passes(self, passes: int) -> None:
        """Take another number of backwards before a step."""
        self.passes = passes
        for member in self._members.values():
            member.left = passes
            member.seen = None

    def begin_again(self) -> None:
        """Forget what is under way, and count backwards from none."""
        self.fired = self.synchronized = self.scaled = False
        self._early.clear()
        for unit in self._units:
            unit.reset()
        self.set_passes(self.passes)
        self._look_around()

    def forget(self) -> None:
        """End what is under way, for results that nobody wants, and begin again; blocks."""
        for unit in self._units:
            if unit.submission is not None:  # it writes to memory that the next backward writes to
                with contextlib.suppress(HorovodInternalError):  # of a job that has ended
                    unit.wait(self._coordinator)
        self.begin_again()

    # ---- The job, which may end and begin anew.

    def _now(self) -> Coordinator:
        return current().coordinator(self._process_set)

    def _look_around(self) -> None:
        """See which ranks there are; those of another job than before agree on everything anew."""
        included = self._process_set.included()
        coordinator = self._now() if included else None
        self._active = included and self._process_set.size() > 1
        if coordinator is self._coordinator:
            return
        self._coordinator = coordinator
        self._units = []
        for member in self._members.values():
            member.unit = member.sparse = member.slot = None
        self._early.clear()
        if included:
            self._overlaps = len(coordinator.comms) > 1 or has_spare_cores(coordinator.comms["cpu"])

    # ---- A round.

    def synchronize(self, optimizer) -> None:
        """Reduce all gradients, those missing as zeros; blocks."""
        current().check(self._process_set)  # else ranks would step apart once it was removed
        self._look_around()
        if not self._active:
            self.begin_again()  # a backward may have come while there were others
            self.synchronized = True
            return
        try:
            self.attach(optimizer)
            self._round(self._coordinator)
        finally:
            self.begin_again()
        self.synchronized = True

    def _round(self, coordinator: Coordinator) -> None:
        units = self._units
        for member in self._members.values():
            if member.touched():
                raise AssertionError(
                    f"the gradient of {member.name} was changed after the backward and before it was reduced: call "
                    "optimizer.synchronize() first, then clip or unscale, then step inside of "
                    "`with optimizer.skip_synchronize():`"
                )
        flags = self._tell_used(coordinator) if units else None
        late = [member for member in self._members.values() if member.sparse is None and member.param.requires_grad]
        alone: list = []
        if late:
            kinds, everybody = self._survey(coordinator, late)
            alone = self._apart(self._in_order(kinds), kinds)
        for unit in (*units, *alone):
            if unit.submission is None:
                if not unit.collected:
                    unit.collect()
                unit.submit(coordinator, waits=True)
        for unit in (*units, *alone):
            unit.wait(coordinator)
        if flags is not None:
            coordinator.wait(flags)
            used = [count > 0 for count in flags.results[0].tolist()]
            at = 0
            for unit in units:
                unit.finish(used[at : at + len(unit.members)])
                at += len(unit.members)
        for unit in alone:
            unit.finish([True] * len(unit.members))
        if late and everybody:
            for member, sparse in kinds.items():
                member.sparse = sparse
            if alone:
                alone.sort(key=lambda unit: unit.sequence)
                self._agree([member for unit in (*units, *alone) for member in unit.members])

    def _numbers(self, coordinator: Coordinator, what: str, numbers: list[int]) -> Submission:
        """Start to add up numbers over the ranks."""
        sent = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        first = next(iter(self._members.values())).name
        name = f"{self._prefix}{what} gradients of {first} and {len(self._members) - 1} more"
        signature = Signature("allreduce", name, ("int32",), ((len(numbers),),), op="sum")
        submission = Submission(request_of(signature), [sent], [sent])
        coordinator.submit(submission, waits=True)
        return submission

    def _tell_used(self, coordinator: Coordinator) -> Submission:
        numbers = [int(has) for unit in self._units for has in unit.present()]
        return self._numbers(coordinator, "used", numbers)

    def _survey(self, coordinator: Coordinator, late: list[Member]) -> tuple[dict[Member, bool], bool]:
        """Find out of which members some rank has a gradient, and if it is sparse; and whether all ranks took part."""
        numbers = [1]
        for member in late:
            grad = member.param.grad
            numbers.append(0 if grad is None else _SPARSE if grad.is_sparse and not self._dense else 1)
        submission = self._numbers(coordinator, "kinds of", numbers)
        coordinator.wait(submission)
        present, *found = submission.results[0].tolist()
        kinds = {member: kind >= _SPARSE for member, kind in zip(late, found, strict=True) if kind}
        return kinds, present == coordinator.size

    def _in_order(self, kinds) -> list[Member]:
        return list(dict.fromkeys([*(member for member in self._early if member in kinds), *kinds]))

    # ---- Units.

    def _apart(self, members: list[Member], kinds) -> list:
        """Give units of single members, or of the user's groups, with which nothing is kept."""
        units = [self._single(m, kinds[m]) for m in members if self._goes_alone(kinds[m])]
        for group in self._grouped([member for member in members if not self._goes_alone(kinds[member])]):
            unit = self._unit(group)
            if len(group) > 1 or unit.casts:
                unit.lay_out(functools.partial(torch.empty, device=unit.device), views=False)
            units.append(unit)
        return units

    def _agree(self, members: list[Member]) -> None:
        """Make the units of all further steps, the same on all ranks; members in an order that all have."""
        units = [self._single(m, m.sparse) for m in members if self._goes_alone(m.sparse)]
        packed = [member for member in members if not self._goes_alone(member.sparse)]
        fill = self._filled if self._groups is None else self._grouped
        for group in fill(packed):
            unit = self._unit(group)
            if self._views or len(group) > 1 or unit.casts:
                unit.lay_out(self._coordinator.comms[unit.device.type].empty, views=self._views)
            units.append(unit)
        self._units = units
        for unit in units:
            for member in unit.members:
                member.unit = unit

    def _goes_alone(self, sparse: bool) -> bool:
        return sparse or not can_pack(self._compression)

    def _single(self, member: Member, sparse: bool):
        name = self._prefix + member.name
        if sparse:
            return Sparse(member, name, self.op, self._process_set)
        return Compressed(member, name, self._compression, self._reduction)

    def _unit(self, members: list[Member]) -> Unit:
        name = self._prefix + members[0].name + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        return Unit(0, members, name, element_type(members[0].param, self._compression), self._reduction)

    def _key(self, member: Member) -> tuple:
        return element_type(member.param, self._compression), member.param.device

    def _grouped(self, members: list[Member]) -> list[list[Member]]:
        """Give each member by itself, or the groups of the user's; parted by dtype and device."""
        if self._groups is None:
            return [[member] for member in members]
        number_of: dict[int, int] = {}
        if isinstance(self._groups, int):
            # In the order of the optimizer, as even as can be.
            all_of_them = list(self._members)
            most = -(-len(all_of_them) // self._groups)
            number_of = {key: at // most for at, key in enumerate(all_of_them)}
        else:
            number_of = {id(param): at for at, group in enumerate(self._groups) for param in group}
        found: dict[tuple, list[Member]] = {}
        for member in members:
            key = id(member.param)
            found.setdefault((number_of.get(key, key), *self._key(member)), []).append(member)
        place = {key: at for at, key in enumerate(self._members)}
        return [sorted(group, key=lambda member: place[id(member.param)]) for group in found.values()]

    def _filled(self, members: list[Member]) -> list[list[Member]]:
        """Put neighbours together as far as there is room."""
        most = current().settings.fusion_threshold
        done: list[list[Member]] = []
        filling: dict[tuple, tuple[list[Member], int]] = {}
        for member in members:
            key = self._key(member)
            nbytes = pad_count(member.param.numel() << member.param.is_complex(), key[0].itemsize) * key[0].itemsize
            if not self._views and nbytes >= _ALONE and member.param.device.type == "cpu":
                done.append([member])
                continue
            group, size = filling.get(key, (None, 0))
            if group is None or size + nbytes > min(most, _CAP if len(done) > 1 else _FIRST_CAP):
                group, size = [], 0
                done.append(group)
            group.append(member)
            filling[key] = group, size + nbytes
        return done

    # ---- The loss of a closure.

    def average_loss(self, loss):
        """Reduce a loss as gradients are: some optimizers step by its value, and the ranks must do so alike."""
        if not self._active or loss is None or self.op not in (Average, Sum):
            return loss
        tensor = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        name = f"{self._prefix}loss of {next(iter(self._members.values())).name}"
        result = synchronize(allreduce_async(tensor, name=name, op=self.op, process_set=self._process_set, _waits=True))
        return result if isinstance(loss, torch.Tensor) else result.item()


def _hook(member: Member, owner: weakref.ref):
    """Give what a parameter calls once its gradient is there; it doesn't keep the optimizer alive."""

    def ready(_param):
        reducer = owner()
        if reducer is not None:
            reducer._ready(member)

    return ready


def _unhook(hooks: dict) -> None:
    for handle in hooks.values():
        handle.remove()
