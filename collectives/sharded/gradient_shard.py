"""Gradient shard: a parameter group's gradients, from the full ones to the shards'."""

from __future__ import annotations

import contextlib

import torch

from ..kernels import pack
from ..kernels.reusable_table import ReusableTable
from ..layout import Layout
from .buffer_pool import GRADIENTS
from .group_buffers import GroupBuffers
from .mesh import Ranks
from .param import ShardedParam
from .streams import HostCopies

__all__ = ["GradientShard"]


class GradientShard:
    """Full gradients of a group's parameters, and the flat shard of the reduced ones.

    `flat`: the flat shard of gradients, which the shards' ``grad`` view; None until there is one.
    `layout`, `shard_numel`: those of the group. `dtype`: of the shards and their gradients;
    `gather_dtype`: of the full gradients; `reduce_dtype`: in which they are reduced. `host_copies`:
    the copies of gradients to the host, where the shards lie there.
    """

    def __init__(
        self, params: list[ShardedParam], ranks: Ranks, buffers: GroupBuffers, layout: Layout, shard_numel: int, *,
        dtype: torch.dtype, gather_dtype: torch.dtype, reduce_dtype: torch.dtype, host_copies: HostCopies,
    ):  # fmt: skip
        self.params = params
        self.ranks = ranks
        self.buffers = buffers
        self.layout = layout
        self.shard_numel = shard_numel
        self.unsharded_numel = ranks.size * shard_numel
        self.dtype = dtype
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.host_copies = host_copies
        self.flat: torch.Tensor | None = None
        self._table: ReusableTable | None = None  # of the full gradients, for `pack`
        # Whether the packing kernel's own padding is that of this layout.
        narrowest = min(each.itemsize for each in (dtype, gather_dtype, reduce_dtype))
        self._default_padding = reduce_dtype.itemsize == narrowest
        ends = [*layout.offsets[1:], self.unsharded_numel]
        # Padding: the elements between parameters and after the last one.
        self._gaps = [
            (s.offset + s.count, end) for s, end in zip(params, ends, strict=True) if s.offset + s.count < end
        ]

    def free_dropped(self, shards: list[torch.Tensor]) -> None:
        """Free the flat shard of gradients until the backward, if zero_grad has dropped all of them."""
        if self.flat is not None and self.ranks.shard is not None and all(shard.grad is None for shard in shards):
            self.flat = None

    # ---- Gathered, for summon_full_params.

    def set_substitute_grads(self, flat: torch.Tensor) -> None:
        """Set the substitutes' gradients to parts of a flat buffer of all shards' gradients, except
        for parameters that have none on any rank. A collective.
        """
        there = [param.shard.grad is not None and (param.shard.numel() > 0 or not param.count) for param in self.params]
        there = torch.tensor(there, dtype=torch.uint8, device=self.buffers.device)
        if self.ranks.shard is not None:
            self.ranks.shard.all_reduce(there, "max")
        for param, has in zip(self.params, there.tolist(), strict=True):
            if has and param.substitute is not None:
                param.substitute.grad = param.full_view(flat).to(param.substitute.device)

    def write_back(self) -> None:
        """Copy this rank's part of the substitutes' gradients to the shards' gradients."""
        for param in self.params:
            if param.substitute.grad is not None and param.shard.grad is not None:
                here = param.substitute.grad.reshape(-1)[param.start : param.start + param.shard.numel()]
                param.shard.grad.copy_(here.view(param.shard.shape))

    # ---- Reduced.

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
    def pack(self, custom=None) -> torch.Tensor:
        """Pack the full gradients into a flat buffer and return it; parameters without a gradient
        are zeros in it.
        """
        flat = None
        if self.ranks.shard is None and self.reduce_dtype == self.dtype and not self.buffers.offloads:
            flat = self.alloc_flat() if all(param.shard.grad is None for param in self.params) else None
        if flat is None:
            flat = self.buffers.acquire(GRADIENTS, self.unsharded_numel, self.reduce_dtype, custom)
        params, tensors = [], []
        for param in self.params:
            grad = param.full.grad
            if param.accumulated_grad is not None:
                grad = param.accumulated_grad if grad is None else param.accumulated_grad.add_(grad)
                param.accumulated_grad = None
            param.full.grad = None
            if grad is not None:
                params.append(param)
                tensors.append(grad.to_dense() if grad.layout != torch.strided else grad)
        if not flat.is_cuda or self.dtype.is_complex:
            # The kernel's table takes longer to read a new list each time than the host takes to
            # copy.
            if len(tensors) < len(self.params):
                flat.zero_()
            for begin, end in self._gaps:
                flat[begin:end].zero_()
            if tensors:
                torch._foreach_copy_([param.full_view(flat) for param in params], tensors)
        elif len(tensors) == len(self.params) and self._default_padding:
            tensors = [each.contiguous() for each in tensors]
            if self._table is None or self._table.dtype != flat.dtype or not self._table.replace(tensors):
                self._table = ReusableTable(tensors, flat.dtype)
            pack(self._table, flat)
            self._table.release()
            flat[self.layout.total :].zero_()
        else:
            flat.zero_()
            if tensors:
                pack([each.contiguous() for each in tensors], flat, offsets=[param.offset for param in params])
        return flat

    def free_packed(self, flat: torch.Tensor) -> None:
        """Give up the buffer of `pack`, once its values were stored."""
        with self.host_copies.after_copies(flat.device) if self.buffers.offloads else contextlib.nullcontext():
            self.buffers.release(GRADIENTS, flat)

    def alloc_flat(self) -> torch.Tensor:
        """Return the memory of the flat shard of gradients; allocate it if there is none."""
        if self.flat is None or self.flat.numel() != self.shard_numel:
            shared = self.ranks.shard is None and self.ranks.world._on_host  # reduced where it lies
            self.flat = self.buffers.alloc_stored(self.shard_numel, self.dtype, shared=shared)
        return self.flat

    def reduce_output(self, flat: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the output of the reduce-scatter of `flat`, and whether it is the flat shard of
        gradients itself.
        """
        fits = self.reduce_dtype == self.dtype and not self.buffers.offloads
        if fits and all(param.shard.grad is None for param in self.params):
            return self.alloc_flat(), True
        if flat.is_cuda:
            return self.local_shard(flat), False
        return torch.empty(self.shard_numel, dtype=self.reduce_dtype, device=self.buffers.device), False

    def unique_grads(self, ranks: Ranks) -> list[torch.Tensor]:
        """Return parts of the shards' gradients, flat, which with those of all ranks are the whole
        gradient: each element once.
        """
        grads = [param.shard.grad for param in self.params if param.shard.grad is not None]
        in_flat = self.flat is not None and all(
            grad.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr() for grad in grads
        )
        same = ranks.world if ranks.shard is None else ranks.replicas  # ranks with the same gradients
        if in_flat and len(grads) == len(self.params):
            return [self.flat if same is None else self.flat.tensor_split(same.size)[same.rank]]
        return [grad.reshape(-1) for grad in grads] if ranks.is_first_replica else []

    def local_shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a flat buffer, which may have only that."""
        if flat.numel() == self.shard_numel:
            return flat
        return flat[self.ranks.rank * self.shard_numel :][: self.shard_numel]

    @torch.no_grad()
    def set_gradients(self, reduced: torch.Tensor, in_place: bool) -> None:
        """Make this rank's part of the reduced gradients the shards' gradients, or add it to those
        they have.

        `reduced`: that part, or all ranks' parts. `in_place`: it is the flat shard itself, which
        `free_dropped` may have let go since. Where the shards lie on the host, the values are there
        after `host_copies.wait()`.
        """
        if in_place:
            self.flat = reduced
        grad, part = self.alloc_flat(), self.local_shard(reduced)
        if self.buffers.offloads:
            self._offload(part, grad)
            return
        if not in_place and all(param.shard.grad is None for param in self.params):
            grad.copy_(part)
            in_place = True
        for param in self.params:
            if param.shard.grad is None:
                param.grad_is_new = True
            if in_place or param.shard.grad is None:
                view = param.shard_view(grad)
                if not in_place:
                    view.copy_(param.shard_view(part))
                param.shard.grad = view
            else:
                param.shard.grad.add_(param.shard_view(part).to(param.shard.grad))

    def _offload(self, part: torch.Tensor, grad: torch.Tensor) -> None:
        fresh = [param for param in self.params if param.shard.grad is None]
        added = [param for param in self.params if param.shard.grad is not None and param.shard.numel()]
        for param in fresh:
            param.grad_is_new = True
            param.shard.grad = param.shard_view(grad)
        if not added:
            self.host_copies.to_host(grad, part)
            return
        arrived = self.buffers.alloc_stored(self.shard_numel, self.dtype, shared=False)

        @torch.no_grad()
        def add_arrived():
            for param in fresh:
                param.shard_view(grad).copy_(param.shard_view(arrived))
            for param in added:
                if param.shard.grad is not None:
                    param.shard.grad.add_(param.shard_view(arrived))

        self.host_copies.to_host(arrived, part, add_arrived)
