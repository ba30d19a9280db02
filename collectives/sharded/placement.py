"""RaggedShard: how a parameter of a unit is divided over ranks, with any number of rows on each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.distributed.tensor.placement_types import Placement

__all__ = ["RaggedShard"]


class RaggedShard(Placement):
    """Rank r of the mesh dimension has the rows ``[bounds[r], bounds[r + 1])`` of a tensor.

    With ``by_rows=False`` the bounds count elements, and a local part is a vector: a part of the
    flattened tensor.

    Not a subclass of torch's `Shard`, whose static helpers would take it for an even one.
    """

    def __init__(self, bounds, by_rows: bool = True):
        super().__init__()
        object.__setattr__(self, "bounds", tuple(bounds))
        object.__setattr__(self, "by_rows", by_rows)

    def span(self, rank: int) -> slice:
        """Return the rows, or elements, of a rank."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def cut(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor: a view where the tensor is contiguous."""
        return (full if self.by_rows else full.reshape(-1))[self.span(rank)]

    def local_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        """Return the shape of a rank's part of a tensor of this shape."""
        count = self.bounds[rank + 1] - self.bounds[rank]
        return torch.Size((count, *shape[1:])) if self.by_rows else torch.Size((count,))

    def boxes(self, shape: torch.Size, rank: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], slice]]:
        """Yield a rank's part as boxes: offset and size in the whole tensor, elements in the flattened local part.

        Whole rows are one box. An interval of elements is a few, at most two for each dimension and one. A tensor of no
        elements is one empty box on each rank, so that a checkpoint has its name and shape.
        """
        span, inner = self.span(rank), math.prod(shape[1:])
        if not math.prod(shape):
            yield (0,) * len(shape), tuple(shape), slice(0, 0)
            return
        if span.start == span.stop:
            return
        if self.by_rows:
            offset = (span.start,) + (0,) * (len(shape) - 1)
            yield offset, tuple(self.local_shape(shape, rank)), slice(0, (span.stop - span.start) * inner)
            return
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        at = span.start
        while at < span.stop:
            # The largest box from here: as many whole steps of the outermost dimension that begins here as fit.
            dim = next((d for d, stride in enumerate(strides) if at % stride == 0 and at + stride <= span.stop), None)
            if dim is None:  # a tensor of no dimensions
                yield (), (), slice(0, 1)
                return
            index = [at // stride % size for stride, size in zip(strides, shape, strict=True)]
            steps = min((span.stop - at) // strides[dim], shape[dim] - index[dim])
            size = (*(1,) * dim, steps, *shape[dim + 1 :])
            count = steps * strides[dim]
            yield tuple(index), size, slice(at - span.start, at - span.start + count)
            at += count

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows, or elements, of each rank."""
        return tuple(stop - start for start, stop in itertools.pairwise(self.bounds))

    # ---- What torch asks a placement.

    def is_shard(self, dim: int | None = None) -> bool:
        return dim in (None, 0)

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    def __eq__(self, other) -> bool:
        return self is other or (
            isinstance(other, RaggedShard) and self.bounds == other.bounds and self.by_rows == other.by_rows
        )

    def __hash__(self) -> int:
        return hash((RaggedShard, self.bounds, self.by_rows))

    def __repr__(self) -> str:
        return f"RaggedShard({self.bounds}{'' if self.by_rows else ', by_rows=False'})"

    __str__ = __repr__

    def __reduce__(self):
        return RaggedShard, (self.bounds, self.by_rows)

    def __deepcopy__(self, memo):
        return self
