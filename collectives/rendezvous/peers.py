"""Records of the ranks of a rendezvous, their validation, and the outcome.

Each rank makes one record, JSON of at most 2 KiB, and gets the records of all ranks. Rank 0's has
the unique id. Every field is checked, and nothing that arrives is unpickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..comm.engine import Engine
from ..comm.liveness import this_process
from ..comm.multinode.topology import find_own_address, group_ranks_by_node, identify_node
from ..comm.waiting import format_ranks
from ..errors import CollectiveTimeout, InvalidArgument, InvalidUsage, RemoteError, TransportError
from ..json_records import parse_json, parse_numbers, parse_text
from .job_store import connect_to_store, serve_store

__all__ = [
    "RECORD_BYTES",
    "Participant",
    "PeerInfo",
    "Rendezvous",
    "needs_multinode_comm",
    "parse_record",
    "raise_posted_failure",
    "validate",
]

RECORD_BYTES = 2048
_FAILURE_BYTES = 1 << 17  # names up to some 10,000 ranks
_ID_BYTES = 128

T = TypeVar("T")


@dataclass(frozen=True)
class PeerInfo:
    """One rank: its node and its process.

    ``pid`` and ``device`` are None where the ranks have exchanged nothing but a name; ``namespace``
    is the network namespace, which differs between containers of one node; ``gpu`` is the UUID of a
    CUDA device, whose number depends on CUDA_VISIBLE_DEVICES; ``process`` names the process for
    `liveness.has_ended`, "" where that isn't known.
    """

    rank: int
    host: str
    boot_id: str
    pid: int | None = None
    device: str | None = None
    namespace: str = ""
    gpu: str | None = None
    process: str = field(default="", compare=False)

    @property
    def node(self) -> tuple[str, str]:
        """The identity of the node: the same for two ranks if a local socket can connect them."""
        return self.boot_id or self.host, self.namespace


@dataclass(frozen=True)
class Rendezvous:
    """The outcome of a rendezvous: the unique id (128 bytes) for this rank's init, and the ranks.

    ``store``: the job's store (see `job_store`), where the communicator needs one; ``store_host``:
    its host.
    """

    unique_id: bytes
    peers: tuple[PeerInfo, ...]
    rank: int
    local_rank: int
    local_size: int
    store: dist.Store | None = field(default=None, compare=False)
    store_host: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.peers)

    @property
    def name(self) -> str:
        """The communicator's prefix in the store, which no other communicator has."""
        return sha256(self.unique_id).hexdigest()[:16]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in the order of the nodes' first ranks."""
        return group_ranks_by_node(peer.node for peer in self.peers)


# ---- Records.


@dataclass
class Participant:
    """This rank's side of a rendezvous.

    ``job``: a digest of the job's name, by which a second process with this rank's number is
    distinguished from a rank of another job; ``master``: a host through which the ranks reach each
    other, "" for MASTER_ADDR's; ``agent_port``: the port there of torchrun's agent's store, None
    without one; ``config``: the communicator's, in words, which all ranks must have.
    """

    rank: int
    size: int
    engine: Engine
    device: object = None
    job: str = ""
    master: str = ""
    agent_port: int | None = None
    config: str = ""
    _served: dist.Store | None = field(default=None, init=False)  # rank 0's, until `complete`

    def describe(self) -> PeerInfo:
        """Describe this process."""
        host, boot_id, namespace = identify_node()
        device = None if self.device is None else str(self.device)[:64]
        return PeerInfo(self.rank, host, boot_id, os.getpid(), device, namespace, _uuid_of(self.device), this_process())

    def make_record(self) -> bytes:
        """Make the record that the other ranks get. Rank 0 makes the unique id here, and serves the
        job's store.
        """
        fields: dict[str, Any] = {
            "size": self.size, "engine": self.engine.name, "config": self.config, "job": self.job,
            **vars(self.describe()),
        }  # fmt: skip
        if self.rank == 0:
            fields["unique_id"] = self.engine.library.get_unique_id().hex()
            if self.agent_port is None:
                self._served = serve_store()
                fields["store"] = [find_own_address(self.master), self._served.port]
            else:
                fields["store"] = [self.master, self.agent_port]
        return json.dumps(fields).encode()

    def complete(self, data: Iterable[bytes], deadline: float) -> Rendezvous:
        """Return the outcome of a rendezvous, from the ranks' records.

        Connects to the job's store where the communicator needs one: one over several nodes without
        GPUs, and NCCL's for its watchdog. Raises as `validate`, and ``TransportError`` where the
        store can't be reached.
        """
        data = list(data)
        rendezvous = validate(data, self)
        store, self._served = self._served, None
        if not (needs_multinode_comm(rendezvous, self.engine.name) or (self.engine.name == "nccl" and self.size > 1)):
            return rendezvous
        host, port = parse_record(data[0], 0)["store"]
        if store is None:
            here = rendezvous.peers[0].node == rendezvous.peers[self.rank].node and self.agent_port is None
            store = connect_to_store("localhost" if here else host, port, deadline - time.monotonic())
        return replace(rendezvous, store=store, store_host=host)


