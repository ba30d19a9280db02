"""Fingerprints of calls, which the ranks compare with ``COLLECTIVES_CHECK=1`` on NCCL.

NCCL itself doesn't check that all ranks make the same call. With the variable set the ranks
exchange a fingerprint, a row of numbers, of each call before it is issued. That costs a small
all-gather and a copy to the host for each call, so it is for finding a fault, not for production.
The host engine, and those that connect several nodes, compare the same rows as a part of each call.
So they are numbers of a fixed size, and not `agree`'s JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._nccl import DTYPES, OPS
from ..arrays import dtype_name
from ..errors import Mismatch
from .algorithms.schedule import ALGORITHMS
from .algorithms.schedule import OPS as ALGORITHM_OPS
from .arguments import stream_handle
from .engine import get_engine

__all__ = ["KINDS", "PREMUL", "check_calls", "compare", "describe", "fingerprint_of"]

KINDS = (
    "group",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all with splits",
    "uneven all_gather",
    "uneven reduce_scatter",
    "gather",
    "scatter",
    "barrier",
    "message",
    "refused call",
    *(f"{op} by {algorithm}" for op in ALGORITHM_OPS for algorithm in ALGORITHMS[1:]),
)
PREMUL = len(OPS)  # each rank may have its own scalar, so only the kind of the operation is compared
_OP_NAMES = {**{code: name for name, code in OPS.items()}, PREMUL: "premultiplied sum"}
_NONE = -1


def fingerprint_of(
    kind: str, *, dtype: int = _NONE, count: int = _NONE, op: int = _NONE, root: int = _NONE
) -> tuple[int, ...]:
    """Return a call's fingerprint: (index in KINDS, dtype, count, op, root), -1 for none."""
    return KINDS.index(kind), dtype, count, op, root


def check_calls(
    comm, fingerprints: list[tuple[int, ...]], grouped: bool = False, records: Sequence[torch.Tensor | None] = ()
) -> None:
    """Raise `Mismatch` on every rank unless a communicator's ranks make the same calls.

    With COLLECTIVES_CHECK only; blocks until all have come. `grouped`: they are a group's, whose
    number of calls is compared first, since lists of different lengths can't be gathered;
    `records`: of each call what it sends and receives, see `parts`, or None.
    """
    if not (comm._checks_calls and fingerprints):
        return
    with comm._device_guard():
        stream = stream_handle(comm, None)
        if grouped:
            _gather_and_compare(comm, [fingerprint_of("group", count=len(fingerprints))], stream)
        _gather_and_compare(comm, fingerprints, stream)
        for fingerprint, record in zip(fingerprints, records, strict=False):
            if record is None:
                continue
            own = record.to(comm.device)
            gathered = torch.empty((comm.size, record.numel()), dtype=torch.uint8, device=comm.device)
            comm._native.all_gather(own.data_ptr(), gathered.data_ptr(), own.numel(), DTYPES["uint8"], stream)
            table = gathered.cpu()
            try:
                get_engine("host").library.check_parts(table.data_ptr(), comm.size, comm.rank)
            except Mismatch as error:
                error.op = KINDS[fingerprint[0]]
                raise


def _gather_and_compare(comm, fingerprints, stream):
    own = torch.tensor(fingerprints, dtype=torch.int64, device=comm.device)
    gathered = torch.empty((comm.size, *own.shape), dtype=torch.int64, device=comm.device)
    comm._native.all_gather(own.data_ptr(), gathered.data_ptr(), own.numel(), DTYPES["int64"], stream)
    compare(gathered.tolist(), comm.rank)


def compare(table: list[list], own: int, ranks=None) -> None:
    """Raise `Mismatch` unless all ranks' fingerprints are the same.

    `table`: a list of fingerprints for each rank; `own`: this rank's index in it; `ranks`: the rank
    of each entry, None: all ranks in order.
    """
    if all(theirs == table[0] for theirs in table):
        return
    first = next(i for i in range(len(table[0])) if any(theirs[i] != table[0][i] for theirs in table))
    ranks = range(len(table)) if ranks is None else ranks
    lines = [f"  rank {rank}: {describe(theirs[first])}" for rank, theirs in zip(ranks, table, strict=True)]
    which = f" (call {first} of the group)" if len(table[0]) > 1 else ""
    mine = table[own][first]
    raise Mismatch(
        f"the ranks did not make the same call{which}:\n" + "\n".join(lines),
        op=KINDS[mine[0]],
        rank=ranks[own],
        peers=[rank for rank, theirs in zip(ranks, table, strict=True) if theirs[first] != mine],
    )


def describe(fingerprint) -> str:
    """Return a fingerprint in words."""
    kind, dtype, count, op, root = fingerprint
    if not 0 <= kind < len(KINDS):  # what has come is no fingerprint
        return f"a call that this version doesn't know (kind {kind})"
    if KINDS[kind] == "group":
        return f"a group of {count} collectives"
    words = [KINDS[kind]]
    if dtype != _NONE:
        words.append(dtype_name(dtype))
    if count != _NONE:
        words.append(f"count={count}")
    if op != _NONE:
        words.append(f"op={_OP_NAMES.get(op, op)}")
    if root != _NONE:
        words.append(f"root={root}")
    return " ".join(words)
