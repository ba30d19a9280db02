"""Copies of the ranks' shards in the memory of other ranks: who keeps whose, two versions of them, and
the transfer beside the computation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..comm.communicator import Communicator
from ..errors import TransportError
from ..secret import seal, unseal
from ..sharded.state.rank_piece import RankPiece

__all__ = ["Copy", "Held", "Key", "Refresh", "Version", "find_keepers", "find_whole"]

_PURPOSE = "elastic/piece"


class Key(NamedTuple):
    """Name of a version: its commit, and the generation of the ranks whose pieces it consists of."""

    number: int
    generation: int


class Held(NamedTuple):
    """A piece that a rank has: of which version, of how many ranks, whose, and whether it is its own."""

    number: int
    generation: int
    size: int
    owner: int
    own: bool


@dataclass
class Copy:
    """Another rank's piece. `owner`: None where it is not there, or not whole."""

    owner: int | None = None
    head: bytes = b""
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))


@dataclass
class Version:
    """What a rank has in memory of one version; `key`: None where that is not whole.

    `rank` of `size`: this rank when it was made; `record`: the attributes and state dicts of then.
    """

    own: RankPiece = field(default_factory=RankPiece)
    copies: list[Copy] = field(default_factory=list)
    key: Key | None = None
    rank: int = 0
    size: int = 0
    record: Any = None

    def clear(self) -> None:
        """Mark it as not there, since it is about to be overwritten."""
        self.key = self.record = None
        for copy in self.copies:
            copy.owner = None

    def list_held(self) -> list[Held]:
        """Return the pieces that are here."""
        if self.key is None:
            return []
        owners = [(self.rank, True)] + [(copy.owner, False) for copy in self.copies if copy.owner is not None]
        return [Held(*self.key, self.size, *each) for each in owners]

    def piece_of(self, owner: int) -> tuple[bytes, torch.Tensor]:
        """Return the head and the data of a rank's piece that is here. Waits until it is copied."""
        if owner == self.rank:
            self.own.wait()
            return self.own.head, self.own.data
        copy = next(copy for copy in self.copies if copy.owner == owner)
        return unseal(copy.head, _PURPOSE), copy.data

    def count_bytes(self) -> int:
        """Return the bytes of host memory of its tensors."""
        return self.own.data.numel() + sum(copy.data.numel() for copy in self.copies)


# ---- Who keeps whose.


def find_keepers(size: int, nodes: Sequence[Sequence[int]], replicas: int) -> list[list[int]]:
    """Return for each copy the rank that keeps rank r's, by r; each rank keeps one piece of each copy.

    `nodes`: the ranks of each node. The keeper is on another node, for as many ranks as possible; on
    one node it is the next rank. No more copies than there are other ranks.
    """
    order = [rank for node in nodes for rank in node]
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}

    def same_node(shift: int) -> int:
        return sum(node_of[rank] == node_of[order[(at + shift) % size]] for at, rank in enumerate(order))

    shifts = sorted(range(1, size), key=lambda shift: (same_node(shift), shift))[:replicas]
    place = {rank: at for at, rank in enumerate(order)}
    return [[order[(place[rank] + shift) % size] for rank in range(size)] for shift in shifts]


def find_whole(held: Sequence[Sequence[Held]]) -> tuple[Key | None, dict[int, int], dict[Key, list[int]]]:
    """Return the newest version of which all pieces are there, or None; which rank provides each
    rank's piece of it; and of each newer version whose pieces are missing.

    `held`: the pieces of each rank. A rank's own piece is preferred, and then the rank that provides
    the fewest.
    """
    sizes: dict[Key, int] = {}
    found: dict[Key, dict[int, list[tuple[bool, int]]]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            key = Key(piece.number, piece.generation)
            sizes[key] = piece.size
            found.setdefault(key, {}).setdefault(piece.owner, []).append((not piece.own, rank))
    missing: dict[Key, list[int]] = {}
    for key in sorted(found, reverse=True):
        missing[key] = [owner for owner in range(sizes[key]) if owner not in found[key]]
        if missing[key]:
            continue
        del missing[key]
        load = [0] * len(held)
        providers = {}
        for owner in range(sizes[key]):
            _, _, rank = min((copied, load[rank], rank) for copied, rank in found[key][owner])
            load[rank] += 1
            providers[owner] = rank
        return key, providers, missing
    return None, {}, missing


# ---- The transfer.


class Refresh(threading.Thread):
    """Sends this rank's piece of a version to the ranks that keep it, and receives theirs; on a thread.

    `comm`: a communicator on host memory for this alone; all ranks make a refresh of the same
    version. `sent`: bytes, once it is done.
    """

    def __init__(self, comm: Communicator, version: Version, key: Key, keepers: list[list[int]]):
        super().__init__(name=f"collectives shards of commit {key.number}")
        self._comm, self._version, self._key, self._keepers = comm, version, key, keepers
        self._error: BaseException | None = None
        self.sent = 0

    def run(self) -> None:
        """Do it; called by the thread."""
        try:
            self._version.own.wait()
            for copy, keeper in zip(self._version.copies, self._keepers, strict=True):
                self._exchange(copy, keeper[self._comm.rank], keeper.index(self._comm.rank))
        except BaseException as error:  # raised by `wait` on the training's thread
            self._error = error

    def wait(self) -> None:
        """Wait until this rank's part is done; raise what has failed in it."""
        self.join()
        if self._error is not None:
            raise self._error

    def _exchange(self, copy: Copy, to: int, source: int) -> None:
        comm, own = self._comm, self._version.own
        sealed = torch.frombuffer(bytearray(seal(own.head, _PURPOSE)), dtype=torch.uint8)
        sizes = torch.tensor([*self._key, sealed.numel(), own.data.numel()], device="cpu")
        theirs = torch.empty_like(sizes)
        with comm.group():
            comm.send(sizes, to)
            comm.recv(theirs, source)
        *key, head_bytes, data_bytes = theirs.tolist()
        if Key(*key) != self._key:
            raise TransportError(
                f"rank {source} sends its shards of commit {key[0]}, and this rank those of {self._key.number}",
                op="elastic.ShardedState", rank=comm.rank, peers=(source,),
            )  # fmt: skip
        if copy.data.numel() != data_bytes:
            copy.data = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
            copy.data = torch.empty(data_bytes, dtype=torch.uint8, pin_memory=own.data.is_pinned(), device="cpu")
        head = torch.empty(head_bytes, dtype=torch.uint8, device="cpu")
        with comm.group():
            for part in (sealed, own.data):
                if part.numel():
                    comm.send(part, to)
            for part in (head, copy.data):
                if part.numel():
                    comm.recv(part, source)
        copy.head = head.numpy().tobytes()
        copy.owner = source  # whole from now on
        self.sent += sealed.numel() + own.data.numel()
