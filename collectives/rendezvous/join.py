"""Choice of the rendezvous: how the unique id gets from rank 0 to the other ranks.

It goes over torch.distributed's store if that is initialised; with MASTER_ADDR and MASTER_PORT,
over a torch ``TCPStore``; with neither, on one node, by the job's name alone; and in an MPI job
over several nodes, by mpi4py.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import torch.distributed as dist

from ..comm.engine import Engine
from ..comm.liveness import RankExits, publish_process
from ..comm.multinode.topology import read_host_id
from ..errors import InvalidArgument, InvalidUsage
from ..launcher import Identity, detect_launcher
from ..torch_compat import default_store
from . import mpi
from .by_name import exchange_by_name, rendezvous_by_name
from .failure_record import record_last_exception
from .group_life import begin_life
from .peers import Participant, Rendezvous
from .store import StoreRendezvous
from .tcp_store import exchange_over_tcp

__all__ = ["identify_process", "join_over_store", "join_rendezvous"]

_last_store: weakref.ref | None = None  # torch.distributed's, at the last rendezvous over it


def identify_process() -> Identity:
    """Return the identity of this process: its rank, size and launcher.

    It comes from torch.distributed or mpi4py if initialised, else from the environment. Doesn't
    block. Raises ``InvalidArgument`` for variables that can't be used.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        with contextlib.suppress(InvalidArgument):  # torch has its numbers from elsewhere than such variables
            found = detect_launcher()
            if (found.rank, found.size) == (rank, size):
                return found
        return Identity(rank, size, *((0, 1) if size == 1 else (None, None)), "torch")
    found = detect_launcher()
    if found.launcher == "alone":
        running = mpi.find_running_mpi()
        if running is not None and running.COMM_WORLD.Get_size() > 1:
            return Identity(running.COMM_WORLD.Get_rank(), running.COMM_WORLD.Get_size(), None, None, "mpi4py")
    return found


def join_rendezvous(
    identity: Identity, *, engine: Engine, timeout: float = 60.0, generation: int = 0, device: object = None,
    config: str = "",
) -> Rendezvous:  # fmt: skip
    """Join the rendezvous of all ranks of the job, which agrees on a unique id.

    ``timeout``: seconds; ``generation``: how many rendezvous of this job there were before, the
    same on all ranks, unless torch.distributed is initialised: over its store the ranks agree on a
    number, since they may be processes that have come later; ``device``: this rank's device, for the
    other ranks' information; ``config``: the communicator's, in words, which all ranks must have.
    Blocks until all ranks have come, except where the job's name is enough: then the engine's init
    waits. The host engine's init gets the rest of the time as its limit. Raises ``CollectiveTimeout``
    with the missing ranks in ``peers``, ``InvalidUsage`` for two processes with one rank and for ranks
    that don't fit together, ``TransportError`` for a port in use, ``InvalidArgument`` where
    MASTER_ADDR is missing.
    """
    deadline = _deadline_of(timeout)
    job = sha256(identity.job_key).hexdigest()[:16] if identity.job_key else ""
    place = _store_place(identity)
    participant = Participant(identity.rank, identity.size, engine, device, job, *place, config)
    if participant.size == 1:
        return Rendezvous(engine.library.get_unique_id(), (participant.describe(),), 0, 0, 1)
    record_last_exception()
    prefix = f"collectives/init/{generation}/{identity.restart}"
    name = b"\0".join((identity.job_key or b"", b"%d" % generation, b"%d" % identity.restart))
    if dist.is_available() and dist.is_initialized():
        numbers = dist.get_rank(), dist.get_world_size()
        if numbers != (participant.rank, participant.size):
            raise InvalidUsage(
                f"torch.distributed is initialised as rank {numbers[0]} of {numbers[1]}, but this process is said to "
                f"be rank {participant.rank} of {participant.size}",
                op="init",
            )
        records = _exchange_over_default_store(identity, participant, deadline, timeout)
    elif identity.master_addr is not None:
        records = exchange_over_tcp(identity, prefix, participant, deadline, timeout)
    elif identity.is_single_node and identity.job_key is not None:
        participant.master = "localhost"
        if engine.library.is_host and not read_host_id():
            return rendezvous_by_name(name, participant, engine)
        records = exchange_by_name(name, participant, timeout)
    else:
        records = mpi.exchange_over_mpi(mpi.import_mpi(identity), participant, generation, deadline, timeout)
    rendezvous = participant.complete(records, deadline)
    if identity.local_rank is not None and identity.local_size is not None and not read_host_id():
        rendezvous = replace(rendezvous, local_rank=identity.local_rank, local_size=identity.local_size)
    return rendezvous


