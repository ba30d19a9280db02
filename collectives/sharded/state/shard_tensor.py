"""ShardTensor: a rank's part of a larger tensor as an entry of a state dict, for
torch.distributed.checkpoint.

A shard is an interval of the tensor's elements in their order, and so consists of a few boxes: of a
matrix the end of a row, whole rows, the beginning of a row. In a checkpoint each box is a chunk.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ...errors import InvalidArgument, InvalidUsage
from ...torch_compat import disabled_torch_function
from .dtensor import as_full_tensor

__all__ = ["ShardTensor", "boxes"]


def boxes(shape, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of the boxes that make up elements ``[start, stop)`` of a tensor of
    `shape`, in order.

    At most ``2 n - 1`` for n dimensions. The elements of each box are contiguous.
    """
    if stop <= start:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    found: list = []

    def within(row: int, begin: int, end: int) -> None:
        found.extend(((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], begin, end))

    if first == last and stop - start < inner:
        within(first, start % inner, start % inner + stop - start)
        return found
    head = start % inner
    if head:
        within(first, head, inner)
        first += 1
    tail = stop % inner
    whole = stop // inner
    if whole > first:
        zeros = (0,) * (len(shape) - 1)
        found.append(((first, *zeros), (whole - first, *shape[1:])))
    if tail:
        within(last, 0, tail)
    return found


class ShardTensor(torch.Tensor):
    """This rank's shard of a tensor: it has the whole one's shape, and `local` has the elements
    from `start` on.

    `collectives.sharded` exports it as `Piece`. It supports `local`, `to_local()`, ``copy_`` from a
    whole tensor, from a DTensor, or from a shard at the same position, ``clone``, ``to``, pickling,
    and torch.distributed.checkpoint's save and load. There is no arithmetic.
    """

    local: torch.Tensor
    start: int
    filled = True  # False: nothing was copied to it since it was allocated

    __torch_function__ = disabled_torch_function  # reads of attributes are called often, and take a tenth of the time

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape, start: int):
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        made.local = local.detach().view(-1)
        made.start = start
        return made

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements, flat, where they lie."""
        return self.local

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor's elements at the same position, flat."""
        return whole.detach().reshape(-1)[self.start : self.start + self.local.numel()]

    def like(self, local: torch.Tensor) -> ShardTensor:
        return ShardTensor(local, self.shape, self.start)

    def __repr__(self, *, tensor_contents=None):
        stop = self.start + self.local.numel()
        return f"Piece([{self.start}:{stop}] of {tuple(self.shape)}, {self.local})"

    def __reduce_ex__(self, protocol):
        return ShardTensor, (self.local.clone(), tuple(self.shape), self.start)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.copy_.default:
            return _copy(args[0], args[1])
        shard = args[0] if args else None
        if not isinstance(shard, ShardTensor):
            raise InvalidUsage(_ONLY.format(func))
        if func in (aten.detach.default, aten.alias.default):
            return shard.like(shard.local)
        if func is aten.clone.default:
            return shard.like(shard.local.clone())
        if func in (aten._to_copy.default, aten.empty_like.default, aten.zeros_like.default):
            return shard.like(func(shard.local, *args[1:], **kwargs))
        if func is aten.new_empty.default and tuple(args[1]) == tuple(shard.shape):  # to stage a checkpoint
            return shard.like(func(shard.local, [shard.local.numel()], **kwargs))
        if func is aten.zero_.default:
            shard.local.zero_()
            return shard
        if func is aten.equal.default and isinstance(args[1], ShardTensor):
            return shard._same_place(args[1]) and torch.equal(shard.local, args[1].local)
        if func is aten.is_pinned.default:
            return shard.local.is_pinned()
        raise InvalidUsage(_ONLY.format(func))

    def _same_place(self, other: ShardTensor) -> bool:
        return (self.shape, self.start, self.local.numel()) == (other.shape, other.start, other.local.numel())

    # ---- torch.distributed.checkpoint's protocol for entries.

    def _boxes(self) -> list:
        found = boxes(tuple(self.shape), self.start, self.start + self.local.numel())
        if not found and self.numel() == 0:
            found = [((0,) * self.dim(), tuple(self.shape))]
        return found

    def __create_write_items__(self, fqn: str, _object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for offsets, sizes in self._boxes():
            count = math.prod(sizes)
            if index.offset is None or tuple(index.offset) == offsets:
                return self.local[at : at + count].view(sizes)
            at += count
        raise InvalidArgument(f"{index.fqn} has no elements at {tuple(index.offset)} on this rank")


_ONLY = (
    "{} of a rank's piece of a tensor: only copying and checkpoints take one; for what is in it take its to_local(), "
    "or the full state dict"
)


def _copy(to, source):
    if not isinstance(to, ShardTensor):
        raise InvalidUsage(
            f"a rank's piece of a tensor of {tuple(source.shape)} can't be loaded into a whole one: load a full state "
            "dict, or shard the module as it was"
        )
    source = as_full_tensor(source)
    if isinstance(source, ShardTensor):
        if not to._same_place(source):
            raise InvalidArgument(
                f"this rank's piece is elements {to.start} to {to.start + to.local.numel()} of {tuple(to.shape)}, and "
                f"that of the state dict {source.start} to {source.start + source.local.numel()} of "
                f"{tuple(source.shape)}: load a full state dict, or a checkpoint by `load`, on another number of ranks"
            )
        part = source.local
    else:
        if to.shape != source.shape:
            raise InvalidArgument(f"a tensor of {tuple(source.shape)} can't be copied to one of {tuple(to.shape)}")
        part = to.of(source)
    if part.data_ptr() != to.local.data_ptr() or part.dtype != to.local.dtype:
        to.local.copy_(part)
    to.filled = True
    return to
