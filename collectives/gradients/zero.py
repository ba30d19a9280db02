"""The optimizer's step, bucket by bucket: what the hook calls, and what ``optimizer.step()`` becomes."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..errors import InvalidArgument, InvalidUsage
from ..kernels import Statistics, pack, unpack
from ..optim import HALF_DTYPES, FusedOptimizer, increment_steps, random_bit_offsets, same_objects, update_master
from .bucket_state import Batch, Laid
from .shard_spec import KEYS, Ownership, assembled, check_ranks, cut, described, fill, part_of, read

__all__ = ["ShardedStep", "refuse_arguments"]

_ALIGNMENT = 16  # bytes: what a vector load of the kernels and a chunk of the wire want


def refuse_arguments(closure, others: dict, by: str, whose: str) -> None:
    """Raise `InvalidArgument` for arguments of an optimizer's step() that only ends a step."""
    if closure is not None:
        raise InvalidArgument("the optimizer is stepped inside of the backward: step() takes no closure")
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InvalidArgument(
            f"the optimizer is stepped by {by}, so step() takes no {given[0]}: use {whose} max_norm, or a GradScaler"
        )


class ShardedStep:
    """Steps an optimizer of `collectives.optim` inside of a DDP hook, each rank the elements that it owns.

    `optimizer`: a `collectives.optim.SGD`, `Adam` or `AdamW`, whose ``step()`` from then on only ends the step; see
    `step`. Parameters must be dense. For each bucket the hook leaves this rank's reduced gradients at
    ``shares(...).own`` and ``.rest`` of ``bucket.flat`` and calls `update`, or `defer` where the update must wait for
    ``optimizer.step()``.

    ``optimizer.state`` and ``optimizer.state_dict()`` hold what this rank owns, as tensors of one dimension, and the
    layout they belong to under "shard". Where the buckets change, as DDP's do after the first backward, the state moves
    between the ranks, one parameter at a time. Raises `InvalidArgument` for another optimizer.
    """

    def __init__(self, optimizer):
        if not isinstance(optimizer, FusedOptimizer):
            raise InvalidArgument(
                "the optimizer that a hook steps must be a collectives.optim.SGD, Adam or AdamW, not a "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            )
        self.optimizer = optimizer
        optimizer._sharded = self
        self.applied = False  # in the backward that has begun last
        self._divided = False  # the applied update undid a GradScaler's scale
        self._pending: list[tuple] = []
        self._norm = self._max_norm = None
        self._founds: list = []
        self._comm = None  # the newest
        self._buffers = weakref.WeakKeyDictionary()  # communicator -> bytes that parameters travel through
        self._strays: list | None = None
        self.forget()

    def forget(self) -> None:
        """Look at parameters, groups and state anew at the next bucket. For the optimizer, which has got others."""
        self._laid: dict[tuple[int, int], Laid] = {}
        self._strays = None

    @property
    def pending(self) -> int:
        """The number of buckets whose update waits for ``optimizer.step()``."""
        return len(self._pending)

    def shares(self, bucket, size: int, rank: int, align: int | None = None) -> Ownership:
        """Tell what a rank of `size` owns of a bucket. `align`: parts are multiples of so many elements (16 bytes)."""
        return Ownership(bucket.flat.numel(), size, align or _ALIGNMENT // bucket.flat.element_size(), rank)

    # ---- A backward.

    def begin(self) -> None:
        """Begin a backward, at its first bucket. Raises `InvalidUsage` where the last one's updates still wait."""
        if self._pending:
            raise InvalidUsage(
                f"the updates of {len(self._pending)} buckets still wait for optimizer.step(): call it after each "
                "backward that synchronises (scaler.step(optimizer) with a GradScaler), or drop them with "
                "ShardedStep.discard()"
            )
        self.applied = self._divided = False

    def discard(self) -> None:
        """Drop the updates that wait, as where an error came between the backward and ``optimizer.step()``."""
        self._pending, self._founds = [], []
        self._norm = self._max_norm = None

    def defer(self, comm, bucket, norm=None, max_norm=None, found=None, *, align=None) -> None:
        """Leave a bucket's update to ``optimizer.step()``, which then takes its gradients from ``param.grad``.

        `norm`: of all averaged gradients, before unscaling; with `max_norm` they are clipped by it. `found`: how many
        of them aren't finite, over all ranks; not 0: the step is left out. Numbers, `Statistics` or tensors of one
        element, final when this is called; those of the whole backward may come with its last bucket alone. Where
        `found` isn't 0 the bucket's first element becomes NaN, so that the GradScalers of all ranks, each of which
        looks at its own rank's gradients, find it and choose the same scale.
        """
        self._pending.append((comm, bucket, align))
        if norm is not None:
            self._norm, self._max_norm = norm, max_norm
        if found is not None:
            self._founds.append(found)
            found = FusedOptimizer._found(found)
            with torch.no_grad():
                if found is True:
                    bucket.flat[:1].fill_(torch.nan)
                elif found is not None:
                    bucket.flat[:1].masked_fill_(found.to(bucket.flat.device).reshape(1) != 0, torch.nan)

    def step(self, closure=None, **others) -> None:
        """End a step: ``optimizer.step()`` comes here. Applies the updates that wait; done ones it leaves alone.

        Reads what a GradScaler sets (``optimizer.grad_scale``, by which is divided, and ``found_inf``, of all ranks).
        Blocks as the collectives do. Raises `InvalidUsage` where there was no synchronised backward since the last
        step, where ``scaler.unscale_`` was called, and where a parameter has a gradient and is in no bucket;
        `InvalidArgument` for a closure and for arguments.
        """
        refuse_arguments(closure, others, "its DDP hook", "the hook's")
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if self._pending:
            if found_inf is not None and scale is None:
                raise InvalidUsage(
                    "scaler.unscale_(optimizer) was called, and a rank has only its part of the averaged gradients, so "
                    "that a norm taken of them would be wrong: leave unscale_ out, and clip with the hook's max_norm"
                )
            self._step_pending(scale, found_inf)
        elif not self.applied:
            raise InvalidUsage(
                "no synchronised backward since the last step: the optimizer is stepped inside of the DDP hook, once "
                "for each backward outside of no_sync()"
            )
        elif found_inf is not None and not self._divided:
            raise InvalidUsage(
                "a GradScaler steps this optimizer, but its updates were applied in the backward by gradients that "
                "were still scaled: make the GradScaler before the first backward"
            )
        self.applied = self._divided = False
        self._check_strays()

    def _step_pending(self, scale, found_inf) -> None:
        scales = {} if scale is None else {"grad_scale": scale, "divide": True}
        if self._norm is not None and self._max_norm is not None:
            norm = self._norm.norm if isinstance(self._norm, Statistics) else self._norm
            if not isinstance(norm, torch.Tensor):
                norm = torch.tensor(float(norm), dtype=torch.float64)
            norm = norm.to(torch.float64) if scale is None else norm.to(torch.float64) / scale.to(norm.device)
            scales["clip"] = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        found = FusedOptimizer._found(*self._founds, found_inf)
        comm = self._pending[0][0]
        if found_inf is not None and comm.size > 1:
            # Found in one rank's gradients; ranks that differed here would go on with different parameters.
            if isinstance(found, torch.Tensor):
                everyones = found.to(comm.device, torch.float32).reshape(1).clone()
            else:
                everyones = torch.full((1,), float(found is True), device=comm.device)
            comm.all_reduce(everyones, "max")
            found = everyones
        for comm, bucket, align in self._pending:
            self.update(comm, bucket, found=found, from_grads=True, align=align, **scales)
        self.discard()

    def _check_strays(self) -> None:
        """Refuse to forget parameters that have a gradient and are in none of the buckets."""
        if self._strays is None:
            seen = {id(param) for laid in self._laid.values() for param in laid.params}
            self._strays = [
                (param, f"parameter {index} of group {number} (shape {tuple(param.shape)})")
                for number, group in enumerate(self.optimizer.param_groups)
                for index, param in enumerate(group["params"])
                if id(param) not in seen
            ]
        for param, name in self._strays:
            if param.grad is not None:
                raise InvalidUsage(
                    f"{name} has a gradient but was in no bucket of the hook, so that it was not stepped: give it an "
                    "optimizer of its own, or, if it is another DDP module's, register the hook there with this state"
                )

    # ---- One bucket.

    @torch.no_grad()
    def update(
        self, comm, bucket, *, grad_scale=1.0, clip=1.0, divide=False, found=None, from_grads=False, align=None,
        unused=(), doubtful=None,
    ) -> int:  # fmt: skip
        """Step what this rank owns of a bucket, and gather the parameters; give the bytes that this rank has sent.

        The averaged gradients lie at ``shares(...).own`` and ``.rest`` of ``bucket.flat``; `from_grads`: in
        ``param.grad``, and parameters without one aren't stepped. `grad_scale` and `clip`: their factors, numbers or
        tensors of one element; `divide`: by `grad_scale`. `unused`: places in the bucket of parameters that no rank has
        a gradient of; they aren't stepped; `doubtful`: places of those of which only a GPU knows, each with a tensor of
        one fp32 element, 0 where some rank has one. `found`: where it isn't 0 (a number, `Statistics` or tensor
        of one element) nothing changes. All arguments, tensors included, must say the same on all ranks.

        On the host it is done when this returns; on a GPU it is queued on torch's current stream. The first calls for a
        bucket agree on the state's layout, which waits. Raises `InvalidArgument` for parameters that the optimizer
        doesn't have or that aren't dense, and for state of other ranks; nothing is written then.
        """
        laid = self._lay(comm, bucket, align)
        optimizer = self.optimizer
        found = optimizer._found(found)
        sent = 0
        if found is not True:
            scalars = {"grad_scale": grad_scale, "clip": clip, "divide": divide}
            plans = []  # all is checked before anything is written
            for share in laid.shares:
                group = optimizer.param_groups[share.number]
                for key, members, left_out in self._launches(laid, share, from_grads, unused, doubtful):
                    batch = self._batch(laid, share, group, bucket, from_grads, key, members)
                    each = found if left_out is None or found is None else found + left_out
                    each = left_out if each is None else each
                    how = optimizer._how(group, laid.device, batch.params, scalars, each)
                    plans.append((batch, batch.plan(optimizer, group, how), how))
            for batch, launch, how in plans:
                if launch is not None:
                    launch(checked=True)
                increment_steps(batch.steps, how["found_nonfinite"], batch.one)
            increment_version(laid.counted)
            if laid.owned.ranks > 1 and laid.owned.part:
                sent = self._gather(comm, laid)
            for batch, _, _ in plans:
                batch.versions = [param._version for param in batch.mastered]
        self._comm = comm
        self.applied = True
        self._divided = divide
        optimizer._opt_called = True  # lr schedulers ask for it
        return sent

    def _lay(self, comm, bucket, align) -> Laid:
        """What is known of a bucket: the last step's, where it still holds, with the state laid out accordingly."""
        owned = self.shares(bucket, comm.size, comm.rank, align)
        key = (bucket.index, id(bucket.params[0]))
        laid = self._laid.get(key)
        if laid is None or not laid.holds(bucket, owned):
            before, laid = laid, Laid(bucket, owned, self._groups_of(bucket))
            if before is not None and before.wanted == laid.wanted and same_objects(before.params, laid.params):
                laid.shards = before.shards  # parameters have moved, on this rank perhaps alone
            here = set(map(id, laid.params))
            for old, other in list(self._laid.items()):  # DDP has made its buckets again
                if not here.isdisjoint(map(id, other.params)):
                    del self._laid[old]
            self._laid[key] = laid
            self._strays = None
        state = self.optimizer.state
        if not same_objects([state[param].get("shard") for param in laid.params], laid.shards):
            self._adopt(comm, laid)
        return laid

    def _groups_of(self, bucket) -> list[tuple[int, int]]:
        """The group of each of a bucket's parameters, and its place in there."""
        where = {
            id(param): (number, index)
            for number, group in enumerate(self.optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }
        missing = [at for at, param in enumerate(bucket.params) if id(param) not in where]
        if missing:
            names = bucket.names()
            shown = ", ".join(names[at] for at in missing[:8]) + (" and more" if len(missing) > 8 else "")
            raise InvalidArgument(
                f"the hook's optimizer doesn't have {shown}: give it all parameters that DDP synchronises, or freeze "
                "these (requires_grad=False)"
            )
        return [where[id(param)] for param in bucket.params]

    @staticmethod
    def _launches(laid, share, from_grads, unused, doubtful):
        """Give what is stepped by a launch each: its batch's key, the members, and what leaves them out on a GPU."""
        members, alone = share.members, []
        if from_grads:
            members = [at for at in members if laid.params[at].grad is not None]
        if unused:
            members = [at for at in members if at not in unused]
        if doubtful:
            alone = [at for at in members if at in doubtful]
            members = [at for at in members if at not in doubtful]
        return [(None, members, None), *((at, [at], doubtful[at]) for at in alone)]

    def _batch(self, laid, share, group, bucket, from_grads, key, members) -> Batch:
        optimizer = self.optimizer
        params = [laid.params[at] for at in members]
        columns = optimizer._columns(group)
        counts = ["step"] if optimizer._counts_steps(group) else []
        keys = [*columns, *(["master_param"] if group["master_weights"] else []), *counts]
        batch = share.batches.get(key)
        if batch is None or not batch.current(params, keys, [optimizer.state[param] for param in params]):
            for param, at in zip(params, members, strict=True):
                fill(param, optimizer.state[param], group, columns, bool(counts), laid.pieces[at], laid.name(at))
            states = [optimizer.state[param] for param in params]
            positions = [0] * len(laid.params)
            if group["stochastic_rounding"]:
                before = optimizer.param_groups[: share.number]
                start = sum(p.numel() for other in before if other["stochastic_rounding"] for p in other["params"])
                starts = random_bit_offsets(group["params"], [laid.where[at][1] for at in members], start)
                positions = {at: first for at, first in zip(members, starts, strict=True)}
            batch = share.batches[key] = Batch(laid, members, params, keys, states, positions)
        batch.give(optimizer._op, columns, bucket.flat, from_grads)
        for param, master, version in zip(batch.mastered, batch.masters, batch.versions, strict=True):
            if master is not None and param._version != version:
                update_master(master, param, group["stochastic_rounding"])
        return batch

    def _gather(self, comm, laid) -> int:
        owned, dtype = laid.owned, laid.params[0].dtype
        nbytes = owned.whole * dtype.itemsize
        buffer = self._buffers.get(comm)
        if buffer is None or buffer.numel() < nbytes:
            for each in self._laid.values():
                each.through = None
            buffer = self._buffers.pop(comm, None)
            del buffer  # before the larger one comes
            buffer = self._buffers[comm] = comm.empty(nbytes, torch.uint8)
        if laid.through is None or laid.through[0] is not buffer:
            whole = buffer[:nbytes].view(dtype)
            laid.through = (buffer, whole, whole[owned.own])
        _, whole, own = laid.through
        pack(laid.mine, whole)
        comm.all_gather(whole, own)
        unpack(whole, laid.theirs)
        return nbytes // owned.ranks * (owned.ranks - 1)

    # ---- State.

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt(self, comm, laid) -> None:
        """Bring the state of a bucket's parameters into its layout. All ranks do, or all raise."""
        states = [self.optimizer.state[param] for param in laid.params]
        wrong = None
        told = []
        for at, (param, state) in enumerate(zip(laid.params, states, strict=True)):
            try:
                told.append(described(param, state, laid.owned, laid.name(at)))
            except InvalidArgument as error:
                wrong = wrong or error
        if comm.size > 1:
            hashed = zlib.crc32(repr((laid.owned[:3], told)).encode())
            facts = torch.tensor([hashed, -hashed, wrong is not None], dtype=torch.int64).to(comm.device)
            comm.all_reduce(facts, "max")
            most, least, any_wrong = facts.tolist()
            if wrong is None and (any_wrong or most != -least):
                raise InvalidUsage(
                    "the ranks' optimizer states don't belong together"
                    + (", as another rank has found" if any_wrong else "")
                    + ": load the same full state on all ranks, or on each rank its own shard of the same moment"
                )
        if wrong is not None:
            raise wrong
        for at, (param, state) in enumerate(zip(laid.params, states, strict=True)):
            known = state.get("shard")
            if known is None or known.tolist() != laid.wanted[at]:
                for key in KEYS:
                    if isinstance(state.get(key), torch.Tensor):
                        if state[key].is_cuda:  # made on the stream of the bucket that had the parameter before
                            state[key].record_stream(torch.cuda.current_stream(state[key].device))
                        full = assembled(comm, param, state[key], known)
                        state[key] = cut(full, laid.pieces[at], state[key].dtype)
                        del full
                state["shard"] = torch.tensor(laid.wanted[at], dtype=torch.int64, device="cpu")
        laid.shards = [state["shard"] for state in states]

    @torch.no_grad()
    def state_dict(self, full: bool = True, comm=None) -> dict[str, Any]:
        """Give the optimizer's state dict; with `full` as if it had not been sharded, which all ranks must call.

        `full`: in the format of torch's optimizer of that name, on every rank; it blocks until all ranks have come.
        Otherwise what ``optimizer.state_dict()`` gives: this rank's shard, which only the same rank of as many can
        load. `comm`: the communicator to gather by, where no bucket has come yet.
        """
        found = self.optimizer.state_dict()
        if not full:
            return found
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        comm = comm or self._comm
        for number, param in enumerate(params):
            state = found["state"].get(number)
            if state is None or "shard" not in state:
                continue
            if comm is None:
                raise InvalidUsage(
                    "the state is sharded and no bucket has come yet: give state_dict the communicator of its ranks"
                )
            known = state["shard"]
            described(param, state, Ownership(0, comm.size, 1, comm.rank), f"parameter {number}")
            found["state"][number] = {
                key: assembled(comm, param, value, known) if key in KEYS and value is not None else value
                for key, value in state.items()
                if key != "shard"
            }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state dict, of any number of ranks, or this rank's shard. Raises `InvalidArgument` for others'.

        Where no bucket has come yet that is only seen at the first one. ``optimizer.load_state_dict`` does the same
        without the look.
        """
        if self._comm is not None:
            for number, state in state_dict["state"].items():
                if "shard" in state:
                    check_ranks(state["shard"], self._comm.size, self._comm.rank, f"parameter {number}")
        self.optimizer.load_state_dict(state_dict)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Let this rank's masters follow their parameters; see the optimizer's `refresh_masters`."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param] if param in self.optimizer.state else {}
                master = state.get("master_param")
                if master is None or param.dtype not in HALF_DTYPES:
                    continue
                pieces = [(0, param.numel())]
                if "shard" in state:
                    offset, owned, _ = read(state["shard"])
                    pieces = owned.pieces(offset, param.numel())
                else:
                    master = part_of(master, 0, param.numel())
                at = 0
                for first, count in pieces:
                    update_master(master[at : at + count], part_of(param, first, count), group["stochastic_rounding"])
                    at += count
