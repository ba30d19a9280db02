"""The barrier of a communicator, which blocks the host on both engines."""

from __future__ import annotations

from threading import get_ident

import torch

from .._nccl import DTYPES, OPS
from ..errors import CollectiveTimeout, InvalidUsage
from .closing import refuse_in_capture
from .fingerprint import check_calls, fingerprint_of
from .group import open_groups
from .work import Work

__all__ = ["barrier", "start_barrier"]

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


def start_barrier(comm) -> Work:
    """Begin a barrier, the same call as `barrier` for the ranks that block in it; return its Work."""
    comm._check_open("barrier")
    if not comm._on_host:
        return _start_on_cuda(comm)
    work, queue = Work("barrier", 0, None), comm._queue
    handle = queue.begin("barrier")
    try:
        _issue_on_host(comm, handle)
    except BaseException:
        queue.cancel("barrier", ())
        raise
    queue.end("barrier", (), (work,))
    return work


def _barrier_on_host(comm) -> None:
    comm._check_open("barrier")
    _issue_on_host(comm, 0)


def _issue_on_host(comm, queue: int) -> None:
    label = comm.engine.library.label
    label("barrier")
    try:
        comm._native.all_reduce(0, 0, 0, _UINT8, OPS["sum"], queue)
    finally:
        label()


def _start_on_cuda(comm) -> Work:
    refuse_in_capture(comm, "barrier")
    if comm._checks_calls:
        check_calls(comm, [fingerprint_of("barrier")])
    if comm._barrier_tensor is None:
        comm._barrier_tensor = torch.zeros(1, dtype=torch.uint8, device=comm.device)
    return comm.all_reduce(comm._barrier_tensor, "max", async_op=True)


def _barrier_on_cuda(comm) -> None:
    work = _start_on_cuda(comm)
    # The watchdog aborts it at the limit and names the ranks that have not come: this wait leaves
    # it the time for that.
    limit = None if comm.timeout is None else comm.timeout + _WATCHDOG_SECONDS
    if not comm._queue.wait_blocking(work._pending_op, limit):
        raise CollectiveTimeout(f"not all ranks came within {comm.timeout} s", op="barrier", rank=comm.rank)
    work.wait()
