"""ZeRO-1 step: an optimizer that is stepped inside of the hook, each rank its shards."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm.registration import BufferRegistrationCache
from ..cuda_state import is_capturing
from ..errors import InvalidArgument, InvalidUsage
from ..kernels import pack, unpack
from ..optim import FusedOptimizer
from ..optimizer_state import increment_steps, random_bit_offsets, same_objects, update_master
from .bucket_state import BucketState, StepBatch
from .found_inf import share_found_inf
from .optimizer_in_backward import OptimizerInBackward
from .parameter_views import move_into_bucket
from .shard_spec import ShardSpec, flat_view
from .shard_state import check_shard_rank, full_state_dict, init_sharded_state, parse_shard, reshard_state

__all__ = ["ShardedStep"]

_ALIGNMENT = 16  # bytes, for the kernels' vector loads and the chunks of a collective


class ShardedStep(OptimizerInBackward):
    """Steps an optimizer of `collectives.optim` inside of a DDP hook, each rank the elements that
    it owns.

    Parameters must be dense. For each bucket the hook leaves this rank's reduced gradients at
    ``shard_spec(...).shard`` and ``.remainder`` of ``bucket.flat`` and calls `update`. Where the
    update must wait for ``optimizer.step()``, which takes the gradients from ``param.grad``, it
    calls `defer` with the item (communicator, bucket, `align`).

    ``optimizer.state`` and ``optimizer.state_dict()`` hold what this rank owns, as tensors of one
    dimension, and their layout under "shard". If the buckets change, as DDP's do after the first
    backward, the state moves between the ranks, one parameter at a time.

    On a GPU the parameters of a bucket are gathered in place where they lie as the bucket has them:
    a bucket of one parameter does. (On the host the engine would stage them, and takes them from a
    shared buffer instead.) `parameters_as_bucket_view`: on both; parameters that don't lie so are
    moved, by `parameter_views`, in ``optimizer.step()``, once a bucket has come in two backwards. A
    bucket that can't be moved is gathered through a buffer; a warning says why.
    """

    items = "buckets"

    def __init__(self, optimizer: FusedOptimizer, *, parameters_as_bucket_view: bool = False):
        super().__init__(optimizer)
        self._views_parameters = parameters_as_bucket_view
        self._registrations = BufferRegistrationCache()  # of buckets' parameters, on CUDA
        share_found_inf(_find_comms)
        self._comm = None  # the newest
        self._buffers = weakref.WeakKeyDictionary()  # communicator -> buffer of the parameters' all-gather

    def forget(self) -> None:
        """Drop what is cached of parameters, groups and state."""
        self._bucket_states: dict[tuple[int, int], BucketState] = {}
        self._strays: list | None = None  # parameters of the optimizer that are in no bucket

    def shard_spec(self, bucket, world_size: int, rank: int, align: int | None = None) -> ShardSpec:
        """Return what a rank owns of a bucket.

        `align`: elements of which a shard is a multiple; None or 0: 16 bytes.
        """
        return ShardSpec(bucket.flat.numel(), world_size, align or _ALIGNMENT // bucket.flat.element_size(), rank)

    def begin(self) -> None:
        super().begin()
        self._registrations.begin_round()

    def step(self, closure=None, **others) -> None:
        super().step(closure, **others)
        if self._views_parameters:
            self._move_parameters()

    # ---- What waits for optimizer.step().

    def _step_item(self, item, *, scale, clip, found) -> None:
        comm, bucket, align = item
        factors = {} if scale is None else {"grad_scale": scale, "divide": True}
        if clip is not None:
            factors["clip"] = clip
        self.update(comm, bucket, found=found, from_grads=True, align=align, **factors)

    def _check_unscaled(self) -> None:
        raise InvalidUsage(
            "scaler.unscale_(optimizer) was called, and a rank has only its part of the averaged gradients, so that a "
            "norm taken of them would be wrong: leave unscale_ out, and clip with the hook's max_norm"
        )

    def _unreduced(self) -> list:
        if self._strays is None:
            self._strays = self._outside({id(param) for each in self._bucket_states.values() for param in each.params})
        return self._strays

    # ---- One bucket.

    @torch.no_grad()
    def update(
        self, comm, bucket, *, grad_scale=1.0, clip=1.0, divide=False, found=None, from_grads=False, align=None,
        unused=(), maybe_unused=None,
    ) -> int:  # fmt: skip
        """Step what this rank owns of a bucket, and all-gather the parameters.

        Returns the bytes that this rank sends. The averaged gradients are at
        ``shard_spec(...).shard`` and ``.remainder`` of ``bucket.flat``; with `from_grads` in
        ``param.grad``, and parameters without one aren't stepped. `grad_scale` and `clip`: factors
        of the gradients, numbers or tensors of one element; `divide`: by `grad_scale`. `unused`:
        indices in the bucket of parameters that have a gradient on no rank; they aren't stepped.
        `maybe_unused`: indices of parameters of which only a GPU knows that, each with a tensor of
        one fp32 element: 0 where some rank has a gradient. `found`: where it isn't 0 (a number,
        `Statistics` or tensor of one element) nothing changes. All arguments, tensors included,
        must have the same values on all ranks.

        On the host the update is done when this returns; on a GPU it is queued on torch's current
        stream. The first calls for a bucket agree on the state's layout, which blocks. Raises
        `InvalidArgument` for parameters that the optimizer doesn't have or that aren't dense, and
        for state of other ranks; nothing is written then.
        """
        bucket_state = self._get_bucket_state(comm, bucket, align)
        optimizer = self.optimizer
        found = optimizer._parse_found_nonfinite(found)
        sent = 0
        if found is not True:
            scalars = {"grad_scale": grad_scale, "clip": clip, "divide": divide}
            plans = []  # all is checked before anything is written
            for part in bucket_state.group_slices:
                group = optimizer.param_groups[part.number]
                for key, members, skipped in self._launches(bucket_state, part, from_grads, unused, maybe_unused):
                    batch = self._get_batch(bucket_state, part, group, bucket, from_grads, key, members)
                    each = found if skipped is None or found is None else found + skipped
                    each = skipped if each is None else each
                    options = optimizer._step_arguments(group, bucket_state.device, batch.params, scalars, each)
                    plans.append((batch, batch.plan(optimizer, group, options), options))
            for batch, launch, options in plans:
                if launch is not None:
                    launch(checked=True)
                increment_steps(batch.steps, options["found_nonfinite"], batch.one)
            increment_version(bucket_state.versioned)
            if bucket_state.gathers:
                sent = self._all_gather_params(comm, bucket_state)
            for batch, _, _ in plans:
                batch.versions = [param._version for param in batch.mastered]
        self._comm = comm
        bucket_state.updates += 1
        self.applied = True
        self._divided = divide
        optimizer._opt_called = True  # lr schedulers ask for it
        return sent

    def _get_bucket_state(self, comm, bucket, align) -> BucketState:
        """Return the state of a bucket: the last step's where it still matches.

        Reshards the optimizer's if needed.
        """
        spec = self.shard_spec(bucket, comm.size, comm.rank, align)
        key = (bucket.index, id(bucket.params[0]))
        found = self._bucket_states.get(key)
        if found is None or not found.matches(bucket, spec):
            in_place = self._views_parameters or not comm._on_host
            before, found = found, BucketState(bucket, spec, self._find_groups(bucket), in_place=in_place)
            same_fields = before is not None and before.shard_fields == found.shard_fields
            if same_fields and same_objects(before.params, found.params):
                # Parameters have moved, on this rank perhaps alone.
                found.shards, found.stays = before.shards, before.stays
            here = set(map(id, found.params))
            for old, other in list(self._bucket_states.items()):  # DDP has made its buckets again
                if not here.isdisjoint(map(id, other.params)):
                    self._bucket_states.pop(old).drop_views()
            self._bucket_states[key] = found
            self._strays = None
        state = self.optimizer.state
        if not same_objects([state[param].get("shard") for param in found.params], found.shards):
            reshard_state(comm, self.optimizer, found)
        return found

    def _find_groups(self, bucket) -> list[tuple[int, int]]:
        """Return the param group of each of a bucket's parameters, and its index there."""
        places = self._positions()
        missing = [at for at, param in enumerate(bucket.params) if id(param) not in places]
        if missing:
            names = bucket.names()
            shown = ", ".join(names[at] for at in missing[:8]) + (" and more" if len(missing) > 8 else "")
            raise InvalidArgument(
                f"the hook's optimizer doesn't have {shown}: give it all parameters that DDP synchronises, or freeze "
                "these (requires_grad=False)"
            )
        return [places[id(param)] for param in bucket.params]

    @staticmethod
    def _launches(bucket_state, part, from_grads, unused, maybe_unused):
        """Return (key of the batch, members, tensor that skips it on a GPU or None) of each launch
        of a group.
        """
        members, alone = part.members, []
        if from_grads:
            members = [at for at in members if bucket_state.params[at].grad is not None]
        if unused:
            members = [at for at in members if at not in unused]
        if maybe_unused:
            alone = [at for at in members if at in maybe_unused]
            members = [at for at in members if at not in maybe_unused]
        return [(None, members, None), *((at, [at], maybe_unused[at]) for at in alone)]

    def _get_batch(self, bucket_state, part, group, bucket, from_grads, key, members) -> StepBatch:
        """Return the batch of a launch, with this step's gradients and up-to-date masters."""
        optimizer = self.optimizer
        params = [bucket_state.params[at] for at in members]
        columns = optimizer._columns(group)
        counts = ["step"] if optimizer._counts_steps(group) else []
        keys = [*columns, *(["master_param"] if group["master_weights"] else []), *counts]
        batch = part.batches.get(key)
        if batch is None or not batch.is_current(params, keys, [optimizer.state[param] for param in params]):
            for param, at in zip(params, members, strict=True):
                init_sharded_state(
                    param, optimizer.state[param], columns, bucket_state.spans[at], counts=bool(counts),
                    masters=group["master_weights"],
                )  # fmt: skip
            states = [optimizer.state[param] for param in params]
            positions = [0] * len(bucket_state.params)
            if group["stochastic_rounding"]:
                before = optimizer.param_groups[: part.number]
                start = sum(p.numel() for other in before if other["stochastic_rounding"] for p in other["params"])
                indices = [bucket_state.group_places[at][1] for at in members]
                starts = random_bit_offsets(group["params"], indices, start)
                positions = {at: first for at, first in zip(members, starts, strict=True)}
            batch = part.batches[key] = StepBatch(bucket_state, members, params, keys, states, positions)
        batch.set_grads(optimizer._op, columns, bucket.flat, from_grads)
        for param, master, version in zip(batch.mastered, batch.masters, batch.versions, strict=True):
            if master is not None and param._version != version:
                update_master(master, param, group["stochastic_rounding"])
        return batch

    def _all_gather_params(self, comm, bucket_state) -> int:
        """All-gather the updated parameters of a bucket; return the bytes that this rank sends."""
        spec, dtype = bucket_state.spec, bucket_state.params[0].dtype
        nbytes = spec.sharded_numel * dtype.itemsize
        whole = bucket_state.in_place
        if whole is None:
            self._gather_by_buffer(comm, bucket_state, nbytes)
        else:
            if whole.is_cuda:
                self._registrations.observe(comm, whole, lambda: bucket_state.params[0])
            comm.all_gather(whole, bucket_state.own_shard)
        return nbytes // spec.world_size * (spec.world_size - 1)

    def _gather_by_buffer(self, comm, bucket_state, nbytes: int) -> None:
        spec, dtype = bucket_state.spec, bucket_state.params[0].dtype
        buffer = self._buffers.get(comm)
        if buffer is None or buffer.numel() < nbytes:
            for each in self._bucket_states.values():
                each.gather_views = None
            buffer = self._buffers.pop(comm, None)
            del buffer  # before the larger one is allocated
            buffer = self._buffers[comm] = comm.empty(nbytes, torch.uint8)
        if bucket_state.gather_views is None or bucket_state.gather_views[0] is not buffer:
            whole = buffer[:nbytes].view(dtype)
            bucket_state.gather_views = (buffer, whole, whole[spec.shard])
        _, whole, own = bucket_state.gather_views
        pack(bucket_state.own_table, whole)
        comm.all_gather(whole, own)
        unpack(whole, bucket_state.remote_table)

    # ---- Parameters as views of their buckets.

    @property
    def gathered_in_place(self) -> tuple[int, int]:
        """The number of buckets whose parameters are gathered in place, and of all that are gathered."""
        gathered = [each for each in self._bucket_states.values() if each.gathers]
        return sum(each.in_place is not None for each in gathered), len(gathered)

    @torch.no_grad()
    def _move_parameters(self) -> None:
        """Make the parameters of the buckets that have come back views of these, where they aren't.

        DDP frees its first buckets after one backward, so that a bucket's first one is left out.
        """
        due = [
            each for each in self._bucket_states.values()
            if each.gathers and each.in_place is None and each.stays is None and each.updates > 1
        ]  # fmt: skip
        if not due or (due[0].device.type == "cuda" and is_capturing(None)):
            return
        optimized = [param for group in self.optimizer.param_groups for param in group["params"]]
        for state in due:
            state.drop_views()
            obstacle = move_into_bucket(self._comm, state.params, state.offsets, state.spec.numel, optimized)
            if obstacle is not None:
                at, state.stays = obstacle
                warnings.warn(
                    f"parameters_as_bucket_view: {state.name(at)} (shape {tuple(state.params[at].shape)}) "
                    f"{state.stays}: its bucket is gathered through a buffer",
                    stacklevel=2,
                )

    # ---- State.

    @torch.no_grad()
    def state_dict(self, full: bool = True, comm=None) -> dict[str, Any]:
        """Return the optimizer's state dict: full, or this rank's shard."""
        return full_state_dict(comm or self._comm, self.optimizer) if full else self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, of any number of ranks, or this rank's shard.

        Raises `InvalidArgument` for another rank's shard. If no bucket has come yet, the first
        bucket raises it.
        ``optimizer.load_state_dict`` does the same without the check.
        """
        if self._comm is not None:
            for number, state in state_dict["state"].items():
                if "shard" in state:
                    check_shard_rank(state["shard"], self._comm.size, self._comm.rank, f"parameter {number}")
        self.optimizer.load_state_dict(state_dict)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Update this rank's masters from the parameters; see the optimizer's `refresh_masters`."""
        self.optimizer._refresh_masters(_local_shards)


def _local_shards(param, state) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parts of this rank's master shard, each with the parameter's elements at its place."""
    master = state["master_param"]
    if "shard" not in state:
        return [(master, param)]
    offset, spec, _ = parse_shard(state["shard"])
    spans = spec.local_spans(offset, param.numel())
    parts = master.split([count for _, count in spans])
    return [(part, flat_view(param, *span)) for part, span in zip(parts, spans, strict=True)]


def _find_comms(optimizer) -> list:
    """Return the communicator of the buckets whose update waits for an optimizer's step."""
    step = optimizer._sharded if isinstance(optimizer, FusedOptimizer) else None
    return [comm for comm, _, _ in step._pending[:1]] if isinstance(step, ShardedStep) else []
