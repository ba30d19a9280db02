"""pack and unpack: many tensors to and from one flat buffer in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy
import torch

from ..arrays import TORCH_CODES
from ..layout import TILE, bucket_layout
from . import abi
from .execution import Statistics, run

__all__ = ["Table", "pack", "unpack"]


class Table:
    """Tensors that are packed into one flat buffer or unpacked from it: addresses, counts and offsets for a kernel."""

    def __init__(self, tensors: Iterable[torch.Tensor], dtype: torch.dtype, offsets: Sequence[int] | None = None):
        self.tensors = list(tensors)
        self.dtype = dtype
        counts = [tensor.numel() for tensor in self.tensors]
        layout = bucket_layout(counts, dtype.itemsize)
        self.offsets = layout.offsets if offsets is None else tuple(offsets)
        self.total = layout.total
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        rows = numpy.zeros(len(counts), dtype=abi.TENSOR)
        rows["data"] = [tensor.data_ptr() for tensor in self.tensors]
        rows["count"] = counts
        rows["offset"] = self.offsets
        tiles = -(-rows["count"] // TILE)
        rows["first_tile"] = numpy.cumsum(tiles) - tiles
        rows["type"] = [TORCH_CODES[tensor.dtype] for tensor in self.tensors]
        self.tiles = int(tiles.sum())
        self._rows = torch.from_numpy(rows.view(numpy.uint8)).to(self.device)


def pack(tensors, flat, *, scale=1.0, statistics: Statistics | None = None) -> None:
    """Pack tensors into a flat buffer."""
    _cast(tensors, flat, scale, 0, statistics, "pack")


def unpack(flat, tensors, *, scale=1.0, add=False, statistics: Statistics | None = None) -> None:
    """Unpack a flat buffer into tensors."""
    _cast(tensors, flat, scale, abi.FROM_FLAT | (abi.ADD if add else 0), statistics, "unpack")


def _cast(tensors, flat, scale, flags, statistics, op):
    table = tensors if isinstance(tensors, Table) else Table(tensors, flat.dtype)
    args = abi.CastArgs(
        abi.Work(table.tiles, 0, 0), table._rows.data_ptr(), len(table.tensors), flat.data_ptr(), 0, scale,
        TORCH_CODES[flat.dtype], flags,
    )
    if statistics is not None:
        statistics.begin(args.work, flat.device, op)
    if table.tiles:
        run(abi.CAST, args, flat.device)
    if statistics is not None:
        statistics.finish(table.tiles)
