"""Shard of a bucket: which of its elements a rank owns."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["ShardSpec", "flat_view"]


class ShardSpec(NamedTuple):
    """Elements of a bucket that a rank owns: its `shard`, and the remainder that all ranks own."""

    numel: int  # of the bucket
    world_size: int
    align: int  # elements of which a shard is a multiple
    rank: int

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // (self.world_size * self.align) * self.align

    @property
    def sharded_numel(self) -> int:
        """Elements of all shards; the remainder begins here."""
        return self.shard_numel * self.world_size

    @property
    def shard(self) -> slice:
        """This rank's shard."""
        return slice(self.rank * self.shard_numel, (self.rank + 1) * self.shard_numel)

    @property
    def remainder(self) -> slice:
        """The elements after the last shard, which all ranks own."""
        return slice(self.sharded_numel, self.numel)

    def local_spans(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Return (first, count) of each span that this rank owns of the `count` elements from
        `offset` on; `first` counts from `offset`.
        """
        spans = [(self.shard.start, self.shard.stop), (self.sharded_numel, self.numel)]
        if spans[0][1] == spans[1][0]:
            spans = [(spans[0][0], spans[1][1])]  # the last rank's
        return _intersect(spans, offset, count)

    def remote_spans(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Return (first, count) of each span, counted likewise, that only other ranks own."""
        return _intersect([(0, self.shard.start), (self.shard.stop, self.sharded_numel)], offset, count)


def _intersect(spans, offset, count) -> list[tuple[int, int]]:
    cut = [(max(first, offset) - offset, min(end, offset + count) - offset) for first, end in spans]
    return [(first, end - first) for first, end in cut if end > first]


def flat_view(tensor, first, count) -> torch.Tensor:
    """View elements of a dense tensor, in the order of its memory, as a tensor of one dimension."""
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset() + first)
