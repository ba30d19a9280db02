"""Control: a communicator on host memory, by which the ranks of any communicator tell each other a few numbers."""

from __future__ import annotations

import json
import os
import socket
import time

import torch

from .communicator import Communicator
from .engine import get_engine
from .exchange import RECORD_BYTES, Own, needs_store, serve_lasting, settle, with_store
from .hosts import open_over

__all__ = ["control_of", "host_communicator_over"]

_OPEN_SECONDS = 300.0


def control_of(comm: Communicator) -> Communicator | None:
    """Give a communicator that reduces small NumPy arrays over a communicator's ranks; None for a world of one.

    A collective. On the host it is split off, so that queued operations don't hold it up. For ranks on GPUs it is one
    of the host engine's; where they are on several machines Gloo connects those.
    """
    if comm.size == 1:
        return None
    if comm._on_host:
        return comm.split(0)
    return host_communicator_over(comm)


def host_communicator_over(comm: Communicator) -> Communicator:
    """Open a communicator on host memory over the ranks of another one, which carries their records. A collective."""
    engine = get_engine("host")
    deadline = time.monotonic() + _OPEN_SECONDS
    own = Own(comm.rank, comm.size, engine, torch.device("cpu"))
    record, server = own.record(), None
    if comm.rank == 0:
        server = serve_lasting()
        place = [os.environ.get("MASTER_ADDR", "").strip() or socket.gethostname(), server.port]
        record = json.dumps({**json.loads(record), "store": place}).encode()
    mine = torch.frombuffer(bytearray(record.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8).to(comm.device)
    everyone = torch.empty(comm.size * RECORD_BYTES, dtype=torch.uint8, device=comm.device)
    comm.all_gather(everyone, mine, algorithm="native")
    slots = everyone.cpu().view(comm.size, RECORD_BYTES)
    records = [bytes(slot.tolist()).rstrip(b"\0") for slot in slots]
    meeting, native = settle(records, own), None
    if needs_store(meeting, engine.name):
        meeting = with_store(meeting, json.loads(records[0])["store"], server, deadline)
        engine, native = open_over(engine, meeting, comm.rank, _OPEN_SECONDS)
    return Communicator(
        engine, meeting.unique_id, comm.rank, comm.size, device="cpu", local_rank=meeting.local_rank,
        local_size=meeting.local_size, timeout=comm.timeout, peers=meeting.peers, native=native,
    )  # fmt: skip
