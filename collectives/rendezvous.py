"""How the unique id travels from rank 0 to the others: which way is taken.

Where torch.distributed is initialised, over its store; with MASTER_ADDR and MASTER_PORT, over a torch ``TCPStore``;
with neither, on one machine, by the job's name alone; and in an MPI job over several machines by mpi4py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from . import _nccl
from .engine import Engine, get_engine
from .errors import CollectivesError, CollectiveTimeout, InvalidArgument, InvalidUsage, RemoteError, TransportError
from .exchange import (
    RECORD_BYTES,
    Meeting,
    Own,
    PeerInfo,
    StoreExchange,
    first_line,
    limited,
    over_mpi,
    parse,
    serving_record,
    settle,
    wants_store,
    with_store,
)
from .failure_record import record_last_exception
from .launch import Identity, who_am_i
from .machines import simulated
from .presence import Fates, announce
from .torch_compat import default_store
from .waiting import Wait

__all__ = ["Meeting", "PeerInfo", "identify", "meet", "meet_over_store"]


def identify() -> Identity:
    """Tell who this process is: as an initialised torch.distributed or mpi4py says, else as the environment does.

    Doesn't block. Raises ``InvalidArgument`` for variables that can't be used.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        with contextlib.suppress(InvalidArgument):  # torch was told its numbers by other means than such variables
            found = who_am_i()
            if (found.rank, found.size) == (rank, size):
                return found
        return Identity(rank, size, *((0, 1) if size == 1 else (None, None)), "torch")
    found = who_am_i()
    if found.launcher == "alone":
        mpi = _running_mpi()
        if mpi is not None and mpi.COMM_WORLD.Get_size() > 1:
            return Identity(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size(), None, None, "mpi4py")
    return found


def meet(
    identity: Identity, *, engine: Engine, timeout: float = 60.0, generation: int = 0, device: object = None,
    hierarchical: bool | None = None,
) -> Meeting:  # fmt: skip
    """Agree with all other ranks of the job on a unique id.

    ``timeout``: seconds; ``generation``: how many meetings of this job there were before, the same on all ranks;
    ``device``: what to tell the others of this rank's device; ``hierarchical``: False where ranks of the host engine on
    several machines are an error. Blocks until all ranks have come, except where the job's
    name is enough: then the engine's init is what waits. Leaves the host engine's init the rest of the time. Raises
    ``CollectiveTimeout`` with the missing ranks in ``peers``, ``InvalidUsage`` for two ranks with one number and for
    ranks that don't fit together, ``TransportError`` for a port in use, ``InvalidArgument`` where MASTER_ADDR is
    missing.
    """
    deadline = _deadline(timeout)
    own = Own(identity.rank, identity.size, engine, device, _digest(identity.job_key), hierarchical)
    if own.size == 1:
        return Meeting(engine.library.get_unique_id(), (own.peer(),), 0, 1)
    record_last_exception()
    prefix = f"collectives/init/{generation}/{identity.restart}"
    if dist.is_available() and dist.is_initialized():
        numbers = dist.get_rank(), dist.get_world_size()
        if numbers != (own.rank, own.size):
            raise InvalidUsage(
                f"torch.distributed is initialised as rank {numbers[0]} of {numbers[1]}, but this process is said to "
                f"be rank {own.rank} of {own.size}",
                op="init",
            )
        announce()
        store = default_store()
        meeting = _over_lasting(store, prefix, own, deadline, timeout, Fates(store, range(own.size)))
    elif identity.master_addr is not None:
        meeting = _over_tcp(identity, prefix, own, deadline, timeout)
    elif identity.one_machine and identity.job_key is not None:
        name = b"\0".join((identity.job_key, b"%d" % generation, b"%d" % identity.restart))
        meeting = _by_name(name, own, timeout)
    else:
        meeting = over_mpi(_mpi_module(identity), own, generation, deadline, timeout)
    if identity.local_rank is not None and identity.local_size is not None and not simulated():
        meeting = replace(meeting, local_rank=identity.local_rank, local_size=identity.local_size)
    _limit_init(engine, deadline, timeout)
    return meeting


