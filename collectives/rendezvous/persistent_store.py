"""TCP store that rank 0 serves beyond the rendezvous, for communicators that need one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ..comm.multinode.topology import find_own_address
from ..comm.waiting import first_line
from ..errors import TransportError
from .peers import Participant, Rendezvous

__all__ = ["attach_store", "connect_to_store", "make_record_with_store", "serve_store"]


def serve_store() -> dist.TCPStore:
    """Serve a store on a free port of this process, for as long as the returned object is held."""
    return dist.TCPStore("localhost", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def connect_to_store(host: str, port: int, deadline: float) -> dist.TCPStore:
    """Connect to a store that another rank serves. Raises ``TransportError``."""
    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        return dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(
            f"rank 0's store at {host}:{port} can't be reached: {first_line(error)}. The ranks' machines must reach "
            "each other on any TCP port",
            op="init", peers=(0,),
        ) from error  # fmt: skip


def make_record_with_store(participant: Participant, host: str = "") -> tuple[bytes, dist.TCPStore | None]:
    """Return (this rank's record, None); on rank 0 (the record with a store's address, that store).

    Rank 0 serves the store from now on. ``host``: the host in its address, "" for this node's own
    address.
    """
    record = participant.make_record()
    if participant.rank != 0:
        return record, None
    server = serve_store()
    return json.dumps({**json.loads(record), "store": [host or find_own_address(), server.port]}).encode(), server


def attach_store(rendezvous: Rendezvous, address: list, server: dist.TCPStore | None, deadline: float) -> Rendezvous:
    """Connect to the store of rank 0's record and return a rendezvous with it.

    ``address``: [host, port] of the store; ``server``: the store itself in the process that serves
    it.
    """
    host, port = str(address[0]), int(address[1])
    store = server or connect_to_store(host, port, deadline)
    return replace(rendezvous, store=store, store_host=host, server=server)
