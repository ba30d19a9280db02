"""Rendezvous by the job's name, for ranks on one node: the unique id is made from the name."""

from __future__ import annotations

import contextlib
import json
import time

import torch

from .. import _nccl
from ..comm.engine import get_engine
from ..comm.multinode.topology import read_host_id
from .peers import RECORD_BYTES, Participant, PeerInfo, Rendezvous, needs_store, validate
from .persistent_store import attach_store, make_record_with_store

__all__ = ["join_by_name"]


def join_by_name(name: bytes, participant: Participant, timeout: float) -> Rendezvous:
    """Join the rendezvous of the ranks that have the same ``name``.

    With the host engine nothing is exchanged, and the engine's init waits for the ranks. Otherwise
    it blocks until all ranks have come, at most ``timeout`` seconds.
    """
    if participant.engine.library.is_host and not read_host_id():
        unique_id = participant.engine.library.named_unique_id(name)
        # The launcher says that the ranks are on this node, and the engine's init verifies it.
        own = participant.describe()
        peers = tuple(
            own if r == participant.rank else PeerInfo(r, own.host, own.boot_id, namespace=own.namespace)
            for r in range(participant.size)
        )
        return Rendezvous(unique_id, peers, participant.rank, participant.size)
    # The records are exchanged over a communicator of the host engine first: for NCCL, whose ids
    # are random, and where COLLECTIVES_HOST_ID, which all ranks must have then, says that the ranks
    # are on several nodes.
    library = get_engine("host").library
    library.set_init_timeout(timeout)
    with _open_host_comm(library, name + b"\0records", participant) as comm:
        comm.set_timeout(timeout)
        record, server = make_record_with_store(participant, "localhost")
        sent = torch.frombuffer(bytearray(record.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)
        received = torch.zeros(RECORD_BYTES * participant.size, dtype=torch.uint8)
        comm.all_gather(sent.data_ptr(), received.data_ptr(), RECORD_BYTES, _nccl.DTYPES["uint8"])
    slots = received.view(participant.size, RECORD_BYTES)
    records = [bytes(slot.tolist()).rstrip(b"\0") for slot in slots]
    rendezvous = validate(records, participant)
    if needs_store(rendezvous, participant.engine.name):
        deadline = time.monotonic() + timeout
        rendezvous = attach_store(rendezvous, json.loads(records[0])["store"], server, deadline)
    return rendezvous


@contextlib.contextmanager
def _open_host_comm(library: _nccl.Library, name: bytes, participant: Participant):
    comm = library.comm_init_rank(participant.size, library.named_unique_id(name), participant.rank)
    try:
        yield comm
    except BaseException:
        comm.abort()
        raise
    comm.destroy()
