"""All-reduce of sparse COO tensors, which torch's DDP makes for ``Embedding(sparse=True)``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.agree import verify_same
from ..errors import InvalidArgument
from .work import completed_work

__all__ = ["all_reduce"]


def all_reduce(comm, tensor: torch.Tensor, op):
    """Sum a sparse COO tensor over all ranks, in place. Blocks until it is done.

    The ranks' indices may differ. The result is coalesced, with the union of all indices. Raises
    `Mismatch` on all ranks where shapes, dtypes or reductions differ.
    """
    kind = getattr(op, "op", op)
    if tensor.layout is not torch.sparse_coo or kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise InvalidArgument(
            f"of sparse tensors only torch.sparse_coo can be reduced, and only by SUM and AVG, not {tensor.layout} by "
            f"{kind}",
            op="all_reduce", rank=comm.rank,
        )  # fmt: skip
    verify_same(
        comm, "the ranks' sparse tensors can't be reduced together", {
            "shape": tuple(tensor.shape), "dtype": tensor.dtype, "dense_dim": tensor.dense_dim(),
            "op": "AVG" if kind == dist.ReduceOp.AVG else "SUM",
        }, op="all_reduce",
    )  # fmt: skip
    mine = tensor.detach().coalesce()
    counts = torch.zeros(comm.size, dtype=torch.int64, device=tensor.device)
    counts[comm.rank] = mine._nnz()
    comm.all_gather(counts, counts[comm.rank : comm.rank + 1])
    counts = counts.tolist()
    indices = _gather(comm, mine.indices().t().contiguous(), counts).t()
    values = _gather(comm, mine.values().contiguous(), counts)
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, device=values.device).coalesce()
    if kind == dist.ReduceOp.AVG:
        total = total / comm.size
    with torch.no_grad():
        tensor.copy_(total)
    return completed_work([tensor])


def _gather(comm, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return all ranks' rows, `counts[r]` of rank r, one behind the other."""
    longest = max(counts)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = rows.new_empty((comm.size, longest, *rows.shape[1:]))
    comm.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered.unbind(0), counts, strict=True)])
