"""Parameter group: the parameters of a unit that share one flat buffer, and their gradients.

A group has the parameters of one dtype, trainable or frozen, one after the other in a flat buffer
of ``ranks x shard_numel`` elements. Rank r owns elements ``[r * shard_numel, (r + 1) *
shard_numel)``, its flat shard.
"""

from __future__ import annotations

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from ..kernels import pack
from ..torch_compat import TensorBase
from .buffer_pool import MIN_POOLED_BYTES, BufferPool
from .mesh import Ranks
from .module_changes import copy_hooks
from .param import ShardedParam, shard_layout
from .quantized_gather import QuantizedAllGather
from .streams import HostCopies

__all__ = ["ParamGroup"]

_data_ptr, _numel = TensorBase.data_ptr, TensorBase.numel


class ParamGroup:
    """Parameters of one dtype in one flat buffer; see the module.

    `device`: where the unit computes; `store`: where the flat shard lies. `persistent`: the
    gathered buffer stays allocated, and the shard is part of it. `align`: the shard is a multiple
    of so many elements; 0: of 16 bytes. `quantized_gather`: the wire format of the all-gather, used
    where it takes fewer bytes; None: `gather_dtype`. `host_copies`: the copies between `store` and
    `device`, where they differ.
    """

    def __init__(
        self, params: list[ShardedParam], originals: list[nn.Parameter], ranks: Ranks, pool: BufferPool, *,
        device: torch.device, store: torch.device, pinned: bool, gather_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None, persistent: bool, align: int = 0,
        quantized_gather: QuantizedAllGather | None = None, host_copies: HostCopies | None = None,
    ):  # fmt: skip
        self.params = params
        self.ranks = ranks
        self.pool = pool
        self.host_copies = HostCopies() if host_copies is None else host_copies
        self.device = device
        self.store = store
        self.pinned = pinned
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
        narrowest = min(dtype.itemsize for dtype in dtypes)
        self.layout, self.shard_numel = shard_layout([param.count for param in params], dtypes, ranks.size, align)
        self.unsharded_numel = ranks.size * self.shard_numel
        self.gathered: torch.Tensor | None = None  # the gathered buffer, while unsharded
        self.persistent_buffer: torch.Tensor | None = None  # gathered buffer that stays
        self.post_forward_shard: torch.Tensor | None = None  # kept after a forward
        self.grad: torch.Tensor | None = None  # flat shard of gradients, once there was one
        self.steps = 0  # optimizer steps so far
        self._stub = torch.empty((), dtype=self.gather_dtype, device=device)
        # Whether the packing kernel's own padding is that of this layout.
        self._default_padding = self.reduce_dtype.itemsize == narrowest
        for param, offset in zip(params, self.layout.offsets, strict=True):
            param.offset = offset
        ends = [*self.layout.offsets[1:], self.unsharded_numel]
        # Padding: the elements between parameters and after the last one.
        self._gaps = [
            (s.offset + s.count, end) for s, end in zip(params, ends, strict=True) if s.offset + s.count < end
        ]
        self._make_shard([original.detach() for original in originals], first.device)
        self._make_forms(originals)

    # ---- Making it.

    @property
    def offloads(self) -> bool:
        """Whether the flat shard lies on another device than the one where the unit computes."""
        return self.store != self.device

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
        if self.persistent and device.type != "meta":
            self.persistent_buffer = self._empty(self.unsharded_numel, host_engine, device)
            return self.persistent_buffer[self.ranks.rank * self.shard_numel :][: self.shard_numel]
        return self._empty(self.shard_numel, host_engine, device)

    def _empty(self, n: int, shared: bool, device) -> torch.Tensor:
        if shared and n * self.dtype.itemsize >= MIN_POOLED_BYTES:
            return self.ranks.world.empty(n, self.dtype)
        pinned = self.pinned and self.offloads and device.type == "cpu"
        return torch.empty(n, dtype=self.dtype, device=device, pin_memory=pinned)

    def _make_shard(self, data: list[torch.Tensor], device: torch.device) -> None:
        self.flat = self._new_shard(device if device.type == "meta" else self.store)
        if device.type != "meta":
            self.flat.zero_()  # padding is sent, too, and in 8 bits it shares a scale with its neighbours
        low = self.ranks.rank * self.shard_numel
        for param, values in zip(self.params, data, strict=True):
            begin = min(max(param.offset, low), low + self.shard_numel)
            end = min(max(param.offset + param.count, low), low + self.shard_numel)
            param.shard_offset, param.start = begin - low, begin - param.offset if end > begin else 0
            if device.type != "meta" and end > begin:
                self.flat[param.shard_offset : end - low].copy_(
                    values.reshape(-1)[param.start : param.start + end - begin]
                )

    def _shard_view(self, flat: torch.Tensor, param: ShardedParam, n: int) -> torch.Tensor:
        """View a parameter's part of a flat shard, with as many dimensions as the parameter, so
        that ``p.dim()`` is right.
        """
        part = flat[param.shard_offset : param.shard_offset + n]
        if n == param.count:
            return part.view(param.shape)
        # With the 1s in front: an embedding of (n, 1), read by mistake, would broadcast in silence.
        return part.view(*[1] * (len(param.shape) - 1), n)

    def _numel_here(self, param: ShardedParam) -> int:
        low = self.ranks.rank * self.shard_numel
        return max(0, min(param.offset + param.count, low + self.shard_numel) - max(param.offset, low))

    def _make_forms(self, originals: list[nn.Parameter]) -> None:
        for param, original in zip(self.params, originals, strict=True):
            data = self._shard_view(self.flat, param, self._numel_here(param))
            param.shard = nn.Parameter(data, requires_grad=self.requires_grad)
            param.full = nn.Parameter(self._placeholder(param), requires_grad=self.requires_grad)
            for form in (param.shard, param.full):
                form.__dict__.update(original.__dict__)
            copy_hooks(param, original)
        self._record_addresses()

    def _record_addresses(self) -> None:
        self._addresses = [param.shard.data_ptr() for param in self.params]
        self._counts = [param.shard.numel() for param in self.params]

    def _placeholder(self, param: ShardedParam) -> torch.Tensor:
        """Return the data of a full parameter while nothing is gathered: its shape, expanded from
        one element.
        """
        if not param.count:
            return torch.empty(param.shape, dtype=self.gather_dtype, device=self.device)
        return self._stub.expand(param.shape)

    def check(self) -> None:
        """Check that the shards still lie in the flat shard. Copy the values of shards that were
        given other memory of the same size.

        Raises `InvalidArgument`, with the parameter's name, for shards of another size, dtype or
        device.
        """
        shards = [param.shard for param in self.params]
        if self.grad is not None and self.ranks.shard is not None and all(shard.grad is None for shard in shards):
            self.grad = None  # zero_grad has dropped it: free its memory until the backward
        if list(map(_data_ptr, shards)) == self._addresses and list(map(_numel, shards)) == self._counts:
            return
        for param, count in zip(self.params, self._counts, strict=True):
            data = param.shard.data
            if data.numel() != count:
                raise InvalidArgument(
                    f"{param.name} was resized after it was sharded: this rank's piece has {data.numel()} elements "
                    f"and had {count}; change modules before fully_shard, or values only"
                )
            if data.dtype != self.dtype:
                raise InvalidArgument(
                    f"{param.name} was made {data.dtype} after it was sharded as {self.dtype}: convert the module "
                    "before fully_shard, or compute in another dtype by mp_policy"
                )
            if count and data.device.type not in (self.store.type, "meta"):
                raise InvalidArgument(
                    f"{param.name} was moved to {data.device} after it was sharded on {self.store}: move the module "
                    "before fully_shard"
                )
        self.restore_to_shard()

    @torch.no_grad()
    def restore_to_shard(self) -> None:
        """Copy shards that were given other memory back into the flat shard, which is allocated if
        it was on the meta device.
        """
        self.host_copies.wait()
        if any(param.shard.device.type == "meta" for param in self.params if param.shard.numel()):
            return  # unshard says so
        if self.flat.device.type == "meta":
            self.flat = self._new_shard(self.store).zero_()
        for param in self.params:
            count = param.shard.numel()
            place = self._shard_view(self.flat, param, count)
            if count and param.shard.data_ptr() != place.data_ptr():
                place.copy_(param.shard.detach().view(place.shape))
            param.shard.data = place
            torch.autograd.graph.increment_version(param.shard)
        self._record_addresses()

    def allocate(self) -> None:
        """Allocate a flat shard that is on the meta device, as zeros. The shards stay the same
        objects.
        """
        if self.flat.device.type != "meta":
            return
        self.flat = self._new_shard(self.store).zero_()
        for param in self.params:
            data = nn.Parameter(
                self._shard_view(self.flat, param, param.shard.numel()), requires_grad=param.requires_grad
            )
            data.__dict__.update(param.shard.__dict__)
            torch.utils.swap_tensors(param.shard, data)
        self._record_addresses()

    # ---- Gathering.

    def unshard(self, *, async_op: bool = False, custom=None):
        """Begin the all-gather into `gathered`; return a Work, or None where it is done."""
        ranks = self.ranks
        if self.flat.device.type == "meta":
            raise InvalidArgument(
                f"{self.params[0].name} is on the meta device: give it memory first, by module.to_empty(device=...) "
                "and its initialisation, param_init_fn, or a checkpoint"
            )
        if ranks.shard is None and self.shares_memory:
            self.gathered = self.flat
            return None
        self.gathered = (
            self.persistent_buffer
            if self.persistent
            else self.alloc_buffer(self.unsharded_numel, self.gather_dtype, custom)
        )
        return self._gather(self.gathered, async_op, custom)

    def to_sharded_post_forward(self, post_forward_comm: Communicator) -> None:
        """Keep the post-forward shard: this rank's part, among the ranks of a communicator, of the
        gathered buffer.
        """
        part = self.unsharded_numel // post_forward_comm.size
        self.post_forward_shard = self.gathered[post_forward_comm.rank * part :][:part].clone()

    def unshard_post_forward(self, post_forward_comm: Communicator, async_op: bool):
        """Begin the all-gather of the post-forward shards."""
        self.gathered = self.alloc_buffer(self.unsharded_numel, self.gather_dtype)
        return post_forward_comm.all_gather(self.gathered, self.post_forward_shard, async_op=async_op)

    def join_all_gather(self, custom=None) -> None:
        """Take part in an all-gather that only other ranks need."""
        if self.ranks.shard is not None:
            out = (
                self.persistent_buffer
                if self.persistent
                else self.alloc_buffer(self.unsharded_numel, self.gather_dtype, custom)
            )
            work = self._gather(out, False, custom)
            if work is not None:
                work.wait()

    def _gather(self, out: torch.Tensor, async_op: bool, custom):
        ranks, inp = self.ranks, self.flat
        if self.quantized_gather is not None and ranks.shard is not None:
            if custom is not None:
                raise InvalidUsage("a custom all-gather sends parameters as they are: leave HookState's gather out")
            shard = self.flat
            if self.offloads:
                shard = self.host_copies.to_device(
                    torch.empty(self.shard_numel, dtype=self.dtype, device=self.device), shard
                )
            return self.quantized_gather.gather(ranks.shard, shard, out, self.alloc_buffer, async_op=async_op)
        if not self.persistent and (self.gather_dtype != self.dtype or self.store != self.device):
            inp = out[ranks.rank * self.shard_numel :][: self.shard_numel]
            if self.offloads:
                self.host_copies.to_device(inp, self.flat)
            else:
                inp.copy_(self.flat)
        if ranks.shard is None:
            return None
        if custom is not None:
            return custom(out, inp, ranks.group or ranks.shard, async_op)
        return ranks.shard.all_gather(out, inp, async_op=async_op)

    def all_gather_master_shards(self) -> torch.Tensor:
        """All-gather the shards in their own dtype; return the flat buffer. A collective of
        ``ranks.shard``.

        Uses the engine's own all-gather, also where a custom one is set, since that one may round.
        """
        if self.flat.device.type == "meta":
            raise InvalidUsage(f"{self.params[0].name} is on the meta device and has no values yet: materialize() it")
        ranks = self.ranks
        if ranks.shard is None:
            return self.flat
        out, inp = (
            self.persistent_buffer if self.persistent else self.alloc_buffer(self.unsharded_numel, self.dtype),
            self.flat,
        )
        if self.store != self.device:
            inp = out[ranks.rank * self.shard_numel :][: self.shard_numel].copy_(self.flat)
        ranks.shard.all_gather(out.view(torch.uint8), inp.view(torch.uint8))
        return out

    def all_gather_like_shards(self, values, dtype: torch.dtype) -> torch.Tensor:
        """All-gather tensors that are laid out as the shards are; return the flat buffer, as
        `all_gather_master_shards`.

        `values`: pairs of a parameter and its tensor; None stands for zeros.
        """
        ranks = self.ranks
        own = torch.zeros(self.shard_numel, dtype=dtype, device=self.device)
        for param, value in values:
            if value is not None:
                own[param.shard_offset : param.shard_offset + value.numel()].copy_(value.detach().reshape(-1))
        if ranks.shard is None:
            return own
        out = self.alloc_buffer(self.unsharded_numel, dtype)
        ranks.shard.all_gather(out.view(torch.uint8), own.view(torch.uint8))
        return out

    def alloc_buffer(self, n: int, dtype: torch.dtype, custom=None) -> torch.Tensor:
        """Return an uninitialised buffer of `n` elements on the unit's device; a pool reuses it
        when no tensor views it.
        """
        if custom is not None and hasattr(custom, "allocate"):
            return custom.allocate((n,), dtype=dtype, device=self.device)
        if self.ranks.world._on_host and n * dtype.itemsize >= MIN_POOLED_BYTES:
            return self.pool.allocate(self.ranks.world, n, dtype)
        return torch.empty(n, dtype=dtype, device=self.device)

    def to_unsharded(self) -> None:
        """Let the full parameters view the gathered buffer."""
        flat = self.gathered
        for param in self.params:
            param.full.data = flat[param.offset : param.offset + param.count].view(param.shape)

    def free_unsharded(self) -> None:
        """Free the gathered buffer."""
        self.gathered = None
        for param in self.params:
            param.full.data = self._placeholder(param)

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

    # ---- Gradients.

    def gather_gradients(self) -> None:
        """All-gather the shards' gradients for the substitutes, except for parameters that have
        none on any rank.
        """
        there = [param.shard.grad is not None and (param.shard.numel() > 0 or not param.count) for param in self.params]
        there = torch.tensor(there, dtype=torch.uint8, device=self.device)
        flat = torch.zeros(self.shard_numel, dtype=self.dtype, device=self.device)
        for param in self.params:
            if param.shard.grad is not None:
                self._shard_view(flat, param, param.shard.numel()).copy_(param.shard.grad)
        whole = flat
        if self.ranks.shard is not None:
            whole = torch.empty(self.unsharded_numel, dtype=self.dtype, device=self.device)
            self.ranks.shard.all_gather(whole, flat)
            self.ranks.shard.all_reduce(there, "max")
        for param, has in zip(self.params, there.tolist(), strict=True):
            if has and param.substitute is not None:
                part = whole[param.offset : param.offset + param.count].view(param.shape)
                param.substitute.grad = part.to(param.substitute.device)

    def write_back_gradients(self) -> None:
        """Copy this rank's part of the substitutes' gradients to the shards' gradients."""
        for param in self.params:
            if param.substitute.grad is not None and param.shard.grad is not None:
                here = param.substitute.grad.reshape(-1)[param.start : param.start + param.shard.numel()]
                param.shard.grad.copy_(here.view(param.shard.shape))

    def to_accumulated_grad(self) -> None:
        """Cast full gradients that wait for a later reduction to `reduce_dtype`, and add them up
        there.
        """
        if self.reduce_dtype == self.gather_dtype:
            return
        for param in self.params:
            if param.full.grad is not None:
                grad = param.full.grad.to(self.reduce_dtype)
                param.accumulated_grad = grad if param.accumulated_grad is None else param.accumulated_grad.add_(grad)
                param.full.grad = None

    def has_gradients(self) -> bool:
        """Whether a full gradient waits to be reduced."""
        return any(param.full.grad is not None or param.accumulated_grad is not None for param in self.params)

    @torch.no_grad()
    def pack_gradients(self, custom=None) -> torch.Tensor:
        """Pack the full gradients into a flat buffer and return it; parameters without a gradient
        are zeros in it.
        """
        flat = None
        if self.ranks.shard is None and self.reduce_dtype == self.dtype and self.store == self.device:
            flat = self._grad_buffer() if all(param.shard.grad is None for param in self.params) else None
        if flat is None:
            flat = self.alloc_buffer(self.unsharded_numel, self.reduce_dtype, custom)
        tensors, offsets = [], []
        for param in self.params:
            grad = param.full.grad
            if param.accumulated_grad is not None:
                grad = param.accumulated_grad if grad is None else param.accumulated_grad.add_(grad)
                param.accumulated_grad = None
            param.full.grad = None
            if grad is not None:
                tensors.append(grad.to_dense() if grad.layout != torch.strided else grad)
                offsets.append(param.offset)
        if flat.is_cpu or self.dtype.is_complex:
            # The kernel's table takes longer to read a new list each time than the host takes to
            # copy.
            if len(tensors) < len(self.params):
                flat.zero_()
            for begin, end in self._gaps:
                flat[begin:end].zero_()
            views = [flat[at : at + each.numel()].view(each.shape) for at, each in zip(offsets, tensors, strict=True)]
            if views:
                torch._foreach_copy_(views, tensors)
        elif len(tensors) == len(self.params) and self._default_padding:
            pack([each.contiguous() for each in tensors], flat)
            flat[self.layout.total :].zero_()
        else:
            flat.zero_()
            if tensors:
                pack([each.contiguous() for each in tensors], flat, offsets=offsets)
        return flat

    def _grad_buffer(self) -> torch.Tensor:
        """Return the memory of the flat shard of gradients; allocate it if there is none."""
        if self.grad is None or self.grad.numel() != self.shard_numel:
            if self.ranks.shard is None:  # reduced where it lies
                self.grad = self._empty(self.shard_numel, self.ranks.world._on_host, self.store)
            else:
                self.grad = self._empty(self.shard_numel, False, self.store)
        return self.grad

    def reduce_output(self) -> tuple[torch.Tensor, bool]:
        """Return the output of the reduce-scatter, and whether it is the flat shard of gradients
        itself.
        """
        fits = self.reduce_dtype == self.dtype and self.store == self.device
        if fits and all(param.shard.grad is None for param in self.params):
            return self._grad_buffer(), True
        return torch.empty(self.shard_numel, dtype=self.reduce_dtype, device=self.device), False

    @torch.no_grad()
    def set_shard_gradients(self, part: torch.Tensor, in_place: bool) -> None:
        """Make this rank's part of the reduced gradients the shards' gradients, or add it to those
        they have.

        Where the shards lie on the host, the values are there after `host_copies.wait()`.
        """
        grad = self._grad_buffer()
        if self.offloads:
            self._offload_gradients(part, grad)
            return
        if not in_place and all(param.shard.grad is None for param in self.params):
            grad.copy_(part)
            in_place = True
        for param in self.params:
            count = param.shard.numel()
            if param.shard.grad is None:
                param.grad_is_new = True
            if in_place or param.shard.grad is None:
                view = self._shard_view(grad, param, count)
                if not in_place:
                    view.copy_(self._shard_view(part, param, count))
                param.shard.grad = view
            else:
                param.shard.grad.add_(self._shard_view(part, param, count).to(param.shard.grad))

    def _offload_gradients(self, part: torch.Tensor, grad: torch.Tensor) -> None:
        fresh = [param for param in self.params if param.shard.grad is None]
        added = [param for param in self.params if param.shard.grad is not None and param.shard.numel()]
        for param in fresh:
            param.grad_is_new = True
            param.shard.grad = self._shard_view(grad, param, param.shard.numel())
        if not added:
            self.host_copies.to_host(grad, part)
            return
        arrived = self._empty(self.shard_numel, False, self.store)

        @torch.no_grad()
        def take():
            for param in fresh:
                self._shard_view(grad, param, param.shard.numel()).copy_(
                    self._shard_view(arrived, param, param.shard.numel())
                )
            for param in added:
                if param.shard.grad is not None:
                    param.shard.grad.add_(self._shard_view(arrived, param, param.shard.numel()))

        self.host_copies.to_host(arrived, part, take)
