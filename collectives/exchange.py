"""What the ranks tell each other before there is a communicator, and how they do so over a torch store or over MPI.

Each rank puts down one record, JSON of at most 2 KiB, and gets all ranks' records; rank 0's holds the unique id. Every
field is checked; nothing that arrives is unpickled. A meeting that fails, fails on every rank that has come, with the
same error: ``CollectiveTimeout`` naming the ranks that are missing, ``InvalidUsage`` for two ranks with one number.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .engine import Engine
from .errors import CollectivesError, CollectiveTimeout, InvalidUsage, RemoteError, TransportError
from .machines import grouped, own_address, this_machine
from .presence import Fates, described, has_ended, this_process
from .waiting import Wait, name_ranks

__all__ = [
    "RECORD_BYTES",
    "Meeting",
    "Own",
    "PeerInfo",
    "StoreExchange",
    "first_line",
    "limited",
    "needs_store",
    "over_mpi",
    "parse",
    "reach_lasting",
    "serve_lasting",
    "serving_record",
    "settle",
    "wants_store",
    "with_store",
]

RECORD_BYTES = 2048
# After a failure: how many seconds the rank that serves the others stays, so that those who have come learn why; and
# how many where it was no lack of time, for those who are still starting.
_GRACE_S, _LATECOMERS_S = 2.0, 5.0
_ID_BYTES = 128
_FAILURE_BYTES = 1 << 17  # names up to some 10,000 ranks
_MPI_TAG = 0x4343

T = TypeVar("T")


@dataclass(frozen=True)
class PeerInfo:
    """One rank: the machine it is on and its process. ``pid`` and ``device`` are None where the ranks have exchanged
    nothing but a name; ``namespace`` is the network namespace, which differs between containers of one machine;
    ``gpu`` the UUID of a CUDA device, whose number depends on CUDA_VISIBLE_DEVICES; ``process`` names the process for
    `presence.has_ended`, "" where that isn't known."""

    rank: int
    host: str
    boot_id: str
    pid: int | None = None
    device: str | None = None
    namespace: str = ""
    gpu: str | None = None
    process: str = field(default="", compare=False)

    @property
    def machine(self) -> tuple[str, str]:
        """What two ranks have in common exactly when a local socket connects them."""
        return self.boot_id or self.host, self.namespace


@dataclass(frozen=True)
class Meeting:
    """The outcome: the unique id (128 bytes) for this rank's init, and who the ranks are, by rank.

    ``store``: for ranks on several machines that the host engine is to connect, and for NCCL's, a store that lasts;
    ``store_host``:
    where it is, "" where that isn't known; ``server``: in the process that serves it, what keeps it alive.
    """

    unique_id: bytes
    peers: tuple[PeerInfo, ...]
    local_rank: int
    local_size: int
    store: dist.Store | None = field(default=None, compare=False)
    store_host: str = ""
    server: object = field(default=None, compare=False)

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """Give the ranks of each machine."""
        return grouped(peer.machine for peer in self.peers)


# ---- Records.


@dataclass(frozen=True)
class Own:
    """This rank's side of a meeting. ``job``: a digest of the job's name, to tell a double from another job's rank.
    ``hierarchical``: False where the host engine is not to connect several machines."""

    rank: int
    size: int
    engine: Engine
    device: object = None
    job: str = ""
    hierarchical: bool | None = None

    def peer(self) -> PeerInfo:
        """Describe this process."""
        host, boot_id, namespace = this_machine()
        device = None if self.device is None else str(self.device)[:64]
        return PeerInfo(self.rank, host, boot_id, os.getpid(), device, namespace, _uuid_of(self.device), this_process())

    def record(self) -> bytes:
        """Write down what the others need to know. Rank 0 makes the unique id here."""
        fields: dict[str, Any] = {"size": self.size, "engine": self.engine.name, "job": self.job, **vars(self.peer())}
        if self.rank == 0:
            fields["unique_id"] = self.engine.library.get_unique_id().hex()
        return json.dumps(fields).encode()


_FIELDS: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "size": (int,),
    "engine": (str,),
    "job": (str,),
    "host": (str,),
    "boot_id": (str,),
    "namespace": (str,),
    "pid": (int,),
    "device": (str, type(None)),
    "gpu": (str, type(None)),
    "process": (str,),
}


def _uuid_of(device: object) -> str | None:
    if not isinstance(device, torch.device) or device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)[:64]


