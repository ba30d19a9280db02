"""Parameter group: the parameters of a unit that share one flat buffer.

A group has the parameters of one dtype, trainable or frozen, one after the other in a flat buffer
of ``ranks x shard_numel`` elements. Rank r owns elements ``[r * shard_numel, (r + 1) *
shard_numel)``, its flat shard.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from .buffer_pool import GATHERED, BufferPool
from .gather_windows import get_gather_comm
from .gradient_shard import GradientShard
from .group_buffers import GroupBuffers
from .managed_params import check_parameter
from .mesh import Ranks
from .module_changes import ReplacedShardCheck, copy_hooks
from .param import ShardedParam, shard_layout
from .quantized_gather import QuantizedAllGather
from .streams import HostCopies, beside_current

__all__ = ["ParamGroup", "make_groups"]


def make_groups(found, ranks: Ranks, pool: BufferPool, **options) -> list[ParamGroup]:
    """Make the parameter groups of a unit: one for each dtype, trainable and frozen apart.

    `found`: (names, places, parameter) of each parameter; `options`: those of `ParamGroup`.
    """
    kinds: dict[tuple, list] = {}
    for names, places, param in found:
        check_parameter(param, names[0])
        kinds.setdefault((param.dtype, param.requires_grad), []).append((ShardedParam(names, places, param), param))
    return [
        ParamGroup([param for param, _ in members], [param for _, param in members], ranks, pool, **options)
        for members in kinds.values()
    ]


class ParamGroup:
    """Parameters of one dtype in one flat buffer; see the module. `gradients`: their gradients.

    `device`: where the unit computes; `store`: where the flat shard lies. `persistent`: the
    gathered buffer stays allocated, and the shard is part of it. `align`: the shard is a multiple
    of so many elements; 0: of 16 bytes. `quantized_gather`: the wire format of the all-gather, used
    where it takes fewer bytes; None: `gather_dtype`. `host_copies`: the copies between `store` and
    `device`, where they differ.
    """

    def __init__(
        self, params: list[ShardedParam], originals: list[nn.Parameter], ranks: Ranks, pool: BufferPool, *,
        device: torch.device, store: torch.device, pinned: bool, gather_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None, persistent: bool, align: int,
        quantized_gather: QuantizedAllGather | None, host_copies: HostCopies,
    ):  # fmt: skip
        self.params = params
        self.ranks = ranks
        self.buffers = GroupBuffers(ranks, pool, device=device, store=store, pinned=pinned)
        self.host_copies = host_copies
        self.device = device
        self.store = store
        first = originals[0]
        self.dtype = first.dtype
        self.requires_grad = first.requires_grad
        casts = self.dtype.is_floating_point
        self.gather_dtype = gather_dtype if casts and gather_dtype is not None else self.dtype
        self.reduce_dtype = reduce_dtype if casts and reduce_dtype is not None else self.gather_dtype
        self.quantized_gather = (
            quantized_gather
            if quantized_gather is not None and casts and quantized_gather.saves(self.gather_dtype)
            else None
        )
        as_it_is = self.gather_dtype == self.dtype and self.store == device and self.quantized_gather is None
        self.persistent = persistent and as_it_is
        dtypes = (self.dtype, self.gather_dtype, self.reduce_dtype)
        self.layout, self.shard_numel = shard_layout([param.count for param in params], dtypes, ranks.size, align)
        self.unsharded_numel = ranks.size * self.shard_numel
        self.gathered: torch.Tensor | None = None  # the gathered buffer, while unsharded
        self.persistent_buffer: torch.Tensor | None = None  # gathered buffer that stays
        self.post_forward_shard: torch.Tensor | None = None  # kept after a forward
        self.steps = 0  # optimizer steps so far
        # The data of the full parameters while nothing is gathered: their shapes, expanded from one element.
        nothing = torch.zeros((), dtype=self.gather_dtype, device=device)
        if self.gather_dtype.is_floating_point or self.gather_dtype.is_complex:
            nothing.fill_(float("nan"))
        # `.data`: with a version counter each, since what autograd has saved of one parameter stays valid when
        # another is written to.
        self._placeholders = [nothing.expand(param.shape).data for param in params]
        for param, offset in zip(params, self.layout.offsets, strict=True):
            param.offset = offset
        self.gradients = GradientShard(
            params, ranks, self.buffers, self.layout, self.shard_numel, dtype=self.dtype,
            gather_dtype=self.gather_dtype, reduce_dtype=self.reduce_dtype, host_copies=self.host_copies,
        )  # fmt: skip
        self.buffers.reserve(self.gathered_bytes, self.unsharded_numel * self.reduce_dtype.itemsize)
        self._make_shard(originals, first.device)

    # ---- Making it.

    @property
    def offloads(self) -> bool:
        """As `GroupBuffers.offloads`."""
        return self.buffers.offloads

    @property
    def awaits_memory(self) -> bool:
        """Whether the flat shard is on the meta device, and has no values yet."""
        return self.flat.device.type != self.store.type

    @property
    def shares_memory(self) -> bool:
        """Whether the full parameters are the memory of the shards, so that a step changes what
        autograd has saved.
        """
        return self.persistent or (
            self.ranks.shard is None and self.gather_dtype == self.dtype and self.store == self.device
        )

    def _new_shard(self, device: torch.device) -> torch.Tensor:
        """Allocate the flat shard, uninitialised."""
        host_engine = self.ranks.world._on_host and device.type == "cpu"
        options = {"shared": host_engine, "device": device}
        if self.persistent and device.type == self.store.type:
            self.persistent_buffer = self.buffers.alloc_stored(self.unsharded_numel, self.dtype, **options)
            return self.persistent_buffer[self.ranks.rank * self.shard_numel :][: self.shard_numel]
        return self.buffers.alloc_stored(self.shard_numel, self.dtype, **options)

    def _make_shard(self, originals: list[nn.Parameter], device: torch.device) -> None:
        """Make the flat shard, and both forms of each parameter, from the original parameters."""
        self.flat = self._new_shard(device if device.type == "meta" else self.store)
        if not self.awaits_memory:
            self.flat.zero_()  # padding is sent, too, and in 8 bits it shares a scale with its neighbours
        low = self.ranks.rank * self.shard_numel
        for param, original, placeholder in zip(self.params, originals, self._placeholders, strict=True):
            begin = min(max(param.offset, low), low + self.shard_numel)
            end = min(max(param.offset + param.count, low), low + self.shard_numel)
            param.shard_offset, param.start = begin - low, begin - param.offset if end > begin else 0
            if not self.awaits_memory and end > begin:
                values = original.detach().reshape(-1)[param.start : param.start + end - begin]
                self.flat[param.shard_offset : end - low].copy_(values)
            data = param.shard_view(self.flat, end - begin)
            param.shard = nn.Parameter(data, requires_grad=self.requires_grad)
            param.full = nn.Parameter(placeholder, requires_grad=self.requires_grad)
            for form in (param.shard, param.full):
                form.__dict__.update(original.__dict__)
            copy_hooks(param, original)
        self._replaced = ReplacedShardCheck(self.params, self.dtype, self.store)

    def check(self) -> None:
        """Check that the shards still lie in the flat shard. Copy the values of shards that were
        given other memory of the same size.

        Raises `InvalidArgument`, with the parameter's name, for shards of another size, dtype or
        device.
        """
        shards = [param.shard for param in self.params]
        self.gradients.free_dropped(shards)
        if not self._replaced.check(shards):
            return
        self.restore_to_shard()

    @torch.no_grad()
    def restore_to_shard(self) -> None:
        """Copy shards that were given other memory back into the flat shard, which is allocated if
        it was on the meta device.
        """
        self.host_copies.wait()
        if any(param.shard.device.type != self.store.type for param in self.params if param.shard.numel()):
            return  # unshard says so
        if self.awaits_memory:
            self.flat = self._new_shard(self.store).zero_()
        for param in self.params:
            count = param.shard.numel()
            place = param.shard_view(self.flat)
            if count and param.shard.data_ptr() != place.data_ptr():
                place.copy_(param.shard.detach().view(place.shape))
            param.shard.data = place
            torch.autograd.graph.increment_version(param.shard)
        self._replaced.record()

    def allocate(self) -> None:
        """Allocate a flat shard that is on the meta device, as zeros, and keep the shards' identity."""
        if not self.awaits_memory:
            return
        self.flat = self._new_shard(self.store).zero_()
        for param in self.params:
            data = nn.Parameter(param.shard_view(self.flat), requires_grad=param.requires_grad)
            data.__dict__.update(param.shard.__dict__)
            torch.utils.swap_tensors(param.shard, data)
        self._replaced.record()

    # ---- Gathering.

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.unsharded_numel * self.gather_dtype.itemsize

    def unshard(self, *, async_op: bool = False, custom=None, out: torch.Tensor | None = None):
        """Begin the all-gather into `gathered`; return a Work, or None where it is done. `out`: a
        window's part, which becomes `gathered`; None: memory of the group's own.
        """
        if self.flat.device.type != self.store.type:
            raise InvalidArgument(
                f"{self.params[0].name} is on the meta device: give it memory first, by module.to_empty(device=...) "
                "and its initialisation, param_init_fn, or a checkpoint"
            )
        if self.ranks.shard is None and self.shares_memory:
            self.gathered = self.flat
            return None
        self.gathered, work = self._all_gather(async_op, custom, out)
        return work

    def move_gathered(self, *, registered: bool) -> None:
        """Move what is gathered to memory of the group's own; `registered`: the full parameters too."""
        moved = self.buffers.acquire(GATHERED, self.unsharded_numel, self.gather_dtype)
        self.gathered = moved.copy_(self.gathered)
        if registered:
            self.to_unsharded()

    def to_sharded_post_forward(self, post_forward_comm: Communicator) -> None:
        """Keep the post-forward shard: this rank's part, among the ranks of a communicator, of the
        gathered buffer.
        """
        part = self.unsharded_numel // post_forward_comm.size
        self.post_forward_shard = self.gathered[post_forward_comm.rank * part :][:part].clone()

    def unshard_post_forward(self, post_forward_comm: Communicator, async_op: bool):
        """Begin the all-gather of the post-forward shards."""
        self.gathered = self.buffers.acquire(GATHERED, self.unsharded_numel, self.gather_dtype)
        return post_forward_comm.all_gather(self.gathered, self.post_forward_shard, async_op=async_op)

    def join_post_forward(self, post_forward_comm: Communicator) -> None:
        """Take part in an all-gather of the post-forward shards that only other ranks need."""
        shard = self.post_forward_shard
        if shard is None:
            numel = self.unsharded_numel // post_forward_comm.size
            shard = torch.zeros(numel, dtype=self.gather_dtype, device=self.device)
        post_forward_comm.all_gather(self.buffers.alloc(self.unsharded_numel, self.gather_dtype), shard)

    def join_all_gather(self, custom=None, out: torch.Tensor | None = None) -> None:
        """Take part in an all-gather that only other ranks need."""
        if self.ranks.shard is not None:
            out, work = self._all_gather(False, custom, out)
            if work is not None:
                work.wait()
            self.buffers.release(GATHERED, out)

    def _all_gather(self, async_op: bool, custom, out: torch.Tensor | None) -> tuple:
        """Begin the all-gather into a buffer; return the buffer and a Work, or None where it is done."""
        ranks, in_window = self.ranks, out is not None
        if out is None:
            out = self.persistent_buffer
        if out is None:
            out = self.buffers.acquire(GATHERED, self.unsharded_numel, self.gather_dtype, custom)
        if self.quantized_gather is not None and ranks.shard is not None:
            return out, _quantized_all_gather(self, out, custom, async_op)
        if in_window or self.gather_dtype != self.dtype or self.store != self.device:
            inp = out[ranks.rank * self.shard_numel :][: self.shard_numel]
        else:
            inp = self.flat
        # Beside the computation, which doesn't wait for the shard's cast or copy.
        beside = async_op and custom is None and ranks.shard is not None
        with beside_current(self.device, "gather") if beside else contextlib.nullcontext():
            if inp is not self.flat and self.offloads:
                self.host_copies.to_device(inp, self.flat)
            elif inp is not self.flat:
                inp.copy_(self.flat)
            if ranks.shard is None:
                return out, None
            if custom is not None:
                return out, custom(out, inp, ranks.group or ranks.shard, async_op)
            return out, get_gather_comm(ranks.shard).all_gather(out, inp, async_op=async_op)

    def all_gather_master_shards(self) -> torch.Tensor:
        """All-gather the shards in their own dtype; return the flat buffer. A collective of
        ``ranks.shard``.

        Uses the engine's own all-gather, also where a custom one is set, since that one may round.
        """
        if self.awaits_memory:
            raise InvalidUsage(f"{self.params[0].name} is on the meta device and has no values yet: materialize() it")
        return self._all_gather_flat(self.flat, self.persistent_buffer)

    def all_gather_like_shards(self, values, dtype: torch.dtype) -> torch.Tensor:
        """All-gather tensors that are laid out as the shards are; return the flat buffer, as
        `all_gather_master_shards`.

        `values`: pairs of a parameter and its tensor; None stands for zeros.
        """
        own = torch.zeros(self.shard_numel, dtype=dtype, device=self.device)
        for param, value in values:
            if value is not None:
                own[param.shard_offset : param.shard_offset + value.numel()].copy_(value.detach().reshape(-1))
        return self._all_gather_flat(own)

    def _all_gather_flat(self, own: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """All-gather flat tensors of `shard_numel` elements, of any dtype; return the flat buffer."""
        if self.ranks.shard is None:
            return own
        if out is None:
            out = self.buffers.alloc(self.unsharded_numel, own.dtype)
        if own.device != self.device:
            own = out[self.ranks.rank * self.shard_numel :][: self.shard_numel].copy_(own)
        self.ranks.shard.all_gather(out.view(torch.uint8), own.view(torch.uint8))
        return out

    def to_unsharded(self) -> None:
        """Let the full parameters view the gathered buffer."""
        for param in self.params:
            param.full.data = param.full_view(self.gathered)

    def post_optim_step(self) -> None:
        """Count an optimizer's step; full parameters in the shards' memory have been written to."""
        self.steps += 1
        if self.shares_memory and self.params:
            torch.autograd.graph.increment_version([param.full for param in self.params])

    def free_unsharded(self) -> None:
        """Free the gathered buffer, unless it is memory that stays: then the full parameters keep it."""
        gathered, self.gathered = self.gathered, None
        if self.shares_memory:
            return
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            param.full.data = placeholder
        if gathered is not None:
            self.buffers.release(GATHERED, gathered)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy to the flat shard what was written to the full parameters."""
        if self.gathered is None or self.gathered.data_ptr() == self.flat.data_ptr() or self.persistent:
            return
        own = self.gathered[self.ranks.rank * self.shard_numel :][: self.shard_numel]
        if self.quantized_gather is not None and self.ranks.shard is not None:
            # Elements that were not written to are the shard's, rounded.
            shard = self.flat.to(own.device)
            own = torch.where(own == self.quantized_gather.rounded(shard, own.dtype), shard, own.to(shard.dtype))
        self.flat.copy_(own)


def _quantized_all_gather(group: ParamGroup, out: torch.Tensor, custom, async_op: bool):
    """Begin a group's quantized all-gather into a buffer; return a Work, or None where it is done."""
    if custom is not None:
        raise InvalidUsage("a custom all-gather sends parameters as they are: leave HookState's gather out")
    shard = group.flat
    if group.offloads:
        moved = torch.empty(group.shard_numel, dtype=group.dtype, device=group.device)
        shard = group.host_copies.to_device(moved, shard)
    comm = get_gather_comm(group.ranks.shard)
    return group.quantized_gather.gather(comm, shard, out, group.buffers.alloc, async_op=async_op)