def meet_over_store(
    store: dist.Store,
    prefix: str,
    rank: int,
    size: int,
    *,
    engine: Engine,
    timeout: float = 60.0,
    device: object = None,
    purpose: str = "",
    fates: Fates | None = None,
) -> Meeting:
    """Agree on a unique id over a torch store that all ``size`` ranks have, for instance a process group's.

    ``prefix``: in front of every key, and used for one meeting only; ``timeout``: seconds; ``purpose``: what the ranks
    come for, "to ...", for messages; ``fates``: how those that don't come ended. Blocks until all ranks have come.
    Raises as ``meet``, and `RemoteError` as soon as it is known that a rank has ended.
    """
    deadline = _deadline(timeout)
    record_last_exception()
    own = Own(rank, size, engine, device)
    meeting = _over_lasting(store, prefix, own, deadline, timeout, fates, purpose)
    _limit_init(engine, deadline, timeout)
    return meeting


def _over_lasting(
    store: dist.Store, prefix: str, own: Own, deadline: float, timeout: float, fates: Fates | None, purpose: str = ""
) -> Meeting:
    """Meet over a store of torch.distributed's, which outlives the meeting: a communicator may hold it."""
    where = "torch.distributed's store"
    host = _host_of(store)
    store = dist.PrefixStore(prefix, store)
    exchange = StoreExchange(store, own, deadline, timeout, where, host=host, lasts=True, fates=fates)
    exchange.purpose = purpose or exchange.purpose
    return exchange.meet()


def _host_of(store: dist.Store) -> str:
    """Tell by which name a store is reached, or "": rank 0's machine serves it, mostly."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")


def _deadline(timeout: float) -> float:
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise InvalidArgument(f"timeout={timeout!r}: it has to be a number of seconds above 0")
    return time.monotonic() + timeout


def _limit_init(engine: Engine, deadline: float, timeout: float) -> None:
    """Leave the engine's init what is left of the time. All ranks are there now, or are awaited by it alone."""
    if engine.library.is_host:
        engine.library.set_init_timeout(max(deadline - time.monotonic(), min(timeout, 5.0)))


def _digest(job_key: bytes | None) -> str:
    return sha256(job_key).hexdigest()[:16] if job_key else ""


# ---- Over a TCPStore, rank 0's own or torchrun's.


def _over_tcp(identity: Identity, prefix: str, own: Own, deadline: float, timeout: float) -> Meeting:
    address = f"{identity.master_addr}:{identity.master_port}"
    if identity.agent_store:  # it outlives restarts, and a restart may bring another number of ranks
        prefix, server, where = f"{prefix}/{own.size}", None, f"torchrun's store at {address}"
    else:
        server, where = 0, f"rank 0's store at {address}"
    try:
        store = _serve(identity, deadline) if server == own.rank else _reach(identity, server, where, deadline, timeout)
    except RuntimeError as error:
        if isinstance(error, CollectivesError):
            raise
        if "EADDRINUSE" not in str(error) and "in use" not in str(error):
            raise TransportError(f"{where} can't be opened: {first_line(error)}", op="init", rank=own.rank) from error
        store = _store_of_my_double(identity, prefix, own, deadline)
        if store is None:
            raise TransportError(
                f"port {identity.master_port} is in use by another program on this machine, so rank 0 can't serve the "
                f"others at {address}: set MASTER_PORT to a free port (torchrun: --master-port, or --standalone)",
                op="init",
                rank=own.rank,
                detail=first_line(error),
            ) from error
        server, where = None, f"another rank 0's store at {address}"
    while True:
        prefixed = dist.PrefixStore(prefix, store)
        exchange = StoreExchange(
            prefixed, own, deadline, timeout, where, server, host=identity.master_addr, lasts=identity.agent_store
        )
        del prefixed
        del store  # the exchange holds the only reference, and drops it at its end: that closes the port
        try:
            return exchange.meet()
        except RemoteError:
            if not exchange.stale:
                raise
        # That was the store of a process group that was just ending in rank 0's process; the one to meet in comes next.
        store = _reach(identity, server, where, deadline, timeout)


def _serve(identity: Identity, deadline: float) -> dist.TCPStore:
    # "localhost": this rank talks to its own server, whatever MASTER_ADDR is on this machine. multi_tenant: a store
    # that this process opens on the same port meanwhile shares the server.
    return dist.TCPStore(
        "localhost", identity.master_port, None, True, _remaining(deadline), wait_for_workers=False, multi_tenant=True
    )