def join_over_store(
    store: dist.Store,
    prefix: str,
    rank: int,
    size: int,
    *,
    engine: Engine,
    timeout: float = 60.0,
    device: object = None,
    purpose: str = "",
    exits: RankExits | None = None,
    config: str = "",
    logged_ranks: Sequence[int] | None = None,
) -> Rendezvous:
    """Join a rendezvous over a torch store that all ``size`` ranks have, as a process group's.

    ``prefix``: of every key, used for one rendezvous only; ``timeout``: seconds; ``purpose``: what
    the ranks come for, "to ...", for messages; ``exits``: how those that don't come have ended;
    ``config``: the communicator's, in words, which all ranks must have; ``logged_ranks``: as in
    `RankWait`. Blocks until all ranks have come. Raises as ``join_rendezvous``, and `RemoteError` as
    soon as it is known that a rank has ended.
    """
    deadline = _deadline_of(timeout)
    record_last_exception()
    try:
        identity = identify_process()
    except InvalidArgument:  # a launcher's variables that can't be used: the store has come in another way
        identity = Identity(rank, size, None, None, "torch")
    participant = Participant(rank, size, engine, device, "", *_store_place(identity, store), config)
    records = _exchange_over_torch(store, prefix, participant, deadline, timeout, exits, purpose, logged_ranks)
    return participant.complete(records, deadline)


def _exchange_over_default_store(
    identity: Identity, participant: Participant, deadline: float, timeout: float
) -> list[bytes]:
    """Exchange the ranks' records over the store of torch.distributed's default group."""
    global _last_store
    publish_process()
    store = default_store()
    participant.master, participant.agent_port = _store_place(identity, store)
    exits = RankExits(store, range(participant.size))
    # In another group, maybe over the same server, a rank's process of before may have ended, and another one be about
    # to come.
    trusted = exits if _last_store is None or _last_store() is store else None
    _last_store = weakref.ref(store)
    life = begin_life(
        dist.PrefixStore("collectives/init", store), participant.rank, participant.size, timeout,
        "to open the job's communicator", trusted,
    )  # fmt: skip
    return _exchange_over_torch(life, "records", participant, deadline, timeout, exits)


def _exchange_over_torch(
    store: dist.Store, prefix: str, participant: Participant, deadline: float, timeout: float, exits: RankExits | None,
    purpose: str = "", logged_ranks: Sequence[int] | None = None,
) -> list[bytes]:  # fmt: skip
    """Exchange the ranks' records over torch.distributed's store."""
    store = dist.PrefixStore(prefix, store)
    pending = StoreRendezvous(store, participant, deadline, timeout, "torch.distributed's store", exits=exits)
    pending.purpose, pending.logged_ranks = purpose or pending.purpose, logged_ranks
    return pending.exchange()


def _store_place(identity: Identity, store: dist.Store | None = None) -> tuple[str, int | None]:
    """Return a participant's ``master`` and ``agent_port``; ``store``: torch.distributed's.

    Mostly rank 0's node serves torch's store, so its host is one through which the ranks reach each
    other.
    """
    if identity.agent_store:
        return identity.master_addr, identity.master_port
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", "") or identity.master_addr or "", None


def _deadline_of(timeout: float) -> float:
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise InvalidArgument(f"timeout={timeout!r}: it has to be a number of seconds above 0")
    return time.monotonic() + timeout