_FIELDS: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "size": (int,),
    "engine": (str,),
    "config": (str,),
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
    """Return the id of a GPU, None of another device. Raises `InvalidArgument` for one that isn't there."""
    if not isinstance(device, torch.device) or device.type != "cuda":
        return None
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise InvalidArgument(
            f"this rank's device is {device}, and this process has {count} GPU{'' if count == 1 else 's'}: start one "
            "rank for each GPU, or look at CUDA_VISIBLE_DEVICES"
        )
    return str(torch.cuda.get_device_properties(device).uuid)[:64]


def parse_record(data: bytes, rank: int) -> dict[str, Any]:
    """Parse the record of a rank, which comes from another process.

    Raises ``TransportError`` if it is none.
    """
    fields = _parse_json(data)
    good = all(name in fields and type(fields[name]) in types for name, types in _FIELDS.items())
    if good and rank == 0:
        text = fields.get("unique_id")
        good = isinstance(text, str) and len(text) == 2 * _ID_BYTES and set(text) <= set("0123456789abcdef")
        place = fields.get("store")
        good = good and isinstance(place, list) and [type(each) for each in place] == [str, int]
        good = good and place[0].isprintable() and 0 < place[1] < 1 << 16
    if not good or fields["rank"] != rank:
        raise TransportError(f"this is no record of rank {rank}: {data[:80]!r}", op="init", peers=(rank,))
    return fields


def _parse_json(data: bytes, limit: int = RECORD_BYTES) -> dict[str, Any]:
    """Parse a JSON object of at most ``limit`` bytes. Return an empty one for anything else."""
    try:
        fields = parse_json(data) if len(data) <= limit else None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def raise_posted_failure(data: bytes, rank: int) -> None:
    """Raise the failure that another rank has posted to all ranks."""
    kinds = {kind.__name__: kind for kind in (CollectiveTimeout, InvalidUsage, RemoteError)}
    try:
        posted = _parse_json(data, _FAILURE_BYTES)
        kind, text, peers = kinds[posted["kind"]], parse_text(posted["text"]), parse_numbers(posted["peers"])
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"what arrived as a failure is not one: {data[:80]!r}", op="init", rank=rank) from error
    raise kind(text, op="init", rank=rank, peers=peers)


# ---- The outcome.


def validate(data: Iterable[bytes], participant: Participant) -> Rendezvous:
    """Check that the ranks fit together, and return the outcome.

    All ranks have the same records, so all return or raise the same. ``data``: the records by rank.
    Raises ``InvalidUsage`` where sizes, engines or configs differ, or where NCCL's ranks share a GPU.
    """
    records = [parse_record(record, rank) for rank, record in enumerate(data)]
    for name, what in (("size", "number of ranks"), ("engine", "engine"), ("config", "config")):
        groups = _group_ranks((record[name], record["rank"]) for record in records)
        if len(groups) > 1:
            found = "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())
            raise InvalidUsage(f"the ranks don't have the same {what}: {found}", op="init", rank=participant.rank)
    names = ("rank", "host", "boot_id", "pid", "device", "namespace", "gpu", "process")
    peers = tuple(PeerInfo(*(r[name] for name in names)) for r in records)
    nodes = group_ranks_by_node(peer.node for peer in peers)
    if participant.engine.name == "nccl" and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") in ("", "0"):
        _verify_gpus_differ(peers, participant)
    local_ranks = next(ranks for ranks in nodes if participant.rank in ranks)
    unique_id = bytes.fromhex(records[0]["unique_id"])
    return Rendezvous(unique_id, peers, participant.rank, local_ranks.index(participant.rank), len(local_ranks))


def _verify_gpus_differ(peers: tuple[PeerInfo, ...], participant: Participant) -> None:
    """Raise ``InvalidUsage`` where ranks share a GPU.

    NCCL itself would fail after all ranks have come, on each with "Duplicate GPU detected" or
    "invalid usage" alone.
    """
    gpus = (((peer.boot_id or peer.host, peer.gpu), peer.rank) for peer in peers)
    for (_, gpu), ranks in _group_ranks(gpus).items():
        if gpu is not None and len(ranks) > 1:
            first = peers[ranks[0]]
            raise InvalidUsage(
                f"{format_ranks(ranks)} are all on one GPU, {first.device} ({gpu}) of {first.host}: NCCL takes one "
                "rank a GPU. Give each its own, init(device=f'cuda:{local_rank}'), and start no more ranks on a "
                "machine than it has GPUs; where each rank sees one GPU only, CUDA_VISIBLE_DEVICES must differ "
                "between them",
                op="init",
                rank=participant.rank,
                peers=ranks,
            )


def _group_ranks(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for value, rank in pairs:
        found.setdefault(value, []).append(rank)
    return found


def needs_multinode_comm(rendezvous: Rendezvous, engine: str) -> bool:
    """Return whether the ranks' communicator is one over several nodes without GPUs."""
    return engine == "host" and len(rendezvous.nodes) > 1
