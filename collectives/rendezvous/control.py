"""Control communicators: small arrays on host memory, over the ranks of another communicator."""

from __future__ import annotations

import time

import torch

from ..comm.agree import all_gather_bytes
from ..comm.communicator import Communicator
from ..comm.engine import get_engine
from ..comm.waiting import log_while_waiting
from .open import open_communicator
from .peers import Participant

__all__ = ["bootstrap_on_host", "dup_on_host", "open_control"]

_OPEN_TIMEOUT_S = 300.0  # where the communicator has no limit of its own


def open_control(comm: Communicator) -> Communicator | None:
    """Open a control communicator over a communicator's ranks. A collective; None for one rank.

    On the host it is a split, so that queued operations don't delay it. For ranks on GPUs it is one
    of the host engine's, with connections of its own between nodes.
    """
    return None if comm.size == 1 else dup_on_host(comm)


def dup_on_host(comm: Communicator, seconds: float | None = None) -> Communicator:
    """Open another communicator of the same ranks on host memory. A collective.

    Raises `CollectiveTimeout` where ranks have not come after `seconds` (None: the communicator's
    own limit).
    """
    if not comm._on_host:
        return bootstrap_on_host(comm, seconds)
    before = comm.timeout
    if seconds is not None:
        comm.timeout = seconds if before is None else min(seconds, before)
    try:
        with log_while_waiting(
            "to open a second communicator", comm.rank, comm.timeout, lambda: _find_missing_ranks(comm)
        ):
            child = comm.split(0)
    finally:
        if not comm.closed:
            comm.timeout = before
    child.timeout = before
    return child


def bootstrap_on_host(comm: Communicator, seconds: float | None = None) -> Communicator:
    """Open a communicator on host memory over the ranks of one on GPUs. A collective.

    The one on GPUs carries the ranks' records. Raises `CollectiveTimeout` where ranks have not come
    after `seconds` (None: the communicator's own limit).
    """
    engine = get_engine("host")
    seconds = seconds or comm.timeout or _OPEN_TIMEOUT_S
    deadline = time.monotonic() + seconds
    participant = Participant(comm.rank, comm.size, engine, torch.device("cpu"))
    what = "to open a communicator on host memory"
    with log_while_waiting(what, comm.rank, seconds, lambda: _find_missing_ranks(comm)):
        records = all_gather_bytes(comm, participant.make_record(), seconds=seconds, purpose=what)
        return open_communicator(
            participant.complete(records, deadline), engine, device="cpu",
            seconds=max(1.0, deadline - time.monotonic()), timeout=comm.timeout,
        )  # fmt: skip


def _find_missing_ranks(comm: Communicator) -> tuple[int, ...]:
    info = comm._pending_info()
    return () if info is None else info.peers
