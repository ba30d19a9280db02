"""Rendezvous over MPI, by mpi4py: rank 0 gathers the records and sends them to all ranks."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ..comm.waiting import format_ranks
from ..errors import CollectiveTimeout, InvalidArgument, InvalidUsage
from ..launcher import Identity
from .peers import RECORD_BYTES, Participant, raise_posted_failure
from .store import GRACE_S

__all__ = ["exchange_over_mpi", "find_running_mpi", "import_mpi"]

_TAG = 0x4343


def find_running_mpi() -> Any | None:
    """Return the module mpi4py.MPI if the program has imported it and MPI runs, else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def import_mpi(identity: Identity) -> Any:
    """Return the module mpi4py.MPI. Under an MPI launcher it is imported, which starts MPI.

    Raises ``InvalidArgument``, which asks for a MASTER_ADDR, where there is none.
    """
    mpi = find_running_mpi()
    cure = ""
    if mpi is None and identity.launcher in ("openmpi", "mpich"):
        try:
            from mpi4py import MPI  # importing it starts MPI

            mpi = MPI
        except ImportError as error:  # not installed, or built for another MPI
            cure = f", or install mpi4py ({error})"
    if mpi is not None:
        return mpi
    here = "an unknown number" if identity.local_size is None else str(identity.local_size)
    raise InvalidArgument(
        f"MASTER_ADDR is missing: {here} of the {identity.size} ranks are on this machine, so rank 0 can't be found "
        f"without an address. Set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there{cure}",
        op="init",
        rank=identity.rank,
    )


def exchange_over_mpi(
    mpi: Any, participant: Participant, generation: int, deadline: float, timeout: float
) -> list[bytes]:
    """Exchange the ranks' records over an mpi4py ``COMM_WORLD``, as bytes.

    ``mpi``: the module ``mpi4py.MPI``; ``generation``: see `join.join_rendezvous`; ``timeout``: the
    seconds up to ``deadline``, for messages. Blocks until all ranks have come or the time is over.
    """
    comm, tag = mpi.COMM_WORLD, _TAG + 2 * (generation % 1000)
    rank, size = participant.rank, participant.size
    if (comm.Get_rank(), comm.Get_size()) != (rank, size):
        raise InvalidUsage(
            f"mpi4py says rank {comm.Get_rank()} of {comm.Get_size()}, the launcher rank {rank} of {size}: "
            "mpi4py is built for another MPI than the one that has started this job",
            op="init",
            rank=rank,
        )
    record = participant.make_record()
    if rank != 0:
        answer = bytearray(2 * RECORD_BYTES * (size + 1))  # records inside JSON: twice their bytes at most
        sent = comm.Isend([record, mpi.BYTE], 0, tag)
        received = comm.Irecv([answer, mpi.BYTE], 0, tag + 1)
        if _wait_for({0: received}, deadline + GRACE_S):
            raise CollectiveTimeout(f"rank 0 did not answer within {timeout:g} s", op="init", rank=rank, peers=(0,))
        sent.Wait()
    else:
        slots = {peer: bytearray(RECORD_BYTES) for peer in range(1, size)}
        requests = {peer: comm.Irecv([slot, mpi.BYTE], peer, tag) for peer, slot in slots.items()}
        missing = _wait_for(requests, deadline)
        records = [record, *(bytes(slot).rstrip(b"\0") for slot in slots.values())]
        text = json.dumps({"records": [data.decode("utf-8", "replace") for data in records]})
        if missing:
            what = f"{format_ranks(missing)} of {size} did not come within {timeout:g} s"
            text = json.dumps({"kind": "CollectiveTimeout", "text": what, "peers": missing})
            for peer in missing:
                requests[peer].Cancel()
        answer = text.encode()
        sends = [comm.Isend([answer, mpi.BYTE], peer, tag + 1) for peer in slots if peer not in missing]
        _wait_for(dict(enumerate(sends)), time.monotonic() + GRACE_S)
    fields = json.loads(bytes(answer).rstrip(b"\0"))
    if "kind" in fields:
        raise_posted_failure(json.dumps(fields).encode(), rank)
    return [text.encode() for text in fields["records"]]


def _wait_for(requests: dict[int, Any], until: float) -> list[int]:
    """Wait for requests. Return the keys of those that have not ended in time."""
    pending = dict(requests)
    while True:
        pending = {peer: request for peer, request in pending.items() if not request.Test()}
        if not pending or time.monotonic() >= until:
            return sorted(pending)
        time.sleep(0.001)