def _reach(identity: Identity, server: int | None, where: str, deadline: float, timeout: float) -> dist.TCPStore:
    """Connect to the store as soon as it is there.

    torch's own client waits up to twice its time limit, prints a C++ stack, can't be interrupted, and waits for ever
    for a program that accepts connections and is no store. So it is used once something listens, and in a thread.
    """
    peers = () if server is None else (server,)
    address, port = identity.master_addr, identity.master_port
    left = deadline - time.monotonic()
    wait = Wait(f"to serve its store at {address}:{port}", identity.rank, identity.size, left, deadline=math.inf)
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.05, min(5.0, deadline - time.monotonic()))).close()
            break
        except OSError as error:  # nobody listens yet, or the name can't be resolved yet
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"{where} did not answer within {timeout:g} s ({error}): rank 0 has not started, or is not on that "
                    "machine, or has failed",
                    op="init",
                    rank=identity.rank,
                    peers=peers,
                ) from error
            wait.look(lambda: [0])
            time.sleep(0.02)

    def late() -> CollectivesError:
        return CollectiveTimeout(
            f"{where}: what listens there did not answer as torch's TCPStore within {timeout:g} s: is MASTER_PORT the "
            "port of another program?",
            op="init",
            rank=identity.rank,
            peers=peers,
        )

    def connect(_: threading.Event) -> dist.TCPStore:
        return dist.TCPStore(address, port, None, False, _remaining(deadline), wait_for_workers=False)

    return limited(connect, deadline, late)


def _store_of_my_double(identity: Identity, prefix: str, own: Own, deadline: float) -> dist.TCPStore | None:
    """The store of the process that has the port, if it is of this job and says that it is rank 0, too."""
    until = min(deadline, time.monotonic() + 2.0)
    local = replace(identity, master_addr="localhost")
    try:
        store = _reach(local, None, "the port", until, 2.0)
        records = dist.PrefixStore(prefix, store)
        while time.monotonic() < until:
            if records.check(["peer/0"]):
                return store if own.job and parse(records.get("peer/0"), 0)["job"] == own.job else None
            time.sleep(0.02)
    except RuntimeError:  # whatever it is that listens there, it isn't a store with such a record
        return None
    return None


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


# ---- By the job's name, on one machine.


def _by_name(name: bytes, own: Own, timeout: float) -> Meeting:
    here = own.peer()
    if own.engine.library.is_host and not simulated():
        unique_id = own.engine.library.named_unique_id(name)
        # Nothing is exchanged: that the ranks are on this machine is what the launcher says, and the init holds it.
        peers = tuple(
            here if r == own.rank else PeerInfo(r, here.host, here.boot_id, namespace=here.namespace)
            for r in range(own.size)
        )
        return Meeting(unique_id, peers, own.rank, own.size)
    # NCCL ids are made at random, so the ranks first meet on the host engine, which carries the records. So they do
    # where COLLECTIVES_HOST_ID, which all ranks must have then, says that they are on several machines.
    library = get_engine("host").library
    library.set_init_timeout(timeout)
    with _host_comm(library, name + b"\0records", own) as comm:
        comm.set_timeout(timeout)
        record, server = serving_record(own, "localhost")
        sent = torch.frombuffer(bytearray(record.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)
        got = torch.zeros(RECORD_BYTES * own.size, dtype=torch.uint8)
        comm.all_gather(sent.data_ptr(), got.data_ptr(), RECORD_BYTES, _nccl.DTYPES["uint8"])
    slots = got.view(own.size, RECORD_BYTES)
    records = [bytes(slot.tolist()).rstrip(b"\0") for slot in slots]
    meeting = settle(records, own)
    if wants_store(meeting, own.engine.name):
        meeting = with_store(meeting, json.loads(records[0])["store"], server, time.monotonic() + timeout)
    return meeting


@contextlib.contextmanager
def _host_comm(library: _nccl.Library, name: bytes, own: Own):
    comm = library.comm_init_rank(own.size, library.named_unique_id(name), own.rank)
    try:
        yield comm
    except BaseException:
        comm.abort()
        raise
    comm.destroy()


# ---- By MPI, over several machines.


def _running_mpi() -> Any | None:
    """The module mpi4py.MPI, if the program has imported it and MPI runs."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _mpi_module(identity: Identity) -> Any:
    mpi = _running_mpi()
    cure = ""
    if mpi is None and identity.launcher in ("openmpi", "mpich"):
        try:
            from mpi4py import MPI  # importing it starts MPI

            mpi = MPI
        except ImportError as error:  # not there, or built for another MPI
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
