"""Rendezvous at MASTER_ADDR and MASTER_PORT, over a TCP store of rank 0's or torchrun's agent."""

from __future__ import annotations

import math
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ..comm.waiting import RankWait, call_with_timeout, first_line
from ..errors import CollectivesError, CollectiveTimeout, RemoteError, TransportError
from ..launcher import Identity
from ..secret import unseal
from .peers import Participant, parse_record
from .store import StoreRendezvous

__all__ = ["exchange_over_tcp"]

_FIRST_ATTEMPT = 10.0  # seconds for a store to answer; each further attempt has twice as many


def exchange_over_tcp(
    identity: Identity, prefix: str, participant: Participant, deadline: float, timeout: float
) -> list[bytes]:
    """Exchange the ranks' records over the store at the identity's master address.

    Rank 0 serves it, unless an agent does. ``prefix``: of every key; ``timeout``: the seconds up to
    ``deadline``, for messages. Blocks until all ranks have come. Raises as
    `StoreRendezvous.exchange`, and ``TransportError`` for a port that is in use.
    """
    address = f"{identity.master_addr}:{identity.master_port}"
    if identity.agent_store:  # it outlives restarts, and a restart may bring another number of ranks
        prefix, server, where = f"{prefix}/{participant.size}", None, f"torchrun's store at {address}"
    else:
        server, where = 0, f"rank 0's store at {address}"
    try:
        if server == participant.rank:
            store = _serve(identity, deadline)
        else:
            store = _connect(identity, server, where, deadline, timeout)
    except RuntimeError as error:
        if isinstance(error, CollectivesError):
            raise
        rank = participant.rank
        if "EADDRINUSE" not in str(error) and "in use" not in str(error):
            raise TransportError(f"{where} can't be opened: {first_line(error)}", op="init", rank=rank) from error
        store = _connect_to_duplicate(identity, prefix, participant, deadline)
        if store is None:
            raise TransportError(
                f"port {identity.master_port} is in use by another program on this machine, so rank 0 can't serve the "
                f"others at {address}: set MASTER_PORT to a free port (torchrun: --master-port, or --standalone)",
                op="init",
                rank=rank,
                detail=first_line(error),
            ) from error
        server, where = None, f"another rank 0's store at {address}"
    while True:
        prefixed = dist.PrefixStore(prefix, store)
        pending = StoreRendezvous(prefixed, participant, deadline, timeout, where, server)
        del prefixed
        del store  # `pending` holds the only reference, and drops it at its end: that closes the port
        try:
            return pending.exchange()
        except RemoteError:
            if not pending.stale:
                raise
        # That was the store of a process group that was just ending in rank 0's process. The right
        # one comes next.
        store = _connect(identity, server, where, deadline, timeout)


def _serve(identity: Identity, deadline: float) -> dist.TCPStore:
    # "localhost": this rank connects to its own server, whatever MASTER_ADDR is on this node.
    # multi_tenant: a store that this process opens on the same port meanwhile shares the server.
    return dist.TCPStore(
        "localhost", identity.master_port, None, True, _remaining(deadline), wait_for_workers=False, multi_tenant=True
    )


def _connect(identity: Identity, server: int | None, where: str, deadline: float, timeout: float) -> dist.TCPStore:
    """Connect to the store as soon as it is served.

    torch's own client waits up to twice its time limit, prints a C++ stack, can't be interrupted,
    and waits for ever for a program that accepts connections and is no store. So it is used once
    something listens, and in a thread.
    """
    peers = () if server is None else (server,)
    address, port = identity.master_addr, identity.master_port
    left = deadline - time.monotonic()
    wait = RankWait(f"to serve its store at {address}:{port}", identity.rank, identity.size, left, deadline=math.inf)
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.05, min(5.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:  # nothing listens yet, or the name can't be resolved yet
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"{where} did not answer within {timeout:g} s ({error}): rank 0 has not started, or is not on that "
                    "machine, or has failed",
                    op="init",
                    rank=identity.rank,
                    peers=peers,
                ) from error
            wait.check(lambda: [0])
            time.sleep(0.02)

    def timed_out() -> CollectivesError:
        return CollectiveTimeout(
            f"{where}: what listens there did not answer as torch's TCPStore within {timeout:g} s: is MASTER_PORT the "
            "port of another program?",
            op="init",
            rank=identity.rank,
            peers=peers,
        )

    def connect(_: threading.Event) -> dist.TCPStore:
        return dist.TCPStore(address, port, None, False, _remaining(deadline), wait_for_workers=False)

    seconds = _FIRST_ATTEMPT
    while True:
        until = min(deadline, time.monotonic() + seconds)
        try:
            return call_with_timeout(connect, until, timed_out)
        except CollectiveTimeout:
            if until >= deadline:
                raise
            # The store that ended just then may have taken the connection; another one listens now.
            seconds *= 2


def _connect_to_duplicate(
    identity: Identity, prefix: str, participant: Participant, deadline: float
) -> dist.TCPStore | None:
    """Return the store of the process that has the port; None if it is no rank 0 of this job."""
    until = min(deadline, time.monotonic() + 2.0)
    local = replace(identity, master_addr="localhost")
    try:
        store = _connect(local, None, "the port", until, 2.0)
        records = dist.PrefixStore(prefix, store)
        while time.monotonic() < until:
            if records.check(["peer/0"]):
                record = unseal(records.get("peer/0"), "rendezvous/peer/0")
                same_job = participant.job and parse_record(record, 0)["job"] == participant.job
                return store if same_job else None
            time.sleep(0.02)
    except RuntimeError:  # whatever listens there, it is no store with such a record
        return None
    return None


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))
