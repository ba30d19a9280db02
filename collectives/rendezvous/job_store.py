"""Store of a job for what outlives a rendezvous: addresses, errors and status of communicators.

Under torchrun it is the agent's, which outlives the ranks. Else rank 0 of a communicator serves
one, on a free port of its own: MASTER_PORT is torch.distributed's. All communicators of which a
process is rank 0 share its store, each with a prefix, `Rendezvous.name`. It is open as long as one
of them holds it.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from datetime import timedelta

import torch.distributed as dist

from ..comm.agree import all_gather_object
from ..comm.communicator import Communicator
from ..comm.multinode.topology import find_own_address
from ..comm.waiting import first_line
from ..errors import TransportError

__all__ = ["connect_to_store", "serve_store", "share_store"]

_SECONDS = 300.0  # to connect, and of a store's calls that block

_served: weakref.ref | None = None  # the store that this process serves
_lock = threading.Lock()


def serve_store() -> dist.TCPStore:
    """Return the store that this process serves, as long as the object is held."""
    global _served
    with _lock:
        store = None if _served is None else _served()
        if store is None:
            store = dist.TCPStore("localhost", 0, None, True, timedelta(seconds=_SECONDS), wait_for_workers=False)
            _served = weakref.ref(store)
        return store


def connect_to_store(host: str, port: int, seconds: float = _SECONDS) -> dist.TCPStore:
    """Connect to a store that another process serves; ``seconds``: limit of it.

    Raises ``TransportError``.
    """
    try:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=max(1.0, seconds)), wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(
            f"rank 0's store at {host}:{port} can't be reached: {first_line(error)}. The ranks' machines must reach "
            "each other on any TCP port",
            op="init", peers=(0,),
        ) from error  # fmt: skip
    store.set_timeout(timedelta(seconds=_SECONDS))
    return store


def share_store(comm: Communicator) -> tuple[dist.TCPStore, str]:
    """Return a store of a communicator's ranks, and a prefix in it that nothing else has.

    A collective, which blocks. Rank 0 serves it, as long as it holds the object.
    """
    store = serve_store() if comm.rank == 0 else None
    host = "127.0.0.1" if comm.local_size == comm.size else find_own_address()
    host, port, name = all_gather_object(comm, store and (host, store.port, secrets.token_hex(8)))[0]
    return store or connect_to_store(host, port), name


def _after_fork() -> None:
    """Forget the parent's store in a forked child."""
    global _served, _lock
    _served, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