def parse(data: bytes, rank: int) -> dict[str, Any]:
    """Read one rank's record, which comes from another process. Raises ``TransportError`` if it isn't a sound one."""
    fields = _read_json(data)
    good = all(name in fields and type(fields[name]) in types for name, types in _FIELDS.items())
    if good and rank == 0:
        text = fields.get("unique_id")
        good = isinstance(text, str) and len(text) == 2 * _ID_BYTES and set(text) <= set("0123456789abcdef")
    if not good or fields["rank"] != rank:
        raise TransportError(f"this is no record of rank {rank}: {data[:80]!r}", op="init", peers=(rank,))
    return fields


def _read_json(data: bytes, limit: int = RECORD_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most ``limit`` bytes; anything else reads as an empty one."""
    try:
        fields = json.loads(data) if len(data) <= limit else None
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def settle(data: Iterable[bytes], own: Own) -> Meeting:
    """Check that the ranks fit together. All ranks see the same records, by rank, so all come to the same result.

    Raises ``InvalidUsage`` where sizes or engines differ, the host engine's ranks are on several machines and
    ``own.hierarchical`` is False, or NCCL's share a GPU.
    """
    records = [parse(record, rank) for rank, record in enumerate(data)]
    for name, what in (("size", "number of ranks"), ("engine", "engine")):
        groups = _groups((record[name], record["rank"]) for record in records)
        if len(groups) > 1:
            told = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items())
            raise InvalidUsage(f"the ranks don't have the same {what}: {told}", op="init", rank=own.rank)
    names = ("rank", "host", "boot_id", "pid", "device", "namespace", "gpu", "process")
    peers = tuple(PeerInfo(*(r[name] for name in names)) for r in records)
    machines = grouped(peer.machine for peer in peers)
    if own.engine.name == "host" and len(machines) > 1 and own.hierarchical is False:
        told = "; ".join(f"{name_ranks(ranks)} on {peers[ranks[0]].host}" for ranks in machines)
        what = "several machines"
        if len({peer.boot_id for peer in peers}) == 1:
            what = "several containers of one machine, with a network namespace each"
        raise InvalidUsage(
            f"hierarchical=False, but the ranks are on {what}: {told}. The host engine alone connects the ranks of one "
            "machine: leave hierarchical out, and it is used inside of each with Gloo between them",
            op="init",
            rank=own.rank,
        )
    if own.engine.name == "nccl" and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") in ("", "0"):
        _refuse_shared_gpus(peers, own)
    here = next(ranks for ranks in machines if own.rank in ranks)
    return Meeting(bytes.fromhex(records[0]["unique_id"]), peers, here.index(own.rank), len(here))


def _refuse_shared_gpus(peers: tuple[PeerInfo, ...], own: Own) -> None:
    """NCCL would fail after all ranks have come, on each with "Duplicate GPU detected" or "invalid usage" alone."""
    for (_, gpu), ranks in _groups(((peer.boot_id or peer.host, peer.gpu), peer.rank) for peer in peers).items():
        if gpu is not None and len(ranks) > 1:
            first = peers[ranks[0]]
            raise InvalidUsage(
                f"{name_ranks(ranks)} are all on one GPU, {first.device} ({gpu}) of {first.host}: NCCL takes one rank "
                "a GPU. Give each its own, init(device=f'cuda:{local_rank}'), and start no more ranks on a machine "
                "than it has GPUs; where each rank sees one GPU only, CUDA_VISIBLE_DEVICES must differ between them",
                op="init",
                rank=own.rank,
                peers=ranks,
            )


def needs_store(meeting: Meeting, engine: str) -> bool:
    """Tell whether the ranks' communicator is one over several machines without GPUs."""
    return engine == "host" and len(meeting.machines) > 1


def wants_store(meeting: Meeting, engine: str) -> bool:
    """Tell whether the ranks' communicator has a use for a store that lasts: NCCL's for the notes of its watchdog."""
    return needs_store(meeting, engine) or (engine == "nccl" and len(meeting.peers) > 1)


def serving_record(own: Own, host: str | None = None) -> tuple[bytes, dist.TCPStore | None]:
    """Return this rank's record and None. Rank 0 opens a store, adds its address to the record, and returns both.

    `host`: by which the others reach rank 0; None: the address of its own machine.
    """
    record = own.record()
    if own.rank != 0:
        return record, None
    server = serve_lasting()
    return json.dumps({**json.loads(record), "store": [host or own_address(), server.port]}).encode(), server


def serve_lasting() -> dist.TCPStore:
    """Serve a store on a free port of this process, for as long as it is held."""
    return dist.TCPStore("localhost", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def reach_lasting(host: str, port: int, deadline: float) -> dist.TCPStore:
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


def _groups(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for value, rank in pairs:
        found.setdefault(value, []).append(rank)
    return found


# ---- Time limits.


def limited(function: Callable[[threading.Event], T], until: float, late: Callable[[], CollectivesError]) -> T:
    """Run a function that may wait inside torch, so that its time limit and Ctrl-C hold in any case.

    ``until``: on ``time.monotonic``'s clock, in seconds; past it, what ``late`` gives is raised. The function runs in a
    thread and gets an event that says "give up"; a thread that doesn't come back is left behind, as a daemon.
    """
    stop, ended = threading.Event(), threading.Event()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def target():
        try:
            outcome.append((function(stop), None))
        except BaseException as error:  # raised below, in the caller's thread
            outcome.append((None, error))
        ended.set()  # an event: a join that a signal interrupts takes the thread for ended from then on (Python 3.11)

    threading.Thread(target=target, name="collectives-meet", daemon=True).start()
    try:
        ended.wait(max(0.0, until - time.monotonic()))
    except BaseException:  # Ctrl-C: the interpreter may end next, and a thread inside torch would abort that
        stop.set()
        ended.wait(_GRACE_S)
        raise
    finally:
        stop.set()
    if not outcome:
        raise late()
    result, error = outcome.pop()
    if error is not None:
        raise error
    return result


# ---- Over a torch store.


@dataclass
class StoreExchange:
    """One meeting over a store: claim my number, put down my record, wait for the others'.

    ``deadline``: on ``time.monotonic``'s clock; ``timeout``: the seconds that it was, for messages; ``where``: what to
    call the store; ``server``: the rank in whose process it is, if it is one's; ``host``: by which name it is reached;
    ``lasts``: whether it outlives the meeting. Where it doesn't and the ranks' communicator needs one that does, rank 0
    serves another one on a port of its own. ``stale`` is set when the store went
    away before the serving rank had come to this meeting: then it was an older one of that process. ``purpose``: what
    the ranks come for, for messages; ``fates``: how ranks that haven't come ended.

    Keys: ``arrived`` and ``left`` count processes, ``claim/R`` counts those that say they are rank R, ``peer/R`` holds
    R's record, ``error`` the reason for which the meeting has failed: whoever finds it first puts it there for all.
    """

    store: dist.Store | None
    own: Own
    deadline: float
    timeout: float
    where: str = "the store"
    server: int | None = None
    stale: bool = False
    host: str = ""
    lasts: bool = False
    purpose: str = "to open the job's communicator"
    fates: Fates | None = None
    _server_came: bool = False
    _lasting: tuple = (None, None)
    _came: dict = field(default_factory=dict)  # rank -> its process

    def meet(self) -> Meeting:
        """Exchange the records and check them. Blocks until all ranks have come or the time is over."""

        def late() -> CollectivesError:
            return CollectiveTimeout(
                f"{self.where} has stopped answering ({self.timeout:g} s were allowed)",
                op="init",
                rank=self.own.rank,
                peers=() if self.server is None else (self.server,),
            )

        lasting = self.store
        try:
            records = limited(self._run, self.deadline + (2 if self.server == self.own.rank else 1) * _GRACE_S, late)
        finally:
            self.store = None
        meeting = settle(records, self.own)
        if not wants_store(meeting, self.own.engine.name):
            return meeting
        store, server = (lasting, None) if self.lasts else self._lasting
        return replace(meeting, store=store, store_host=self.host, server=server)

    def _run(self, stop: threading.Event) -> list[bytes]:
        """Exchange the records.

        The rank that serves the store leaves it as the last one. So after a success the store's port is free again
        before this rank goes on to the engine's init, which no other rank gets past without it: a later
        ``init_process_group`` on the same port can't reach this store by mistake.
        """
        try:
            self.store.add("arrived", 1)
            try:
                records = self._records(stop)
                self._lasting = self._lasting_store(records, stop)
            except BaseException as error:
                timed_out = isinstance(error, CollectiveTimeout)
                until = min(time.monotonic() + _LATECOMERS_S, self.deadline) if not timed_out else self.deadline
                with contextlib.suppress(RuntimeError):  # if the store is what has failed, that is raised already
                    self.store.add("left", 1)
                    self._linger(stop, until + _GRACE_S, 0 if timed_out else self.own.size)
                raise
            self.store.add("left", 1)
            self._linger(stop, self.deadline, self.own.size)
            return records
        except CollectivesError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError, in some stores a plain one
            kind, peers = (RemoteError, (self.server,)) if self._is_guest() else (TransportError, ())
            self.stale = self._is_guest() and not self._server_came
            text = f"{self.where} has gone away or failed: {first_line(error)}"
            ended = self._ended_now()
            if ended:
                kind, peers = RemoteError, tuple(ended)
                text = f"{text}; {'; '.join(f'rank {rank}: {how}' for rank, how in ended.items())}"
            raise kind(text, op="init", rank=self.own.rank, peers=peers) from error

    def _records(self, stop: threading.Event) -> list[bytes]:
        store, rank, size = self.store, self.own.rank, self.own.size
        self._raise_failure()
        if store.add(f"claim/{rank}", 1) > 1:
            self._fail(InvalidUsage, f"two processes say that they are rank {rank}: {self._doubles(stop)}", (rank,))
        try:
            record = self.own.record()
        except CollectivesError as error:
            with contextlib.suppress(RemoteError):  # what the others get; here the cause itself is raised
                self._fail(RemoteError, f"rank {rank} could not make a unique id: {str(error)[:1000]}", (rank,))
            raise
        store.set(f"peer/{rank}", record)
        keys = [f"peer/{peer}" for peer in range(size)]
        wait = Wait(self.purpose, rank, size, self.timeout, deadline=self.deadline, fate=self._fate, op="init")
        pause = 0.001
        while True:
            self._raise_failure()
            if store.check(keys):
                return [store.get(key) for key in keys]
            try:
                wait.look(self._absent)
            except (CollectiveTimeout, RemoteError) as error:
                self._fail(type(error), error.message, error.peers)
            if self._is_guest() and not self._server_came:
                self._server_came = store.check([keys[self.server]])
            if stop.wait(pause):
                self._fail(RemoteError, f"rank {rank} stopped while the ranks were meeting", (rank,))
            pause = min(pause * 1.5, 0.05)

    def _absent(self) -> list[int]:
        """Give the ranks that have not come, and those that have come and ended while this one waited for others."""
        absent = []
        for peer in range(self.own.size):
            if peer not in self._came and self.store.check([f"peer/{peer}"]):
                self._came[peer] = parse(self.store.get(f"peer/{peer}"), peer)["process"]
            if peer not in self._came or has_ended(self._came[peer]):
                absent.append(peer)
        return absent

    def _fate(self, rank: int) -> str:
        if rank in self._came:
            return described(self._came[rank]) if has_ended(self._came[rank]) else ""
        return self.fates.of(rank) if self.fates is not None else ""

    def _ended_now(self) -> dict[int, str]:
        """Say of which ranks the processes have ended, once the store has: it may go a moment before its process."""
        until = time.monotonic() + _GRACE_S / 2
        while self.fates is not None:
            ended = self.fates.without_store()
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(0.02)
        return {}

    def _lasting_store(self, records: list[bytes], stop: threading.Event) -> tuple:
        """Give (a store that outlives the meeting, what serves it); Nones where none is needed."""
        needed = False
        with contextlib.suppress(InvalidUsage):  # ranks that don't fit together: raised behind this, by all alike
            needed = not self.lasts and wants_store(settle(records, self.own), self.own.engine.name)
        if not needed:
            return None, None
        if self.own.rank == 0:
            server = serve_lasting()
            self.store.set("lasting", str(server.port))
            return server, server
        wait = Wait(
            "to open a store", self.own.rank, self.own.size, self.timeout, deadline=self.deadline, fate=self._fate,
            op="init",
        )  # fmt: skip
        while not self.store.check(["lasting"]):
            self._raise_failure()
            wait.look(lambda: [0])
            if stop.wait(0.002):
                raise CollectiveTimeout("rank 0 did not open a store", op="init", rank=self.own.rank, peers=(0,))
        return reach_lasting(self.host, int(self.store.get("lasting")), self.deadline), None

    def _is_guest(self) -> bool:
        """Tell whether the store is in another rank's process."""
        return self.server not in (None, self.own.rank)

    def _linger(self, stop: threading.Event, until: float, expected: int) -> None:
        """In the rank that serves the store: wait until all who have come, and at least ``expected``, have left it."""
        if self.server == self.own.rank:
            while self.store.add("left", 0) < max(expected, self.store.add("arrived", 0)):
                if time.monotonic() >= until or stop.wait(0.002):
                    break

    def _doubles(self, stop: threading.Event) -> str:
        """Tell who has this rank's number. The first one's record may still be on its way."""
        me, first = f"process {os.getpid()} on {socket.gethostname()}", "another one"
        key, until = f"peer/{self.own.rank}", time.monotonic() + _GRACE_S / 2
        while not self.store.check([key]) and time.monotonic() < until and not stop.wait(0.01):
            pass
        if self.store.check([key]):
            other = parse(self.store.get(key), self.own.rank)
            first = f"process {other['pid']} on {other['host']}"
        return f"{first} and {me}. If they belong to two jobs, give each job a MASTER_PORT of its own"

    def _fail(self, kind: type[CollectivesError], text: str, peers: Iterable[int]) -> None:
        if not self.store.check(["error"]):
            self.store.set("error", json.dumps({"kind": kind.__name__, "text": text, "peers": list(peers)}))
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.store.check(["error"]):
            raise_told(self.store.get("error"), self.own.rank)


def raise_told(data: bytes, rank: int) -> None:
    """Raise the failure that another rank has found and told all the others."""
    kinds = {kind.__name__: kind for kind in (CollectiveTimeout, InvalidUsage, RemoteError)}
    try:
        told = _read_json(data, _FAILURE_BYTES)
        kind, text, peers = kinds[told["kind"]], str(told["text"]), [int(peer) for peer in told["peers"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"what arrived as a failure is not one: {data[:80]!r}", op="init", rank=rank) from error
    raise kind(text, op="init", rank=rank, peers=peers)


def first_line(error: BaseException) -> str:
    """Give an error's first line: torch's go on with a C++ stack."""
    return str(error).partition("\n")[0] or type(error).__name__


# ---- Over MPI.


def over_mpi(mpi: Any, own: Own, generation: int, deadline: float, timeout: float) -> Meeting:
    """Exchange the records over an mpi4py ``COMM_WORLD``, as bytes: rank 0 collects them and gives all of them to all.

    ``mpi``: the module ``mpi4py.MPI``. Blocks until all ranks have come or the time is over.
    """
    comm, tag = mpi.COMM_WORLD, _MPI_TAG + 2 * (generation % 1000)
    if (comm.Get_rank(), comm.Get_size()) != (own.rank, own.size):
        raise InvalidUsage(
            f"mpi4py says rank {comm.Get_rank()} of {comm.Get_size()}, the launcher rank {own.rank} of {own.size}: "
            "mpi4py is built for another MPI than the one that has started this job",
            op="init",
            rank=own.rank,
        )
    record, server = serving_record(own)
    if own.rank != 0:
        answer = bytearray(2 * RECORD_BYTES * (own.size + 1))  # records inside JSON: twice their bytes at most
        sent = comm.Isend([record, mpi.BYTE], 0, tag)
        got = comm.Irecv([answer, mpi.BYTE], 0, tag + 1)
        if _unfinished({0: got}, deadline + _GRACE_S):
            raise CollectiveTimeout(f"rank 0 did not answer within {timeout:g} s", op="init", rank=own.rank, peers=(0,))
        sent.Wait()
    else:
        slots = {peer: bytearray(RECORD_BYTES) for peer in range(1, own.size)}
        requests = {peer: comm.Irecv([slot, mpi.BYTE], peer, tag) for peer, slot in slots.items()}
        missing = _unfinished(requests, deadline)
        records = [record, *(bytes(slot).rstrip(b"\0") for slot in slots.values())]
        text = json.dumps({"records": [data.decode("utf-8", "replace") for data in records]})
        if missing:
            what = f"{name_ranks(missing)} of {own.size} did not come within {timeout:g} s"
            text = json.dumps({"kind": "CollectiveTimeout", "text": what, "peers": missing})
            for peer in missing:
                requests[peer].Cancel()
        answer = text.encode()
        sends = [comm.Isend([answer, mpi.BYTE], peer, tag + 1) for peer in slots if peer not in missing]
        _unfinished(dict(enumerate(sends)), time.monotonic() + _GRACE_S)
    fields = json.loads(bytes(answer).rstrip(b"\0"))
    if "kind" in fields:
        raise_told(json.dumps(fields).encode(), own.rank)
    meeting = settle([text.encode() for text in fields["records"]], own)
    if not wants_store(meeting, own.engine.name):
        return meeting
    return with_store(meeting, json.loads(fields["records"][0])["store"], server, deadline)


def with_store(meeting: Meeting, place: list, server, deadline: float) -> Meeting:
    """Give a meeting with the store that rank 0 has announced in its record as [host, port]."""
    host, port = str(place[0]), int(place[1])
    store = server or reach_lasting(host, port, deadline)
    return replace(meeting, store=store, store_host=host, server=server)


def _unfinished(requests: dict[int, Any], until: float) -> list[int]:
    """Wait for requests; give those that have not ended in time."""
    open_requests = dict(requests)
    while True:
        open_requests = {peer: request for peer, request in open_requests.items() if not request.Test()}
        if not open_requests or time.monotonic() >= until:
            return sorted(open_requests)
        time.sleep(0.001)
