"""Rendezvous by the job's name, for ranks on one node: the unique id is made from the name."""

from __future__ import annotations

from ..comm.agree import all_gather_bytes
from ..comm.engine import Engine, get_engine
from .open import open_communicator
from .peers import Participant, PeerInfo, Rendezvous

__all__ = ["exchange_by_name", "rendezvous_by_name"]


def rendezvous_by_name(name: bytes, participant: Participant, engine: Engine) -> Rendezvous:
    """Return a rendezvous of the host engine's ranks that have the same ``name``.

    Nothing is exchanged: the engine's init waits for the ranks, and verifies that they are on this
    node, as the launcher says.
    """
    own = participant.describe()
    peers = tuple(
        own if r == participant.rank else PeerInfo(r, own.host, own.boot_id, namespace=own.namespace)
        for r in range(participant.size)
    )
    unique_id = engine.library.named_unique_id(name)
    return Rendezvous(unique_id, peers, participant.rank, participant.rank, participant.size)


def exchange_by_name(name: bytes, participant: Participant, timeout: float) -> list[bytes]:
    """Exchange the records of the ranks that have the same ``name``, over the host engine.

    It is for NCCL, whose ids are random, and for where COLLECTIVES_HOST_ID, which all ranks must
    have then, says that the ranks are on several nodes. Blocks until all ranks have come, at most
    ``timeout`` seconds.
    """
    engine = get_engine("host")
    rendezvous = rendezvous_by_name(name + b"\0records", participant, engine)
    with open_communicator(rendezvous, engine, device="cpu", seconds=timeout, timeout=timeout) as comm:
        return all_gather_bytes(comm, participant.make_record())
