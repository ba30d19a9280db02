"""Parameters of a unit: the two forms of a parameter, and the flat buffers of a group of parameters.

A parameter is *sharded* outside of forward and backward: a Parameter whose data is a RaggedTensor of
this rank's part, which optimizers step. It is *full* inside: a plain Parameter that views the group's
gathered buffer. Both objects live as long as the unit; the module holds one of them.
"""

from __future__ import annotations

import logging
import sys
import warnings

import torch
from torch import nn

from ..comm import all_gather_object, allocate_common
from ..cuda_state import is_capturing
from ..errors import InvalidUsage
from ..kernels import pack
from ..torch_compat import can_swap_storage_memory, storage_use_count, swap_storage_memory, untraced
from .arena import Arena, Block
from .layout import plan_layout
from .mesh import Ranks
from .placement import RaggedShard
from .policies import dtypes_of
from .ragged_tensor import RaggedTensor

__all__ = ["ParamGroup", "ShardedParam", "as_real", "checksum"]


_logger = logging.getLogger("collectives.sharded")
_UNSHARED = 2  # uses of an object, or a storage, that has one owner: the owner, and the question itself


class ShardedParam:
    """One parameter.

    Attributes:
        names: Its name in the unit's module, then those of tied weights.
        places: The (module, attribute) pairs that hold it.
        shape: Its shape.
        placement: How it is divided over the ranks.
        sharded: The Parameter of this rank's part.
        full: The Parameter of the whole, which has memory while the group is gathered.
        offset: Its first element in the group's flat buffer.
        start: The first element of this rank's part in the group's flat shard.
        requires_grad: As it was when both forms agreed last.
    """

    __slots__ = ("full", "names", "offset", "placement", "places", "requires_grad", "shape", "sharded", "start")

    def __init__(self, names: list[str], places: list[tuple[nn.Module, str]], shape: torch.Size):
        self.names = names
        self.places = places
        self.shape = shape

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, in the flat shard."""
        return self.sharded._local_tensor

    def view_full(self, flat: torch.Tensor) -> torch.Tensor:
        """View the whole parameter in a flat buffer of the whole group."""
        return flat[self.offset : self.offset + self.shape.numel()].view(self.shape)

    def view_shard(self, flat: torch.Tensor) -> torch.Tensor:
        """View this rank's part in a flat shard."""
        local = self.local
        return flat[self.start : self.start + local.numel()].view(local.shape)

    def register(self, param: nn.Parameter) -> None:
        """Have the modules hold one of the two forms, in place of the other one.

        What else a module holds, as in torch.func.functional_call, stays.
        """
        other = self.full if param is self.sharded else self.sharded
        for module, attribute in self.places:
            if module._parameters.get(attribute) is other:
                module._parameters[attribute] = param

    def sync_attributes(self) -> None:
        """Give both forms what users have set on one of them: requires_grad, and hooks of its gradient."""
        sharded, full = self.sharded, self.full
        if not sharded.requires_grad is full.requires_grad is self.requires_grad:
            self.requires_grad = not self.requires_grad
            sharded.requires_grad_(self.requires_grad)
            full.requires_grad_(self.requires_grad)
        if full._backward_hooks is not sharded._backward_hooks:
            if full._backward_hooks is None:
                full._backward_hooks = sharded._backward_hooks  # one dictionary: a handle removes from both
            elif sharded._backward_hooks is None:
                sharded._backward_hooks = full._backward_hooks


