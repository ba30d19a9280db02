"""Unit: parameters that are gathered together, used, let go, and whose gradients are reduced together.

It knows nothing of forward and backward: `module` calls it in their order, and people's own wrappers in theirs.
"""

from __future__ import annotations

import contextlib
import enum

import torch
import torch.distributed as dist
from torch import nn

from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import premul_sum, top_saved_tensors_hooks
from .buffer_pool import Loans
from .managed_params import check_parameter, managed_parameters
from .mesh import Ranks
from .module_changes import Members, follow
from .param import Group, Slot
from .policies import MixedPrecisionPolicy, parse_mp_policy, parse_offload_policy
from .quantized_gather import Codec
from .streams import HostCopies, beside, current_stream, release

__all__ = ["State", "Unit"]


class State(enum.Enum):
    """Who holds what.

    SHARDED: the modules hold the pieces, and nothing is gathered. GATHERING: a gather is under way into a buffer that
    nobody views yet. UNSHARDED: the modules hold the full parameters, views of that buffer.
    """

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()


class Unit:
    """Parameters in shards that are gathered together and whose gradients are reduced together.

    `module`: whose parameters these are, without those of `ignored_params`; or `parameters`: a list of (names, places,
    parameter) as `managed_parameters` gives it. `ranks`: a `Communicator`, or `Ranks`. The module is changed in place:
    it holds pieces, one-dimensional in memory (``(1, ..., 1, k)`` of k elements), until `unshard()`, and again after
    `reshard()`; both are Parameters and keep their identity. `mp_policy`, `offload_policy`: as `fully_shard` takes
    them. `persistent`: keep what is gathered, with the shard as its part (the memory of all parameters on each rank).
    `device`: where it computes; None: the communicator's. `codec`: in which format parameters travel; None: their own.

    A local call; all ranks must make units of the same parameters. Raises `InvalidArgument` for parameters that can't
    be sharded, by name.
    """

    def __init__(
        self, module: nn.Module | None, ranks: Ranks | Communicator, *, parameters=None, ignored_params=(),
        name: str = "", mp_policy: MixedPrecisionPolicy | None = None, offload_policy=None, persistent: bool = False,
        loans: Loans | None = None, align: int = 0, codec: Codec | None = None, copies: HostCopies | None = None,
    ):  # fmt: skip
        if isinstance(ranks, Communicator):
            ranks = Ranks(ranks if ranks.size > 1 else None, None, ranks)
        self.ranks = ranks
        self.name = name
        self.device = ranks.world.device
        self.mp_policy = parse_mp_policy(mp_policy)
        self.persistent = persistent
        self.loans = Loans() if loans is None else loans
        self.copies = HostCopies() if copies is None else copies
        self.state = State.SHARDED
        self.index = self.first_slot = 0  # its place among the units of a communicator, the same on all ranks
        self.divide_factor: float | None = None
        self.custom_all_gather = self.custom_reduce_scatter = self.custom_all_reduce = None
        self.hook = None  # what reduces its gradients in place of this; see hooks.Hooks
        # What `module` does with it in forward and backward.
        self.reshard_after_forward = self.reshard_after_backward = self.syncs = True
        self.prefetches_forward = self.prefetches_backward = True
        self.prefetches_late = False  # in backward, behind a unit's gradients
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.order = self.module = None
        self._home = None  # the stream that the gathered memory was allocated on
        self.form = self.settings = None  # in which state dicts are given, and as it was set; None: full tensors
        self.calls = 0  # forwards whose backward is still to end
        self.neighbours: Communicator | None = None  # those who keep the parameters together after a forward
        self._works: list = []
        offload = parse_offload_policy(offload_policy)
        store = torch.device("cpu") if offload else self.device
        found = managed_parameters(module, ignored_params) if parameters is None else parameters
        kinds: dict[tuple, list] = {}
        for names, places, param in found:
            check_parameter(param, names[0])
            kinds.setdefault((param.dtype, param.requires_grad), []).append((Slot(names, places, param), param))
        self.groups = [
            Group(
                [slot for slot, _ in members], [param for _, param in members], ranks, self.loans, device=self.device,
                store=store, pinned=offload is not None and offload.pin_memory, gather_dtype=self.mp_policy.param_dtype,
                reduce_dtype=self.mp_policy.reduce_dtype, persistent=persistent, align=align,
                codec=codec, copies=self.copies,
            )
            for members in kinds.values()
        ]  # fmt: skip
        self.slots = [slot for group in self.groups for slot in group.slots]
        self.find_trainable()
        self.watch = lambda slot: None  # has `module` told when a parameter's gradient comes
        self.members: Members | None = None
        # Registering goes by the modules' dictionaries, but where a module looks at what is set (nn.LSTM).
        self._plain, self._watched = [], []
        for slot in self.slots:
            for holder, attribute in slot.places:
                usual = type(holder).__setattr__ is nn.Module.__setattr__
                self._plain.append((holder._parameters, attribute, slot)) if usual else self._watched.append(
                    (holder, attribute, slot)
                )
        self._register("piece")
        self.end_backward()

    def __repr__(self):
        count = sum(slot.count for slot in self.slots)
        return f"<Unit {self.name or self.index} of {len(self.slots)} parameters, {count} elements, {self.state.name}>"

    # ---- What it is.

    def describe(self) -> str:
        """Give what must be the same on all ranks."""
        kinds = [
            f"{group.dtype}{'' if group.requires_grad else ' frozen'}: "
            + ", ".join(f"{'='.join(slot.names)}{list(slot.shape)}" for slot in group.slots)
            for group in self.groups
        ]
        return "; ".join(kinds)

    def find_trainable(self) -> None:
        """Find the groups whose gradients are reduced, which must be the same on all ranks: `kinds` is their mark."""
        self.trainable = [group for group in self.groups if group.requires_grad]
        self.kinds = sum(1 << at % 8 for at, group in enumerate(self.groups) if group.requires_grad) & 0xFF
        ids = {id(slot) for group in self.trainable for slot in group.slots}
        self.trainable_slots = [at for at, slot in enumerate(self.slots) if id(slot) in ids]
        self._missing = sum(slot.expected and not slot.came for slot in self.slots)

    def add_trainable(self, flags: list[int]) -> None:
        """Reduce from here on what other ranks do: those groups of which a parameter's flag isn't 0."""
        if sum(map(bool, flags)) > len(self.trainable_slots):
            new = {id(slot) for slot, flag in zip(self.slots, flags, strict=True) if flag}
            for group in self.groups:
                group.requires_grad = group.requires_grad or any(id(slot) in new for slot in group.slots)
            self.find_trainable()

    @property
    def gathers(self) -> bool:
        """Tell whether unsharding takes a collective."""
        return self.ranks.shard is not None and bool(self.groups)

    def pieces(self) -> list[nn.Parameter]:
        """Give this rank's pieces, in the order of the parameters' groups."""
        return [slot.piece for slot in self.slots]

    def _register(self, form: str) -> None:
        self._registered = form
        for parameters, attribute, slot in self._plain:
            parameters[attribute] = getattr(slot, form)
        for holder, attribute, slot in self._watched:
            setattr(holder, attribute, getattr(slot, form))

    def find_pieces(self) -> None:
        """Take up what the modules now hold in the pieces' places, after ``module.to_empty()`` and its like."""
        for slot in self.slots:
            holder, attribute = slot.places[0]
            slot.piece = holder._parameters[attribute]
            for other, name in slot.places[1:]:
                other._parameters[name] = slot.piece
        self.check()

    def check(self) -> None:
        """Look whether the modules hold the pieces and these lie in the shards; see `Group.check`."""
        if self.shows:  # an exception has left a load_state_dict
            self.register_form()
        if self.shows:
            raise InvalidUsage(f"{self!r} holds full parameters by summon_full_params: leave its block first")
        if not self.is_shown:
            for parameters, attribute, slot in self._plain:
                if parameters.get(attribute) is not slot.piece:
                    raise InvalidArgument(
                        f"{slot.name} was exchanged for another parameter after it was sharded: change modules before "
                        "fully_shard, and values in place"
                    )
        if self.members is not None:
            self.members.check(self.slots)
        for group in self.groups:
            group.check()
        if self.state is State.UNSHARDED and not self.is_shown and self._writes() != self._written:
            self.stepped()  # or written to by other means
        follow(self)

    @property
    def full_gradient_bytes(self) -> int:
        """What full gradients of all parameters take."""
        return sum(group.layout.total * group.reduce_dtype.itemsize for group in self.trainable)

    def register_shown(self, slots: list[Slot] | None = None) -> None:
        """Give the modules what slots, or all, have as `shown`, until `register_form`."""
        for slot in self.slots if slots is None else slots:
            _put(slot, slot.shown)

    def register_form(self, slots: list[Slot] | None = None) -> None:
        """Give the modules what they held before something was shown: the pieces, or the full parameters."""
        for slot in self.slots if slots is None else slots:
            _put(slot, getattr(slot, self._registered))
            slot.shown = None

    @property
    def shows(self) -> bool:
        """Tell whether modules hold what was shown to them."""
        return any(slot.shown is not None for slot in self.slots)

    # ---- Gathering.

    @torch.inference_mode(False)  # what is gathered may outlive the mode, in which alone it could be saved for backward
    @torch.no_grad()
    def start_gather(self, *, async_op: bool = False, near: bool = False) -> None:
        """Begin to gather the parameters; with `async_op` return before that is done. A collective of `ranks.shard`.

        `near`: of the neighbours, from what they have kept.
        """
        if self.state is not State.SHARDED:
            return
        works = []
        self._home = current_stream(self.device)
        for group in self.groups:
            if near:
                work = group.start_gather_near(self.neighbours, async_op)
            else:
                work = group.start_gather(async_op=async_op, custom=self.custom_all_gather)
            if work is not None:
                works.append(work)
        self._works = works
        self.state = State.GATHERING

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self) -> None:
        """Wait for what `start_gather` began, and give the modules the full parameters."""
        if self.state is State.UNSHARDED:
            if not self.is_shown:
                self._register("full")
            return
        if self.state is State.SHARDED:
            raise InvalidUsage(f"{self!r} has nothing gathered: unshard() it")
        works, self._works = self._works, []
        for work in works:
            work.wait()
            release(work, self._home, self.device)
        self._used_here()
        for group in self.groups:
            group.show()
        self._register("full")
        self.state = State.UNSHARDED

    def _used_here(self) -> None:
        """Keep what is gathered from being allocated anew before the current stream has done with it."""
        here = current_stream(self.device)
        if here != self._home:
            for group in self.groups:
                if group.gathered is not None:
                    group.gathered.record_stream(here)

    @property
    def is_shown(self) -> bool:
        """Tell whether the modules hold the full parameters."""
        return self._registered == "full"

    def rest(self) -> None:
        """Give the modules the pieces, and keep what is gathered for the next `show`."""
        if self.is_shown:
            self._register("piece")
            self._written = self._writes()

    def _writes(self) -> int:
        """Count the writes to the pieces that autograd counts: those by ``.data`` it doesn't."""
        return sum(slot.piece._version for slot in self.slots if not slot.piece.is_inference())

    def stepped(self) -> None:
        """Let go of what is gathered, since an optimizer has made the pieces newer.

        A backward that needs the values from before it then raises, and doesn't compute with the new ones.
        """
        self.reshard()
        for group in self.groups:
            group.steps += 1
            if group.shares_memory and group.slots:
                torch.autograd.graph.increment_version([slot.full for slot in group.slots])

    @torch.no_grad()
    def help_gather(self, masters: bool = False) -> None:
        """Take part in a gather that other ranks need; what this rank holds stays as it is."""
        for group in self.groups:
            if masters:
                group.gather_masters()
            else:
                group.help_gather(self.custom_all_gather)

    def unshard(self) -> None:
        """Gather the parameters and give them to the modules. A collective; blocks on the host."""
        self.start_gather()
        self.show()

    @property
    def is_near(self) -> bool:
        """Tell whether the neighbours' parts are kept."""
        return any(group.near is not None for group in self.groups)

    def reshard(self, *, write_back: bool = False, keep_near: bool = False) -> None:
        """Give the modules the pieces again and let go of what was gathered; a local call.

        `write_back`: take over what was written to the full parameters. `keep_near`: keep this rank's part among its
        neighbours.
        """
        if self.state is State.GATHERING:
            self.show()  # what is under way must end
        for group in self.groups:
            group.near = None
        if self.state is State.SHARDED:
            return
        self.rest()
        for group in self.groups:
            if write_back:
                group.write_back()
            if keep_near and self.neighbours is not None:
                group.keep_near(self.neighbours)
        self._used_here()
        for group in self.groups:
            group.hide()
        self.state = State.SHARDED

    def write_back(self) -> None:
        """Take over into the pieces what was written to the full parameters."""
        for group in self.groups:
            group.write_back()

    @contextlib.contextmanager
    def unsharded(self, *, write_back: bool = False):
        """Unshard inside of a ``with`` block."""
        before = self.state
        self.unshard()
        try:
            yield self
        finally:
            if before is State.SHARDED:
                self.reshard(write_back=write_back)
            elif write_back:
                self.write_back()

    # ---- Gradients.

    def has_gradients(self) -> bool:
        """Tell whether full gradients wait to be reduced."""
        return any(group.has_gradients() for group in self.trainable)

    @torch.inference_mode(False)
    @torch.no_grad()
    def start_reduce(self, *, async_op: bool = False) -> list:
        """Begin to average the full gradients into the pieces' gradients; give functions that wait for it and end it.

        A collective of all ranks; a rank without gradients sends zeros. The full gradients are gone afterwards.
        """
        if self.hook is not None:
            return self.hook.start_reduce(self, async_op=async_op)
        return [self._reduce(group, async_op) for group in self.trainable]

    def reduce(self) -> None:
        """Average the full gradients over the ranks into the pieces' gradients, or add to those that are there."""
        for finish in self.start_reduce():
            finish()
        self.copies.wait()

    def _reduce(self, group: Group, async_op: bool):
        home = current_stream(self.device)
        flat = group.take_gradients(self.custom_reduce_scatter)
        part, works, in_place = self._average(group, flat, async_op)

        def finish():
            if works:
                works[-1].wait()
            for work in works:
                release(work, home, self.device)
            group.take_in(part, in_place)

        return finish

    def _average(self, group: Group, flat: torch.Tensor, async_op: bool):
        """Begin to average; give where it goes, the operations, each behind the one before, and `in_place`."""
        ranks = self.ranks
        op = "avg" if self.divide_factor is None else 1.0 / self.divide_factor
        send = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        own = slice(ranks.rank * group.share, (ranks.rank + 1) * group.share)
        if ranks.shard is None or (ranks.replicas is not None and ranks.world._on_host):
            # On one machine's memory a sum over all ranks at once is in rank order, as DDP's is.
            work = self._all_reduce(ranks.world, send, op, async_op)
            in_place = flat is group.grad
            return (flat if in_place else flat[own]), [] if work is None else [work], in_place
        out, in_place = group.output()
        to = torch.view_as_real(out).view(-1) if out.is_complex() else out
        # The second of two reductions waits for the first one on another stream than the computation's.
        with beside(self.device) if async_op and ranks.replicas is not None else contextlib.nullcontext():
            if self.custom_reduce_scatter is not None:
                work = self.custom_reduce_scatter(to, send, ranks.group or ranks.shard, _torchs(op), async_op)
            else:
                work = ranks.shard.reduce_scatter(to, send, op, async_op=async_op)
            works = [] if work is None else [work]
            if ranks.replicas is not None:
                if works:
                    works[-1].wait()
                work = self._all_reduce(ranks.replicas, to, "avg" if op == "avg" else "sum", async_op)
                works += [] if work is None else [work]
        return out, works, in_place

    def _all_reduce(self, comm: Communicator, flat: torch.Tensor, op, async_op: bool):
        if self.custom_all_reduce is not None:
            return self.custom_all_reduce(flat, comm, _torchs(op), async_op)
        return comm.all_reduce(flat, op, async_op=async_op)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Give the parameters that are shown the full gradients that the pieces have. A collective."""
        for group in self.trainable:
            group.gather_gradients()

    @torch.no_grad()
    def take_gradients_back(self) -> None:
        """Keep in the pieces' gradients what was written to those that were shown."""
        for group in self.trainable:
            group.take_gradients_back()

    def drop_gradients(self) -> None:
        """Drop full gradients that wait to be reduced."""
        for slot in self.slots:
            slot.full.grad = slot.kept = None
            slot.arrived = False

    def note(self, slot: Slot) -> bool:
        """Note that a parameter's gradient has come in this backward; tell whether it was the last one expected."""
        slot.arrived = True
        if slot.came:
            return False
        slot.came = True
        self._missing -= slot.expected
        return slot.expected and not self._missing

    def end_backward(self, *, drop: bool = False) -> None:
        """Begin to count anew; `drop`: without what the last backward has brought."""
        if any(slot.came for slot in self.slots):
            for slot in self.slots:
                if not drop:
                    slot.expected = slot.came
                elif slot.came:
                    slot.full.grad = None
                    slot.arrived = slot.kept is not None
                slot.came = False
        if self.syncs:
            for slot in self.slots:
                slot.arrived = False
        else:
            for group in self.trainable:
                group.keep()
        self._missing = sum(slot.expected for slot in self.slots)
        self.calls = 0

    # ---- What autograd saves.

    @contextlib.contextmanager
    def saving(self, demand):
        """Let what autograd saves of the gathered parameters be looked up when it is needed, not kept.

        `demand`: a function that has this unit unsharded. Other tensors go to the hooks that were there before. Those
        of torch's checkpointing keep nothing, and must see all: there is nothing to do then.
        """
        outer = top_saved_tensors_hooks()
        if outer is not None and outer[0].__module__ == "torch.utils.checkpoint":
            yield
            return
        here = {}
        for group in self.groups:
            if group.gathered is not None:
                here[group.gathered.untyped_storage().data_ptr()] = group

        def save(tensor):
            group = here.get(_storage_address(tensor))
            if group is None:
                return tensor if outer is None else outer[0](tensor)
            base = group.gathered.storage_offset() * group.gathered.element_size()
            offset = tensor.storage_offset() - base // tensor.element_size()
            return _Saved(group, group.steps, tensor.dtype, tensor.size(), tensor.stride(), offset)

        def load(saved):
            if type(saved) is not _Saved:
                return saved if outer is None else outer[1](saved)
            if saved.steps != saved.group.steps:
                raise InvalidUsage(
                    f"{self!r} was stepped by an optimizer between a forward and its backward, which needs the "
                    "parameters that the forward has used: call backward() before optimizer.step()"
                )
            demand()
            flat = saved.group.gathered
            flat = flat if flat.dtype == saved.dtype else flat.view(saved.dtype)
            return flat.as_strided(saved.size, saved.stride, flat.storage_offset() + saved.offset)

        with torch.autograd.graph.saved_tensors_hooks(save, load):
            yield


def _put(slot: Slot, param) -> None:
    for holder, attribute in slot.places:
        if type(holder).__setattr__ is nn.Module.__setattr__:
            holder._parameters[attribute] = param
        else:
            setattr(holder, attribute, param)


class _Saved:
    """A tensor that autograd has saved of a group's gathered parameters: where it lies in them."""

    __slots__ = ("dtype", "group", "offset", "size", "steps", "stride")

    def __init__(self, group, steps, dtype, size, stride, offset):
        self.group = group
        self.steps = steps
        self.dtype = dtype
        self.size = size
        self.stride = stride
        self.offset = offset


def _storage_address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones, and others that have none
        return 0


def _torchs(op):
    """Give an operation as torch.distributed has it."""
    ops = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}
    return ops[op] if isinstance(op, str) else premul_sum(op)
