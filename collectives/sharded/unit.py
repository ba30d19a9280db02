"""Unit: parameters that are all-gathered together, and whose gradients are reduced together.

A unit knows nothing of forward and backward. The scheduler calls it for sharded modules, and users'
own wrappers call it directly.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..comm.tags import make_tag, tagged
from ..errors import InvalidArgument, InvalidUsage
from ..gradients.step_count import count_steps, forget_steps
from .managed_params import check_parameter, managed_parameters
from .mesh import Ranks, resolve_mesh
from .param import ParamGroup, ShardedParam, checksum
from .policies import MixedPrecisionPolicy, parse_mp_policy, parse_offload_policy
from .reduction import ReduceStages, reduce
from .scheduler import get_scheduler

__all__ = ["Unit"]

_COMPARED_FORWARDS = 3


class Unit:
    """Parameters in shards that are all-gathered together and whose gradients are reduced together.

    The modules are changed in place. They hold this rank's shards, DTensors, until `unshard()`, and
    again after `reshard()`. Both forms are Parameters and keep their identity. All ranks must make
    units of the same parameters, and call the collectives of one communicator in one order. Making
    one is a local call, except for the first use of a process group, and on GPUs and several nodes for
    the first unit of a communicator.

    Args:
        module: The owner of the parameters.
        comm: The `Communicator` of the ranks that have a shard each. None: see `mesh`.
        mesh: A DeviceMesh of one dimension, or of two: replicas, shards. None: that of `comm`, and
            without one torch.distributed's default group.
        ranks: The ranks in place of `comm` and `mesh`, as `resolve_mesh` returns them.
        parameters: A list of (names, places, parameter), as `managed_parameters` returns it. None:
            those of `module`.
        ignored_params: Parameters of `module` that stay as they are.
        name: The unit's name in messages. None: the module's class.
        mp_policy: As in `fully_shard`.
        offload_policy: As in `fully_shard`.
        block: As in `fully_shard`.
        multiple: A number of elements of which a rank's part of a flat buffer is a multiple.

    Attributes:
        params: The parameters, `ShardedParam`.
        groups: Their flat buffers, one for each dtype, trainable and frozen apart: `ParamGroup`.
        stages: How the gradients are reduced.

    Raises:
        InvalidArgument: With the parameter's name, for parameters that can't be sharded.
    """

    def __init__(
        self, module: nn.Module | None, comm: Communicator | None = None, *, mesh=None, ranks: Ranks | None = None,
        parameters=None, ignored_params=(), name: str | None = None, mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy=None, block: int = 1, multiple: int = 1,
    ):  # fmt: skip
        self.ranks = resolve_mesh(module, comm, mesh) if ranks is None else ranks
        found = managed_parameters(module, ignored_params) if parameters is None else parameters
        for names, _, param in found:
            check_parameter(param, names[0])
        self.name = type(module).__name__ if name is None else name
        self.mp_policy = parse_mp_policy(mp_policy)
        self.stages = ReduceStages()
        self.reducer = None  # reduces by a HookState
        self.wire = None  # of all-gathers, a QuantizedAllGather
        self.custom_all_gather = None
        self.neighbours: Communicator | None = None  # ranks that keep all parameters between them after a forward
        self.scheduler = get_scheduler(self.ranks.world)
        offload = parse_offload_policy(offload_policy)
        kinds: dict[tuple, list] = {}
        for names, places, param in found:
            members = kinds.setdefault((param.dtype, param.requires_grad), [])
            members.append((ShardedParam(names, places, param.shape), param))
        self.groups = [
            ParamGroup(
                members, self.ranks, self.scheduler.arena, gather_dtype=self.mp_policy.param_dtype,
                reduce_dtype=self.mp_policy.reduce_dtype, block=block, multiple=multiple,
                store=self.ranks.device if offload is None else torch.device("cpu"),
                pinned=offload is not None and offload.pin_memory and self.ranks.device.type != "cpu",
            )
            for members in kinds.values()
        ]  # fmt: skip
        self.params = [param for group in self.groups for param in group.params]
        self.is_converted = True
        self._count_steps()
        self.modules: list[nn.Module] = []  # whose forward gathers it
        self.ignored: set[tuple[nn.Module, str]] = set()  # places of parameters of these that stay as they are
        self._not_run: set[nn.Module] = set()  # of these, in the forward in progress
        self.index = self.scheduler.add(self)
        self._comms = list({id(comm): comm for comm in self.ranks[1:4] if comm is not None}.values())
        self.set_name(self.name)
        # Settings of FSDP2's methods, which the scheduler reads.
        self.reshard_after_forward: bool | None = True
        self.reshard_after_backward = self.reduces = self.unshard_in_backward = True
        self.is_last_backward = True  # False: the end of a backward reduces nothing and reshards nothing
        self.prefetch_in_backward, self.prefetch_in_forward = True, False
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.root = self.index  # of the outermost unit of the last forward
        # The backward in progress.
        self.backwards_left: int | None = None
        self.stays_gathered = False  # until a backward's end, since torch.func has transformed a forward
        self.is_open_ended = False  # a forward's inputs want no gradients, so that its backward's end isn't reported
        self._nodes: list[weakref.ref] = []
        self._works: list | None = None  # of a gather in progress
        self._gathered_event = None
        self.versions: tuple[int, ...] = ()  # of the shards when they were gathered
        self.writes_inside = False  # shards were written to inside of an outermost forward
        self._forwards = 0  # that have been compared by checksums
        self._sums: list[int] = []  # of the full parameters, as they were gathered
        self._full_versions: list[tuple[int, int]] = []
        self.is_unsharded = self.is_registered = False
        self.holds_copies = False  # of whole parameters, in a block of `state.unsharded_params`
        for param in self.params:
            for holder, attribute in param.places:
                holder._parameters[attribute] = param.sharded

    def __repr__(self):
        count = sum(param.shape.numel() for param in self.params)
        state = "unsharded" if self.is_unsharded else "sharded"
        return f"<Unit {self.name} of {len(self.params)} parameters, {count} elements, {state}>"

    # ---- What it is.

    def set_name(self, name: str) -> None:
        """Set the name in messages, the same on all ranks."""
        self.name = name
        self.tag = make_tag(f"unit {self.index}, {name}")

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that have a shard each."""
        return self.ranks.comm

    @property
    def world(self) -> Communicator:
        """The communicator of all ranks, replicas included."""
        return self.ranks.world

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.ranks.device

    @property
    def frees_memory(self) -> bool:
        """Whether a reshard takes the memory of full parameters."""
        return any(not group.shares_memory for group in self.groups)

    @property
    def reads_common(self) -> bool:
        """Whether it is gathered, and its full parameters lie in the ranks' shards themselves."""
        return any(group.reads_common for group in self.groups)

    @property
    def requires_grad(self) -> bool:
        return any(group.requires_grad for group in self.groups)

    def pieces(self) -> list[nn.Parameter]:
        """Return this rank's shards, which an optimizer steps, in the order of the groups."""
        return [param.sharded for param in self.params]

    def rehome(self) -> None:
        """Take sharded parameters that got other memory, as by ``module.to_empty()``, back into the flat shards."""
        for param in self.params:
            module, attribute = param.places[0]
            held = module._parameters[attribute]
            if held is not param.sharded:  # torch may replace a Parameter
                param.sharded = held
                for other, name in param.places[1:]:
                    other._parameters[name] = held
        self.is_converted = all([group.rehome() for group in self.groups])
        if self.is_converted:  # else conversions of other modules follow
            self.versions = ()
            self._count_steps()

    def _check_converted(self) -> None:
        """Raise `InvalidUsage` where a conversion has left parameters with several dtypes or devices."""
        if not self.is_converted or any(group.shard.is_meta for group in self.groups):
            self.rehome()  # modules inside may have got memory since
        if not self.is_converted:
            kinds = [f"{param.name} {param.local.dtype} {param.local.device}" for param in self.params]
            raise InvalidUsage(
                f"parameters of {self.name} have several dtypes or devices since a conversion, which all modules "
                f"of the unit need: {', '.join(kinds)}"
            )

    def _count_steps(self) -> None:
        """Count optimizers' steps. On the meta device later: torch can't swap weakly referenced parameters."""
        params = [param.sharded for param in self.params if not param.sharded.is_meta]
        count_steps(params, count=self.scheduler.step_count)

    def prepare_conversion(self) -> None:
        """Reshard, and let torch convert the sharded parameters; `rehome` comes after it."""
        self.reshard()
        self.is_converted = False
        forget_steps(param.sharded for param in self.params)

    def sync_attributes(self) -> None:
        """Take over what users have set on the sharded parameters since the last forward."""
        for group in self.groups:
            for param in group.params:
                param.sync_attributes()
                if param.sharded.requires_grad:
                    group.requires_grad = True  # for good: it is reduced as long as a rank may have gradients

    def set_reshard_after_forward(self, value: bool | int | None) -> None:
        """Set whether it is resharded after a forward, as `fully_shard` takes it. A collective at the
        first use of an int.
        """
        size = self.comm.size
        is_int = value is not None and not isinstance(value, bool)
        if is_int and (not isinstance(value, int) or value < 2 or size % value):
            raise InvalidArgument(
                f"reshard_after_forward must be True, False, None, or an int from 2 that divides {size} ranks, not "
                f"{value!r:.40}",
                op="fully_shard",
            )
        self.reshard_after_forward = value if value is None else bool(value)
        self.neighbours = self.scheduler.split(self.comm, value) if is_int and value < size else None

    # ---- Gathering.

    def unshard(self, *, async_op: bool = False) -> None:
        """All-gather the parameters, and have the modules hold the full ones. A collective.

        Blocks on the host. What is gathered already is kept, unless the shards were written to since.
        `async_op`: only begin; `wait_for_unshard` ends it.
        """
        in_place = self.scheduler.decide_in_place(self)
        if self.is_unsharded and self._is_stale(in_place):
            self.reshard()
        if not self.is_unsharded and self._works is None:
            self._check_converted()
            if not self.scheduler.is_running:
                self.scheduler.side.wait_for_current()
            side, comms = self.scheduler.side, [self.comm]
            order = side.ordered_alone
            if self.neighbours is not None:
                comms.append(self.neighbours)
                order = side.after_current  # which has copied the kept parts
                if self.versions != self.read_versions():
                    self._free()  # parts of older values
            self.scheduler.note(self, "all_gather")
            with order(), tagged(self.tag, *comms):
                works = [
                    group.all_gather(
                        in_place=in_place, custom=self.custom_all_gather, wire=self.wire, neighbours=self.neighbours,
                        async_op=async_op and not self.scheduler.side,
                    )
                    for group in self.groups
                ]  # fmt: skip
                self._works = [work for work in works if work is not None]
            self._gathered_event = self.scheduler.side.record_event()
            if any(group.store != self.device for group in self.groups):
                self.scheduler.offload.note_reads()
        if self.reads_common:
            self.scheduler.begin_reads(self)
        if not async_op:
            self.wait_for_unshard()

    def _is_stale(self, in_place: bool) -> bool:
        """Whether what is gathered can't be used. A backward uses copies as its forward has gathered them."""
        if self.reads_common:
            return not in_place or self.versions != self.read_versions()
        in_backward = self.scheduler.is_running and not self.scheduler.is_in_forward
        return not in_backward and self.versions != self.read_versions()

    def finish_gather(self) -> None:
        """Wait for the all-gather of `unshard`: the full parameters have memory then."""
        if self._works is not None:
            works, self._works = self._works, None
            for work in works:
                work.wait()
            self.scheduler.side.wait_event(self._gathered_event)
            self.is_unsharded = True
            self.versions = self.read_versions()

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather of `unshard`, and have the modules hold the full parameters.

        Raises `InvalidUsage` where nothing is gathered.
        """
        self.finish_gather()
        if not self.is_unsharded:
            raise InvalidUsage(f"{self!r} has nothing gathered: unshard() it")
        if not self.is_registered:
            for param in self.params:
                param.register(param.full)
            self.is_registered = True
            self._full_versions = self._read_full()
            self._sums = []
            if self._forwards < _COMPARED_FORWARDS and self.device.type == "cpu" and self.scheduler.is_in_forward:
                self._forwards += 1
                self._sums = self._read_sums()

    def to_sharded(self) -> None:
        """Have the modules hold the shards, and keep the gathered buffers for the next `unshard`."""
        if self.is_registered:
            for param in self.params:
                param.register(param.sharded)
            self.is_registered = False

    def reshard(self, *, write_back: bool = False) -> None:
        """Have the modules hold the shards, and free the gathered buffers. A local call.

        `write_back`: first copy to the shards what was written to the full parameters.
        """
        self.finish_gather()
        if self.is_unsharded:
            if write_back:
                with torch.no_grad():
                    for group in self.groups:
                        group.write_back()
            self.to_sharded()
            self._free()
            self.is_unsharded = False

    def _free(self) -> None:
        for group in self.groups:
            group.free()

    def reshard_after_pass(self) -> None:
        """Reshard after a forward that a backward follows: keep this rank's part among its neighbours, if any."""
        if self.neighbours is None or not self.is_unsharded:
            self.reshard()
            return
        self.to_sharded()
        for group in self.groups:
            group.keep_post_forward(self.neighbours)
        self.is_unsharded = False

    @contextlib.contextmanager
    def unsharded(self, *, write_back: bool = False):
        """Unshard inside a ``with`` block; reshard after it, if the unit was sharded before."""
        was_unsharded = self.is_unsharded
        self.unshard()
        try:
            yield self
        finally:
            if not was_unsharded:
                self.reshard(write_back=write_back)
            elif write_back:
                with torch.no_grad():
                    for group in self.groups:
                        group.write_back()

    def read_versions(self) -> tuple[int, ...]:
        """Return autograd's counts of the writes to the shards."""
        shards = [group.shard._version for group in self.groups if not group.shard.is_inference()]
        return (*shards, *[param.sharded._version for param in self.params])

    def _read_full(self) -> list[tuple[int, int]]:
        return [(param.full._version, param.full.data_ptr()) for param in self.params]

    def check_not_written(self) -> None:
        """Raise `InvalidUsage`, by name, where a forward has written to a gathered parameter.

        Autograd counts writes to a parameter. Those through ``.data``, which it doesn't count, are found
        on the host in the first forwards, where checksums of the parameters are compared.
        """
        if not self.frees_memory or not self.is_registered:
            return
        before, now = self._full_versions, self._read_full()
        if before == now and self._sums:
            before, now = self._sums, self._read_sums()
        self._sums = []
        if before == now:
            return
        written = next(param for param, old, new in zip(self.params, before, now, strict=True) if old != new)
        raise InvalidUsage(
            f"the forward has written to {written.name} of {self.name}, and the reshard would lose it: leave out what "
            "does that (an Embedding's max_norm), write to a buffer, or give the parameter to ignored_params",
            op="forward", rank=self.world.rank,
        )  # fmt: skip

    def _read_sums(self) -> list[int]:
        return [checksum(param.full) for param in self.params]

    def gathered_storages(self) -> set[int]:
        """Return the addresses of the storages that a reshard empties."""
        return {group.full.untyped_storage()._cdata for group in self.groups if not group.shares_memory}

    # ---- Gradients.

    def add_node(self, node) -> None:
        """Note a node of autograd's graph that reports the end of one forward's backward."""
        self._nodes = [reference for reference in self._nodes if reference() is not None]
        self._nodes.append(weakref.ref(node))

    def live_nodes(self) -> list:
        return [node for reference in self._nodes if (node := reference()) is not None]

    def drop_grads(self) -> None:
        """Drop full gradients that wait for a reduction."""
        for param in self.params:
            param.full.grad = None

    def free_unused_grads(self) -> None:
        """Free the memory of the shards' gradients that have been set to None, until the next reduction."""
        for group in self.groups:
            group.free_unused_output()

    def reduce(self) -> None:
        """Reduce the full gradients into those of the shards: averages, which are added to gradients
        that are there. A collective of all ranks, which blocks on the host; a rank without
        gradients sends zeros. The full gradients are freed. On a GPU the current stream waits.
        """
        self.reduce_grads()
        self.scheduler.side.join()
        self.scheduler.offload.wait()

    @torch.no_grad()
    def reduce_grads(self) -> list[tuple[ShardedParam, bool, bool]]:
        """Reduce as `reduce`, which also waits for the side stream.

        Returns the trainable parameters with two flags: whether this rank had a full gradient, and
        whether the shard had none before.
        """
        reduced = []
        for group in self.groups:
            if group.requires_grad:
                self.scheduler.note(self, "reduce")
                trainable = [param for param in group.params if param.sharded.requires_grad]
                reduced += [(param, param.full.grad is not None, param.sharded.grad is None) for param in trainable]
                self._reduce_group(group)
        if self.reducer is not None:
            with self.scheduler.side.after_current():
                self.reducer.finish(self, reduced)
        return reduced

    def _reduce_group(self, group: ParamGroup) -> None:
        side, arena = self.scheduler.side, group.arena
        nbytes = group.numel * group.reduce_dtype.itemsize
        block = arena.acquire(nbytes)
        flat = block.memory[:nbytes].view(group.reduce_dtype)
        group.pack_grads(flat)
        is_new = all(param.sharded.grad is None for param in group.params)
        grads = group.take_output() if is_new else torch.empty(group.part, dtype=group.dtype, device=self.device)
        out = grads
        if group.reduce_dtype != group.dtype:
            out = torch.empty(group.part, dtype=group.reduce_dtype, device=self.device)
        side.hold(out, grads)
        with side.after_current(), tagged(self.tag, *self._comms):
            if self.reducer is not None:
                self.reducer.reduce(self, group, flat, out)
            else:
                reduce(flat, out, self.ranks, self.stages)
            arena.release(block)
            if out is not grads:
                grads.copy_(out)
            if group.store != self.device:
                grads = self.scheduler.offload.to_host(grads, group)
            group.store_grads(grads)

    # ---- Forward of several modules.

    def leave(self, module: nn.Module) -> bool:
        """Note that a module's forward has ended; return whether all modules have run since the unit was gathered."""
        if len(self.modules) <= 1:
            return True
        self._not_run = self._not_run or set(self.modules)
        self._not_run.discard(module)
        return not self._not_run

    def end_pass(self) -> None:
        """End a forward, of which only some of the modules may have run."""
        self._not_run.clear()
        self.to_sharded()
