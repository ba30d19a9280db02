"""Sharded parameters: the two forms of each one, and the layout of a flat buffer of them.

A parameter's *shard* is the part of it that this rank owns, as a Parameter that the optimizer
steps. Its *full* form is a Parameter of the original shape, a view of the gathered buffer while
there is one.
"""

from __future__ import annotations

import torch
from torch import nn

from ..layout import Layout, bucket_layout, pad_count

__all__ = ["ShardedParam", "shard_layout"]


def shard_layout(counts: list[int], dtypes, ranks: int, align: int = 0) -> tuple[Layout, int]:
    """Place parameters of these element counts in a flat buffer; return the layout and the elements
    of a rank's shard.

    Each parameter, and each shard, begins at a multiple of 16 bytes in all `dtypes` in which the
    buffer is sent. `align`: a shard is a multiple of so many elements; 0: no further rule.
    """
    narrowest = min(dtype.itemsize for dtype in dtypes)
    layout = bucket_layout(counts, narrowest)
    each = -(-layout.total // ranks)
    return layout, max(pad_count(each, narrowest), -(-each // align) * align if align else 0)


class ShardedParam:
    """One parameter of a unit.

    `names`: the first is its own, the others are those of tied weights. `places`: the modules and
    attributes that hold it. `offset`: its first element in the flat buffer. This rank owns its
    elements ``[start, start + shard.numel())``, which begin at `shard_offset` in the flat shard.
    """

    __slots__ = (
        "__weakref__", "accumulated_grad", "count", "expects_grad", "full", "grad_is_new", "has_grad_hook",
        "has_grad_in_backward", "has_unreduced_grad", "names", "offset", "places", "requires_grad", "shape", "shard",
        "shard_offset", "start", "stride", "substitute",
    )  # fmt: skip

    def __init__(self, names: list[str], places: list[tuple[nn.Module, str]], original: nn.Parameter):
        self.names = names
        self.places = places
        self.shape = original.shape
        self.stride = torch.empty(self.shape, device="meta").stride()  # contiguous, whatever the original's is
        self.count = original.numel()
        self.offset = self.shard_offset = self.start = 0
        self.shard: nn.Parameter | None = None
        self.full: nn.Parameter | None = None
        self.substitute: torch.Tensor | None = None  # held by the modules while a state dict is made or loaded
        self.accumulated_grad: torch.Tensor | None = None  # unreduced gradient, in reduce_dtype
        self.has_grad_in_backward = False  # in the backward in progress
        self.has_unreduced_grad = False  # in it, or in one since the last reduction
        self.requires_grad = original.requires_grad
        self.has_grad_hook = False  # a hook reports its gradient
        self.expects_grad = self.requires_grad  # it had a gradient in the last backward
        self.grad_is_new = False  # the shard had no gradient before this backward

    @property
    def name(self) -> str:
        return self.names[0]

    # as_strided is one call where a slice and its view are two, at four times its time.

    def full_view(self, flat: torch.Tensor) -> torch.Tensor:
        """View this parameter, in its original shape, in a flat buffer of the whole group."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def shard_view(self, flat: torch.Tensor, n: int | None = None) -> torch.Tensor:
        """View this parameter's part of a flat shard, with as many dimensions as the parameter, so
        that ``p.dim()`` is right. `n`: its elements; None: those of `shard`.
        """
        n = self.shard.numel() if n is None else n
        at = flat.storage_offset() + self.shard_offset
        if n == self.count:
            return flat.as_strided(self.shape, self.stride, at)
        # With the 1s in front: an embedding of (n, 1), read by mistake, would broadcast in silence.
        ones = len(self.shape) - 1
        return flat.as_strided((1,) * ones + (n,), (n,) * ones + (1,), at)

    def __repr__(self):
        return f"<ShardedParam {self.name}, {tuple(self.shape)}, {self.shard.numel()} of {self.count} elements here>"
