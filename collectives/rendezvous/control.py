"""Control: a communicator on host memory, by which the ranks of any communicator tell each other a few numbers."""

from __future__ import annotations

import json
import time

import torch

from ..comm.communicator import Communicator
from ..comm.engine import get_engine
from ..comm.multinode.comm import open_multinode
from ..comm.waiting import said
from ..errors import CollectiveTimeout
from .exchange import RECORD_BYTES, Own, needs_store, serving_record, settle, with_store

__all__ = ["beside", "control_of", "host_communicator_over"]

_OPEN_SECONDS = 300.0  # where the communicator has no limit of its own


def control_of(comm: Communicator) -> Communicator | None:
    """Give a communicator that reduces small NumPy arrays over a communicator's ranks; None for a world of one.

    A collective. On the host it is split off, so that queued operations don't hold it up. For ranks on GPUs it is one
    of the host engine's; where they are on several machines Gloo connects those.
    """
    return None if comm.size == 1 else beside(comm)


def beside(comm: Communicator, seconds: float | None = None) -> Communicator:
    """Open a communicator of its own on host memory over the same ranks; a collective.

    `seconds`: how long the ranks may be in coming; None: the communicator's own limit.
    """
    if not comm._on_host:
        return host_communicator_over(comm, seconds)
    before = comm.timeout
    if seconds is not None:
        comm.timeout = seconds if before is None else min(seconds, before)
    try:
        with said("to open a second communicator", comm.rank, comm.timeout, lambda: _missing(comm)):
            child = comm.split(0)
    finally:
        if not comm.closed:
            comm.timeout = before
    child.timeout = before
    return child


def host_communicator_over(comm: Communicator, seconds: float | None = None) -> Communicator:
    """Open a communicator on host memory over the ranks of another one, which carries their records. A collective.

    Raises `CollectiveTimeout` after `seconds`, None: the communicator's own limit.
    """
    engine = get_engine("host")
    seconds = seconds or comm.timeout or _OPEN_SECONDS
    deadline = time.monotonic() + seconds
    own = Own(comm.rank, comm.size, engine, torch.device("cpu"))
    record, server = serving_record(own)
    mine = torch.frombuffer(bytearray(record.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8).to(comm.device)
    everyone = torch.empty(comm.size * RECORD_BYTES, dtype=torch.uint8, device=comm.device)
    with said("to open a communicator on host memory", comm.rank, seconds, lambda: _missing(comm)):
        work = comm.all_gather(everyone, mine, algorithm="native", async_op=True)
        if not comm._lane.block(work._flight, seconds):
            raise CollectiveTimeout(
                f"not all ranks came within {seconds:g} s to open a communicator on host memory", op="init",
                rank=comm.rank,
            )  # fmt: skip
        work.wait()
        slots = everyone.cpu().view(comm.size, RECORD_BYTES)
        records = [bytes(slot.tolist()).rstrip(b"\0") for slot in slots]
        meeting, native = settle(records, own), None
        left = max(1.0, deadline - time.monotonic())
        engine.library.set_init_timeout(left)
        if needs_store(meeting, engine.name):
            meeting = with_store(meeting, json.loads(records[0])["store"], server, deadline)
            engine, native = open_multinode(engine, meeting, comm.rank, left)
        return Communicator(
            engine, meeting.unique_id, comm.rank, comm.size, device="cpu", local_rank=meeting.local_rank,
            local_size=meeting.local_size, timeout=comm.timeout, peers=meeting.peers, native=native,
        )  # fmt: skip


def _missing(comm: Communicator) -> tuple[int, ...]:
    info = comm._pending()
    return () if info is None else info.peers
