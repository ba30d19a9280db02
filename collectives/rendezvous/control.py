"""Control communicators: small arrays on host memory, over the ranks of another communicator."""

from __future__ import annotations

import json
import time

import torch

from ..comm.communicator import Communicator
from ..comm.engine import get_engine
from ..comm.multinode.comm import open_multinode
from ..comm.waiting import log_while_waiting
from ..errors import CollectiveTimeout
from .peers import RECORD_BYTES, Participant, needs_multinode_comm, validate
from .persistent_store import attach_store, make_record_with_store

__all__ = ["bootstrap_on_host", "dup_on_host", "open_control"]

_OPEN_TIMEOUT_S = 300.0  # where the communicator has no limit of its own


def open_control(comm: Communicator) -> Communicator | None:
    """Open a control communicator over a communicator's ranks. A collective; None for one rank.

    On the host it is a split, so that queued operations don't delay it. For ranks on GPUs it is one
    of the host engine's; Gloo connects their nodes.
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
    record, server = make_record_with_store(participant)
    mine = torch.frombuffer(bytearray(record.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8).to(comm.device)
    everyone = torch.empty(comm.size * RECORD_BYTES, dtype=torch.uint8, device=comm.device)
    with log_while_waiting(
        "to open a communicator on host memory", comm.rank, seconds, lambda: _find_missing_ranks(comm)
    ):
        work = comm.all_gather(everyone, mine, algorithm="native", async_op=True)
        if not comm._queue.wait_blocking(work._pending_op, seconds):
            raise CollectiveTimeout(
                f"not all ranks came within {seconds:g} s to open a communicator on host memory", op="init",
                rank=comm.rank,
            )  # fmt: skip
        work.wait()
        slots = everyone.cpu().view(comm.size, RECORD_BYTES)
        records = [bytes(slot.tolist()).rstrip(b"\0") for slot in slots]
        rendezvous, native = validate(records, participant), None
        left = max(1.0, deadline - time.monotonic())
        engine.library.set_init_timeout(left)
        if needs_multinode_comm(rendezvous, engine.name):
            rendezvous = attach_store(rendezvous, json.loads(records[0])["store"], server, deadline)
            engine, native = open_multinode(engine, rendezvous, comm.rank, left)
        return Communicator(
            engine, rendezvous.unique_id, comm.rank, comm.size, device="cpu", local_rank=rendezvous.local_rank,
            local_size=rendezvous.local_size, timeout=comm.timeout, peers=rendezvous.peers, native=native,
        )  # fmt: skip


def _find_missing_ranks(comm: Communicator) -> tuple[int, ...]:
    info = comm._pending_info()
    return () if info is None else info.peers
