"""The check that all ranks make the same call, for an engine that has none itself (NCCL with ``COLLECTIVES_CHECK=1``).

The ranks exchange a row of numbers for each call before it is issued. That costs a small all-gather and a copy to the
host for each call, so it is for finding a fault, not for production.
"""

from __future__ import annotations

import torch

from .._nccl import DTYPES, OPS
from ..arrays import dtype_name
from ..errors import Mismatch
from .algorithms.schedule import ALGORITHMS
from .algorithms.schedule import OPS as OPS_BY

__all__ = ["KINDS", "PREMUL", "agree", "compare", "describe", "row"]

KINDS = (
    "group",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all with split sizes",
    "gather",
    "scatter",
    "barrier",
    "message",
    *(f"{op} by {algorithm}" for op in OPS_BY for algorithm in ALGORITHMS[1:]),
)
PREMUL = len(OPS)  # each rank may have its own scalar, so only that it is one is compared
_OP_NAMES = {**{code: name for name, code in OPS.items()}, PREMUL: "premultiplied sum"}
_NONE = -1


def row(kind: str, *, dtype: int = _NONE, count: int = _NONE, op: int = _NONE, root: int = _NONE) -> tuple[int, ...]:
    """Describe one call in numbers."""
    return KINDS.index(kind), dtype, count, op, root


def agree(native, rows: list[tuple[int, ...]], *, device: torch.device, stream: int, grouped: bool = False) -> None:
    """Raise `Mismatch` on every rank unless all give the same rows; blocks until all have come.

    In a group the number of its calls is compared first, since the rows of unlike groups can't be exchanged.
    """
    if grouped:
        _compare(native, [row("group", count=len(rows))], device, stream)
    if rows:
        _compare(native, rows, device, stream)


def _compare(native, rows, device, stream):
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    everyone = torch.empty((native.size, *mine.shape), dtype=torch.int64, device=device)
    native.all_gather(mine.data_ptr(), everyone.data_ptr(), mine.numel(), DTYPES["int64"], stream)
    compare(everyone.tolist(), native.rank)


def compare(table: list[list], own: int, ranks=None) -> None:
    """Raise `Mismatch` unless all ranks' rows are the same; `table`: every rank's rows, `own`: who asks; `ranks`: whose
    rows they are, if they aren't all ranks' in order."""
    if all(theirs == table[0] for theirs in table):
        return
    unlike = next(i for i in range(len(table[0])) if any(theirs[i] != table[0][i] for theirs in table))
    ranks = range(len(table)) if ranks is None else ranks
    lines = [f"  rank {rank}: {describe(theirs[unlike])}" for rank, theirs in zip(ranks, table, strict=True)]
    which = f" (call {unlike} of the group)" if len(table[0]) > 1 else ""
    mine = table[own][unlike]
    raise Mismatch(
        f"the ranks did not make the same call{which}:\n" + "\n".join(lines),
        op=KINDS[mine[0]],
        rank=ranks[own],
        peers=[rank for rank, theirs in zip(ranks, table, strict=True) if theirs[unlike] != mine],
    )


def describe(numbers) -> str:
    """Give the words for a row of numbers."""
    kind, dtype, count, op, root = numbers
    if KINDS[kind] == "group":
        return f"a group of {count} collectives"
    words = [KINDS[kind]]
    if dtype != _NONE:
        words.append(dtype_name(dtype))
    if count != _NONE:
        words.append(f"count={count}")
    if op != _NONE:
        words.append(f"op={_OP_NAMES[op]}")
    if root != _NONE:
        words.append(f"root={root}")
    return " ".join(words)
