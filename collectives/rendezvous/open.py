"""Opening of a communicator over the ranks that a rendezvous has brought together."""

from __future__ import annotations

import time

from ..comm.communicator import Communicator
from ..comm.engine import Engine
from ..comm.multinode.comm import open_multinode
from ..comm.watchdog import StatusStore, watch
from .peers import Rendezvous, needs_multinode_comm

__all__ = ["open_communicator", "remaining_seconds"]

_MIN_SECONDS = 5.0  # for an engine's init, after a rendezvous that has used up its time


def remaining_seconds(deadline: float, timeout: float) -> float:
    """Return the rest of ``timeout`` seconds until ``deadline``, but a few in any case."""
    return max(deadline - time.monotonic(), min(timeout, _MIN_SECONDS))


def open_communicator(
    rendezvous: Rendezvous, engine: Engine, *, device, seconds: float, timeout: float | None = 1800.0,
    deterministic: bool = False, config=None, agrees: bool = True,
) -> Communicator:  # fmt: skip
    """Open the communicator of a rendezvous' ranks. A collective, which blocks.

    ``seconds``: limit for all ranks to come, and from now on of the engine's inits; ``device``,
    ``timeout``, ``deterministic``, ``config``, ``agrees``: as `Communicator` takes them.
    """
    native = None
    if engine.library.is_host:
        engine.library.set_init_timeout(seconds)
        if needs_multinode_comm(rendezvous, engine.name):
            engine, native = open_multinode(engine, rendezvous, rendezvous.rank, seconds)
    comm = Communicator(
        engine, rendezvous.unique_id, rendezvous.rank, rendezvous.size, device=device,
        local_rank=rendezvous.local_rank, local_size=rendezvous.local_size, timeout=timeout, peers=rendezvous.peers,
        deterministic=deterministic, config=config, native=native, agrees=agrees,
    )  # fmt: skip
    if engine.name == "nccl" and rendezvous.store is not None:
        watch(comm, StatusStore(rendezvous.store, f"watch/{rendezvous.name}"))
    return comm