class ParamGroup:
    """The parameters of a unit with one dtype, trainable or frozen, in one flat buffer.

    Attributes:
        params: The parameters.
        dtype: That of the sharded parameters; `gather_dtype`, `reduce_dtype`: those of the full
            parameters and of the reduction of their gradients.
        layout: Where the parameters lie in the flat buffer.
        part: Elements of a rank's part of the flat buffer; `numel`: of the whole.
        shard: This rank's part, which the sharded parameters view.
        full: The gathered buffer, which the full parameters view. Its storage has memory while the
            group is gathered.
        store: The device of the shard.
        reads_common: Whether it is gathered, and the full parameters lie in the ranks' shards themselves.
    """

    def __init__(
        self, members: list[tuple[ShardedParam, nn.Parameter]], ranks: Ranks, arena: Arena, *,
        gather_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, block: int, store: torch.device,
        pinned: bool, multiple: int,
    ):  # fmt: skip
        self.params = [param for param, _ in members]
        self.ranks, self.arena = ranks, arena
        self.size = ranks.comm.size
        self.rank = ranks.comm.rank
        originals = [original for _, original in members]
        self.dtype, self.requires_grad = originals[0].dtype, originals[0].requires_grad
        self.gather_dtype, self.reduce_dtype = dtypes_of(self.dtype, gather_dtype, reduce_dtype)
        self.store, self._pinned = store, pinned
        self._wire = None  # the `QuantizedAllGather` in whose format the parameters were gathered
        sizes = [original.numel() for original in originals]
        rows = [max(1, original.shape[1:].numel() if original.dim() else 1) for original in originals]
        narrowest = min(dtype.itemsize for dtype in (self.dtype, self.gather_dtype, self.reduce_dtype))
        grains = [row * block if row > 1 else 1 for row in rows]
        self.layout = plan_layout(
            sizes, grains, self.size, rows=rows, itemsize=narrowest, multiple=max(1, multiple)
        )
        cut = [param.name for param, fits in zip(self.params, self.layout.by_grains, strict=True) if not fits]
        if block > 1 and cut and self.rank == 0:
            warnings.warn(
                f"blocks of {block} rows don't fit into the equal parts of {self.size} ranks without much padding: "
                f"{', '.join(cut[:8])}{' and others' if len(cut) > 8 else ''} have blocks on two ranks each",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        self.part = self.layout.part
        self.numel = self.part * self.size
        self._block: Block | None = None
        self._common: torch.Tensor | None = None  # the parts of all ranks, in memory of them all
        self._tried_common = False
        self._own_address = 0  # of this rank's part there
        self.reads_common = False
        self._kept: Block | None = None  # this rank's part among its neighbours
        self._grads: torch.Tensor | None = None  # flat, of the last reduction
        self._grad_views: list[RaggedTensor] = []  # of it, the gradients
        self._viewed: list[ShardedParam] = []  # whose gradients they are
        self._place(originals, rows)
        self._make_shards(originals)
        self._make_full(originals)

    # ---- Memory.

    def _place(self, originals, rows) -> None:
        for index, (param, original) in enumerate(zip(self.params, originals, strict=True)):
            cuts = self.layout.cuts(index, original.numel(), self.size)
            by_rows = self.layout.by_rows[index] and original.dim() > 0
            bounds = [-(-cut // rows[index]) for cut in cuts] if by_rows else cuts
            if by_rows and not original.numel() and len(original):
                bounds = [0] + [len(original)] * self.size  # rows of no elements are all the first rank's
            param.placement = RaggedShard(bounds, by_rows)
            param.offset = self.layout.offsets[index]
            is_empty = cuts[self.rank] == cuts[self.rank + 1]
            param.start = 0 if is_empty else max(param.offset - self.rank * self.part, 0)

        ends = [*self.layout.offsets, self.numel]
        begins = [0, *(param.offset + param.shape.numel() for param in self.params)]
        self._gaps = [slice(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]

    def _make_shards(self, originals) -> None:
        self.shard = self._allocate_shard(originals[0].is_meta)
        for param, original in zip(self.params, originals, strict=True):
            shape = param.placement.local_shape(original.shape, self.rank)
            local = self.shard[param.start : param.start + shape.numel()].view(shape)
            if not local.is_meta:
                local.copy_(param.placement.cut(original.detach(), self.rank))
            data = RaggedTensor.from_local(local, original.shape, self.ranks.mesh, param.placement)
            param.sharded = nn.Parameter(data, requires_grad=original.requires_grad)
            param.sharded.__dict__.update(original.__dict__)
            if original._backward_hooks:
                param.sharded._backward_hooks = original._backward_hooks
            if original._post_accumulate_grad_hooks:
                param.sharded._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks

    def _allocate_shard(self, is_meta: bool) -> torch.Tensor:
        if is_meta:
            return torch.empty(self.part, dtype=self.dtype, device="meta")
        if self.store == self.ranks.device:
            shard = self.ranks.comm.empty(self.part, dtype=self.dtype)
        else:
            shard = torch.empty(self.part, dtype=self.dtype, device=self.store, pin_memory=self._pinned)
        return shard.zero_()  # padding is sent, too, and in 8 bits it shares a scale with its neighbours

    def _make_full(self, originals) -> None:
        device = "meta" if self.shard.is_meta else self.ranks.device
        if self.shares_memory:
            self.full = self.shard
        else:
            self.full = torch.empty(self.numel, dtype=self.gather_dtype, device=device)
        for param, original in zip(self.params, originals, strict=True):
            param.requires_grad = original.requires_grad
            view = param.view_full(self.full)
            param.full = nn.Parameter(view.data, requires_grad=original.requires_grad)  # a version counter of its own
            param.full.__dict__.update(original.__dict__)
        if not self.shares_memory and not self.full.is_meta:
            self.full.untyped_storage().resize_(0)

    def rehome(self) -> bool:
        """Take the sharded parameters, which got other memory or another dtype, back into one flat shard.

        Returns whether it could: not as long as they have several dtypes or devices.
        """
        data = [param.local for param in self.params]
        kinds = {(local.dtype, local.device) for local in data}
        if all(local.untyped_storage()._cdata == self.shard.untyped_storage()._cdata for local in data):
            return True
        if len(kinds) > 1:
            return False
        dtype, device = data[0].dtype, data[0].device
        wanted = "meta" if device.type == "meta" else self.store.type
        if device.type != wanted:
            raise InvalidUsage(
                f"{self.params[0].name} was moved to {device}, and its unit's shards are on {self.store}: move the "
                "module before it is sharded"
            )
        self.free()
        if dtype != self.dtype:
            follows = [self.gather_dtype == self.dtype, self.reduce_dtype == self.dtype]
            self.gather_dtype = dtype if follows[0] else self.gather_dtype
            self.reduce_dtype = dtype if follows[1] else self.reduce_dtype
            self.dtype = dtype
        self.shard = self._allocate_shard(device.type == "meta")
        self._common, self._tried_common = None, False
        self.drop_output()
        for param, local in zip(self.params, data, strict=True):
            view = param.view_shard(self.shard)
            if not view.is_meta:
                view.copy_(local)
            param.sharded._local_tensor = view
        self._make_full([param.sharded for param in self.params])
        return True

    @property
    def shares_memory(self) -> bool:
        """Whether this rank has all of the parameters, so that the full ones are the shard's memory."""
        return self.size == 1 and self.gather_dtype == self.dtype and self.store == self.ranks.device

    @property
    def casts_grads(self) -> bool:
        """Whether gradients are packed in another dtype than the one that they come in."""
        return self.requires_grad and self.reduce_dtype != self.gather_dtype

    @property
    def is_gathered(self) -> bool:
        return self.shares_memory or self.reads_common or self._block is not None

    # ---- Gathering.

    def all_gather(self, *, in_place=False, custom=None, wire=None, neighbours=None, async_op: bool = False):
        """Gather the parameters. A collective. The first of these ways that can be is taken:

        1. `in_place`, without `wire` and `custom`: on one host let the full parameters lie in the ranks' shards
           themselves. Nothing is copied. The caller keeps the ranks from writing to them meanwhile.
        2. `neighbours`: among the ranks of this communicator, which have kept the parameters between them after the
           forward.
        3. `wire`: in the format of a `QuantizedAllGather`, where it takes fewer bytes.
        4. `custom`: by a user's function.
        5. By the communicator.

        All but the first take memory of the arena. With `async_op` it returns the work in progress.
        """
        if self.is_gathered:
            return None
        if self.shard.is_meta:
            raise InvalidUsage(
                f"{self.params[0].name} is on the meta device: module.to_empty(device=...) gives it memory, and "
                "reset_parameters() or load_state_dict() values"
            )
        if in_place and custom is None and wire is None and self._is_shared():
            swap_storage_memory(self.full.untyped_storage(), self._common.untyped_storage())
            self.reads_common = True
            return None
        self._block = self.arena.fill(self.full.untyped_storage(), self.numel * self.gather_dtype.itemsize)
        if neighbours is not None and self._kept is not None:
            return neighbours.all_gather(self.full, self._view_kept(self._kept, neighbours), async_op=async_op)
        comm = self.ranks.comm
        self._wire = wire if wire is not None and wire.saves(self.gather_dtype) else None
        if self._wire is not None:
            shard = self.shard.to(self.ranks.device, non_blocking=True)
            return wire.gather(comm, shard, self.full, self.arena, async_op=async_op)
        send = self.shard
        if self.gather_dtype != self.dtype or self.store != self.ranks.device:
            send = self.full[self.rank * self.part :][: self.part]
            send.copy_(self.shard, non_blocking=True)
        if self.size == 1:
            return None
        if custom is not None:
            group = self.ranks.mesh.get_group(self.ranks.mesh.ndim - 1)
            return custom(self.full, send, group, async_op)
        return comm.all_gather(self.full, send, async_op=async_op)

    def _is_shared(self) -> bool:
        """Whether the parts of all ranks lie side by side in common memory. The first call is a collective, which
        moves them there.
        """
        if not self._tried_common:
            self._tried_common = True
            self._share_shards()
        if self._common is not None and self.shard.data_ptr() != self._own_address:
            self._common = None  # torch has moved the shard, as share_memory_() does: the ranks copy from now on
        return self._common is not None

    @untraced
    def _share_shards(self) -> None:
        comm, world = self.ranks.comm, self.ranks.world
        if self.gather_dtype != self.dtype or not can_swap_storage_memory():
            return
        nbytes = self.part * self.dtype.itemsize
        memory, reason = allocate_common(comm, nbytes * self.size)
        if world is not comm:  # all ranks wait for each other's reads, or none
            reason = next(filter(None, all_gather_object(world, reason)), "")
        if reason:
            level = logging.WARNING if world.rank == 0 else logging.DEBUG
            _logger.log(level, "the ranks don't share the memory of their shards, and copy them: %s", reason)
            return
        self._common = torch.frombuffer(memory, dtype=self.dtype, count=self.numel)
        own = torch.frombuffer(memory, dtype=self.dtype, count=self.part, offset=self.rank * nbytes)
        own.copy_(self.shard)
        swap_storage_memory(self.shard.untyped_storage(), own.untyped_storage())
        self._own_address = self.shard.data_ptr()
        self.arena.trim()  # of what the gathers until now have used
        comm.barrier()  # all have copied theirs

    def free(self) -> None:
        """Give the gathered buffer's memory, and a part that is kept, back to the arena."""
        if self._kept is not None:
            self.arena.release(self._kept)
            self._kept = None
        if self.reads_common:
            swap_storage_memory(self.full.untyped_storage(), self._common.untyped_storage())
            self.reads_common = False
        if self._block is not None:
            self.arena.drain(self.full.untyped_storage(), self._block)
            self._block = None

    def keep_post_forward(self, neighbours) -> None:
        """Free the gathered buffer, but keep this rank's part among its neighbours for the backward."""
        block = None
        if self._block is not None:
            block = self.arena.acquire(self.numel * self.gather_dtype.itemsize // neighbours.size)
            part = self._view_kept(block, neighbours)
            part.copy_(self.full[neighbours.rank * part.numel() :][: part.numel()])
        self.free()
        self._kept = block

    def _view_kept(self, block: Block, neighbours) -> torch.Tensor:
        nbytes = self.numel * self.gather_dtype.itemsize // neighbours.size
        return block.memory[:nbytes].view(self.gather_dtype)

    def write_back(self) -> None:
        """Copy to the shard what was written to the full parameters; elements that are the shard's,
        rounded as they were sent, stay.
        """
        if self.shares_memory:
            return
        sent = self.shard.to(self.gather_dtype)
        if self._wire is not None:
            sent = self._wire.rounded(self.shard, self.gather_dtype)
        for param in self.params:
            own = param.placement.cut(param.full.detach(), self.rank).to(self.store)
            param.local.copy_(torch.where(own == param.view_shard(sent), param.local, own.to(self.dtype)))

    # ---- Gradients.

    def pack_grads(self, flat: torch.Tensor) -> None:
        """Move the full gradients into a flat buffer; parameters without one are zeros in it."""
        params, grads = [], []
        for param in self.params:
            grad = param.full.grad
            if grad is not None:
                params.append(param)
                grads.append(grad if grad.layout is torch.strided else grad.to_dense())
                param.full.grad = None
        if len(grads) < len(self.params):
            flat.zero_()
        else:
            for gap in self._gaps:
                flat[gap].zero_()
        if grads and flat.is_cuda and self.casts_grads:
            pack([grad.contiguous() for grad in grads], flat, offsets=[param.offset for param in params])
        elif grads:
            torch._foreach_copy_([param.view_full(flat) for param in params], grads)

    def take_output(self) -> torch.Tensor:
        """Return a flat shard for reduced gradients: the memory of those before, if nobody uses it any more."""
        if self._grads is None or not self._is_unused(self._grads):
            self._grads = torch.empty(self.part, dtype=self.dtype, device=self.ranks.device)
            self._grad_views = []
        storage = self._grads.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.part * self.dtype.itemsize)
        return self._grads

    def free_unused_output(self) -> None:
        """Free the memory of `take_output` until then, if nobody uses it."""
        captures = self.ranks.device.type == "cuda" and is_capturing(None)
        if self._grads is not None and not captures and self._is_unused(self._grads):
            self._grads.untyped_storage().resize_(0)

    def _is_unused(self, grads: torch.Tensor) -> bool:
        """Whether a flat shard of gradients is used by the group alone: by itself and its views."""
        known = list(map(sys.getrefcount, self._grad_views))
        known += [sys.getrefcount(view._local_tensor) for view in self._grad_views]  # which to_local() may return
        count = len(self._grad_views)
        return known == [_UNSHARED] * 2 * count and storage_use_count(grads) == _UNSHARED + count

    def drop_output(self) -> None:
        """Free the memory of `take_output`."""
        self._grads, self._grad_views = None, []

    def store_grads(self, reduced: torch.Tensor) -> None:
        """Make reduced gradients those of the sharded parameters, or add them to those that are there."""
        trainable = [param for param in self.params if param.sharded.requires_grad]
        if reduced is self._grads and self._grad_views and trainable == self._viewed:  # as in the last step
            for param, view in zip(trainable, self._grad_views, strict=True):
                param.sharded.grad = view
            return
        views = []
        for param in trainable:
            view = param.view_shard(reduced)
            if param.sharded.grad is None:
                views.append(param.sharded.like(view))
                param.sharded.grad = views[-1]
            else:
                self._sharded_grad(param)._local_tensor.add_(view)
        if reduced is self._grads:
            self._grad_views, self._viewed = views, trainable if len(views) == len(trainable) else []

    def _sharded_grad(self, param: ShardedParam) -> RaggedTensor:
        """Return a shard's gradient, after this rank's part has taken the place of one that lies otherwise on the mesh,
        as that of a sum over the whole parameter.
        """
        grad = param.sharded.grad
        if grad.placements != param.sharded.placements:
            part = param.placement.cut(grad.full_tensor(), self.rank).clone()
            grad = param.sharded.grad = param.sharded.like(part)
        return grad


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """View a flat tensor's complex numbers as pairs of real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def checksum(param: torch.Tensor) -> int:
    """Return a number that is equal for equal values, and seldom for others: not for the same words in another order.
    0 on the meta device.
    """
    if param.is_meta or not param.numel():
        return 0
    octets = param.detach().reshape(-1).view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    whole = octets.numel() // 4 * 4
    total = octets[:whole].view(torch.int32).sum(dtype=torch.int64) if whole else 0
    return int(total) + int(octets[whole:].sum(dtype=torch.int64))
