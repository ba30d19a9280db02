"""NCCL's own estimates of a collective's time, from ``ncclGroupSimulateEnd``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import init
from collectives._nccl import DTYPES
from collectives._nccl import OPS as REDOPS
from collectives.comm.engine import engines
from collectives.errors import CollectivesError

__all__ = ["nccl_estimates", "own_estimates"]


def nccl_estimates(comm, op: str, sizes: Sequence[int]) -> dict[int, float | None]:
    """Return NCCL's own estimate in seconds for each size in bytes of one float32 `op` on `comm`.

    None where it has none. Nothing is sent. C: ncclGroupSimulateEnd, since NCCL 2.22. Raises
    `EngineUnavailable` from an older one and `InvalidUsage` from an engine that makes no estimates.
    """
    library, native, found = comm.engine.library, comm._native, {}
    for nbytes in sizes:
        count = max(1, nbytes // 4 // comm.size) * comm.size
        array = torch.zeros(count, device=comm.device)
        part = array[: count // comm.size]
        stream = 0 if comm.device.type == "cpu" else torch.cuda.current_stream(comm.device).cuda_stream
        dtype, add = DTYPES["float32"], REDOPS["sum"]
        library.group_start()
        try:
            if op == "all_reduce":
                native.all_reduce(array.data_ptr(), array.data_ptr(), count, dtype, add, stream)
            elif op == "reduce_scatter":
                native.reduce_scatter(array.data_ptr(), part.data_ptr(), part.numel(), dtype, add, stream)
            else:
                native.all_gather(part.data_ptr(), array.data_ptr(), part.numel(), dtype, stream)
        finally:  # a refused call leaves its group open
            found[nbytes] = library.group_simulate_end()
    return found


def own_estimates(op: str, sizes: Sequence[int]) -> tuple[int, dict[int, float | None]] | str:
    """Return (ranks, estimates) of a communicator over this process's GPU, or why there are
    none.
    """
    info = next(info for info in engines() if info.name == "nccl")
    if not info.available:
        return info.reason
    try:
        with init(engine="nccl") as comm:
            return comm.size, nccl_estimates(comm, op, sizes)
    except CollectivesError as error:
        return str(error)
