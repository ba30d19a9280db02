"""Parameters of a unit: each one's two forms, and the flat buffers of a group of them.

A parameter is *sharded* outside of forward and backward: a Parameter whose data is a RaggedTensor of
this rank's part, which optimizers step. It is *full* inside: a plain Parameter that views the group's
gathered buffer. Both objects live as long as the unit; the module holds one of them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh

from .arena import Arena
from .layout import plan_layout
from .placement import RaggedShard
from .ragged_tensor import RaggedTensor

__all__ = ["ParamGroup", "ShardedParam"]


class ShardedParam:
    """One parameter.

    Attributes:
        names: Its name in the unit's module, then those of tied weights.
        places: The (module, attribute) pairs that hold it.
        sharded: The Parameter of this rank's part.
        full: The Parameter of the whole, which has memory while the group is gathered.
        offset: Its first element in the group's flat buffer.
    """

    __slots__ = ("full", "names", "offset", "placement", "places", "shape", "sharded", "start")

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
        """Have the modules hold one of the two forms."""
        for module, attribute in self.places:
            module._parameters[attribute] = param


class ParamGroup:
    """The parameters of a unit with one dtype, trainable or frozen, in one flat buffer.

    Attributes:
        shard: This rank's part of the flat buffer: `part` elements, which the sharded parameters view.
        full: The gathered buffer, which the full parameters view; it has memory while it is gathered.
    """

    def __init__(
        self, members: list[tuple[ShardedParam, nn.Parameter]], mesh: DeviceMesh, comm, arena: Arena | None, *,
        gather_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, block: int,
    ):  # fmt: skip
        self.params = [param for param, _ in members]
        originals = [original.detach() for _, original in members]
        self.comm, self._arena = comm, arena
        self.rank, self.size = (0, 1) if comm is None else (comm.rank, comm.size)
        first = members[0][1]
        self.dtype, self.requires_grad = first.dtype, first.requires_grad
        casts = self.dtype.is_floating_point
        self.gather_dtype = gather_dtype if casts and gather_dtype is not None else self.dtype
        self.reduce_dtype = reduce_dtype if casts and reduce_dtype is not None else self.gather_dtype
        sizes = [each.numel() for each in originals]
        rows = [max(1, each[0].numel() if each.dim() and len(each) else 1) for each in originals]
        narrowest = min(each.itemsize for each in (self.dtype, self.gather_dtype, self.reduce_dtype))
        self.layout = plan_layout(
            sizes, [row * block if row > 1 else 1 for row in rows], self.size, itemsize=narrowest
        )
        self.part = self.layout.part
        self.numel = self.part * self.size
        self._make_shards(members, originals, rows, mesh)
        self._make_full(members)

    def _make_shards(self, members, originals, rows, mesh) -> None:
        empty = torch.empty if self.comm is None or self.comm.device.type != "cpu" else self.comm.empty
        self.shard = empty(self.part, dtype=self.dtype)
        self.shard.zero_()  # padding is sent, too, and in 8 bits it shares a scale with its neighbours
        for index, (param, original) in enumerate(members):
            full, row = originals[index], rows[index]
            cuts = self.layout.cuts(index, full.numel(), self.size)
            by_rows = self.layout.by_rows[index] and full.dim() > 0
            param.offset = self.layout.offsets[index]
            param.placement = RaggedShard([-(-cut // row) for cut in cuts] if by_rows else cuts, by_rows)
            param.start = max(param.offset - self.rank * self.part, 0)
            count = cuts[self.rank + 1] - cuts[self.rank]
            if not count:
                param.start = 0
            local = self.shard[param.start : param.start + count]
            local = local.view(param.placement.local_shape(full.shape, self.rank))
            local.copy_(param.placement.cut(full, self.rank))
            data = RaggedTensor.from_local(local, full.shape, mesh, param.placement)
            param.sharded = nn.Parameter(data, requires_grad=self.requires_grad)
            param.sharded.__dict__.update(original.__dict__)

    def _make_full(self, members) -> None:
        if self.shares_memory:
            self.full = self.shard
        else:
            self.full = torch.empty(self.numel, dtype=self.gather_dtype, device=self.shard.device)
        for param, original in members:
            view = param.view_full(self.full)
            param.full = nn.Parameter(view.data, requires_grad=self.requires_grad)  # .data: a version counter of its own
            param.full.__dict__.update(original.__dict__)
        if not self.shares_memory:
            self.full.untyped_storage().resize_(0)
        self._buffer: torch.Tensor | None = None

    @property
    def shares_memory(self) -> bool:
        """Whether this rank has all of the parameters, so that the full ones are the shards' memory."""
        return self.comm is None and self.gather_dtype == self.dtype

    @property
    def is_gathered(self) -> bool:
        return self.shares_memory or self._buffer is not None

    def all_gather(self) -> None:
        """Gather the parameters into memory of the arena. A collective."""
        if self.is_gathered:
            return
        self._buffer = self._arena.fill(self.full.untyped_storage(), self.numel * self.gather_dtype.itemsize)
        if self.gather_dtype == self.dtype:
            self.comm.all_gather(self.full, self.shard)
            return
        own = self.full[self.rank * self.part :][: self.part]
        own.copy_(self.shard)
        if self.comm is not None:
            self.comm.all_gather(self.full, own)

    def free(self) -> None:
        """Give the gathered buffer's memory back to the arena."""
        if self._buffer is not None:
            self._arena.drain(self.full.untyped_storage(), self._buffer)
            self._buffer = None

    # ---- Gradients.

    def has_grads(self) -> bool:
        return any(param.full.grad is not None for param in self.params)

    def pack_grads(self, flat: torch.Tensor) -> None:
        """Move the full gradients into a flat buffer; parameters without one are zeros in it."""
        views, grads = [], []
        for param in self.params:
            if param.full.grad is not None:
                views.append(param.view_full(flat))
                grads.append(param.full.grad)
                param.full.grad = None
        if len(grads) < len(self.params) or self.layout.offsets:
            self._zero_gaps(flat, len(grads) < len(self.params))
        torch._foreach_copy_(views, grads)

    def _zero_gaps(self, flat: torch.Tensor, everything: bool) -> None:
        if everything:
            flat.zero_()
            return
        ends = [*self.layout.offsets[1:], self.numel]
        for param, end in zip(self.params, ends, strict=True):
            begin = param.offset + param.shape.numel()
            if begin < end:
                flat[begin:end].zero_()

    def reduce_grads(self, op) -> None:
        """Reduce the full gradients into the sharded parameters' gradients. A collective."""
        nbytes = self.numel * self.reduce_dtype.itemsize
        buffer = self._arena.take(nbytes)
        flat = buffer[:nbytes].view(self.reduce_dtype)
        self.pack_grads(flat)
        reduced = torch.empty(self.part, dtype=self.reduce_dtype, device=flat.device)
        self.comm.reduce_scatter(reduced, flat, op)
        self._arena.give(buffer)
        self.store_grads(reduced.to(self.dtype))

    def store_grads(self, reduced: torch.Tensor) -> None:
        """Make reduced gradients those of the sharded parameters, or add them to those that are there."""
        for param in self.params:
            view = param.view_shard(reduced)
            grad = param.sharded.grad
            if grad is None:
                param.sharded.grad = param.sharded.detach().like(view)
            else:
                grad._local_tensor.add_(view)
