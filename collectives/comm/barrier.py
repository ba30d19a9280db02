"""The barrier of a communicator, which blocks the host on both engines."""

from __future__ import annotations

from threading import get_ident

import torch

from .._nccl import DTYPES, OPS
from ..errors import CollectiveTimeout, InvalidUsage
from .closing import refuse_in_capture
from .fingerprint import check_calls, fingerprint_of
from .group import open_groups

__all__ = ["barrier"]

_UINT8 = DTYPES["uint8"]
_WATCHDOG_SECONDS = 10.0  # time for the watchdog to abort the communicator after its limit


def barrier(comm) -> None:
    """Block until all ranks have called it and all operations before it are done.

    See `Communicator.barrier`.
    """
    if open_groups and get_ident() in open_groups:
        raise InvalidUsage("barrier() can't stand in a group: call it after the `with` block", rank=comm.rank)
    if comm._on_host:
        _barrier_on_host(comm)
    else:
        _barrier_on_cuda(comm)


def _barrier_on_host(comm) -> None:
    comm._check_open("barrier")
    label = comm.engine.library.label
    label("barrier")
    try:
        comm._native.all_reduce(0, 0, 0, _UINT8, OPS["sum"], 0)
    finally:
        label()


def _barrier_on_cuda(comm) -> None:
    refuse_in_capture(comm, "barrier")
    if comm._checks_calls:
        check_calls(comm, [fingerprint_of("barrier")])
    if comm._barrier_tensor is None:
        comm._barrier_tensor = torch.zeros(1, dtype=torch.uint8, device=comm.device)
    work = comm.all_reduce(comm._barrier_tensor, "max", async_op=True, algorithm="native")
    # The watchdog aborts it at the limit and names the ranks that have not come: this wait leaves
    # it the time for that.
    limit = None if comm.timeout is None else comm.timeout + _WATCHDOG_SECONDS
    if not comm._queue.wait_blocking(work._pending_op, limit):
        raise CollectiveTimeout(f"not all ranks came within {comm.timeout} s", op="barrier", rank=comm.rank)
    work.wait()
