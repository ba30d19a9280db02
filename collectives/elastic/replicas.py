"""Copies of the ranks' shards in the memory of other ranks: who keeps whose, two versions of them, the transfer
beside the computation, and what is read from them for other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..comm.communicator import Communicator
from ..errors import InvalidUsage, TransportError
from ..sharded.ragged_tensor import RaggedTensor
from ..torch_compat import tree_map_only

__all__ = ["Entry", "Held", "Key", "PieceReader", "Refresh", "Version", "find_keepers", "find_whole"]

_OP = "elastic.ShardedState"
_ALIGNMENT = 64  # bytes, of each tensor in a piece


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


@dataclass(frozen=True)
class Entry:
    """A tensor of a state. `bounds`: the elements of each rank in the flattened tensor; None: rank 0's piece has all."""

    dtype: torch.dtype
    shape: torch.Size
    bounds: tuple[int, ...] | None


def _bounds_of(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    if not isinstance(tensor, RaggedTensor):
        return None
    inner = tensor.shape[1:].numel() if tensor.ragged.by_rows else 1
    return tuple(bound * inner for bound in tensor.ragged.bounds)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Version:
    """What a rank has in memory of one version: its own piece, and the pieces that it keeps for others.

    A piece is the bytes of a rank's shards, in the order of the state, and of rank 0's also those of the tensors that
    aren't sharded.

    Attributes:
        key: None where the rank's own piece isn't whole.
        rank, size: This rank, and the number of ranks, when it was made.
        head: The state, pickled, with an `Entry` for each tensor.
        record: The attributes and state dicts of other objects.
        owners: The ranks whose pieces are whole, in the order of `buffers`; this rank is the first.
        buffers: The pieces.
    """

    def __init__(self):
        self.key: Key | None = None
        self.rank = self.size = 0
        self.head, self.record = b"", None
        self.owners: list[int] = []
        self.buffers: list[torch.Tensor] = []
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def take(self, key: Key, rank: int, size: int, state: Any, record: Any, *, pinned: bool) -> None:
        """Copy this rank's part of a state, and replace all that is here.

        Blocks for tensors on the host. Of those on a GPU the copies are in the order of the current stream, `pinned`:
        to page-locked memory; call `wait` before the piece is read.
        """
        self.key, self.owners = None, []
        parts: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> Entry:
            bounds, is_dtensor = _bounds_of(tensor), isinstance(tensor, DTensor)
            if is_dtensor and bounds is None and not all(each.is_replicate() for each in tensor.placements):
                raise InvalidUsage(f"a DTensor {list(tensor.shape)} of {tensor.placements}, which is no shard of a unit",
                                   op=_OP, rank=rank)  # fmt: skip
            if bounds is not None or rank == 0:
                parts.append(tensor._local_tensor if is_dtensor else tensor)
            return Entry(tensor.dtype, tensor.shape, bounds)

        head = pickle.dumps(tree_map_only(torch.Tensor, note, state))
        nbytes = [part.numel() * part.itemsize for part in parts]
        places = list(map(_align, nbytes))
        for part, count, place in zip(parts, nbytes, self.reserve(0, sum(places), pinned).split(places), strict=True):
            place[:count].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if pinned else None
        self.head, self.record, self.rank, self.size = head, record, rank, size
        self.key, self.owners = key, [rank]

    def wait(self) -> None:
        """Wait on the host until this rank's own piece is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def reserve(self, at: int, nbytes: int, pinned: bool) -> torch.Tensor:
        """Return a buffer of this size, the one that is here if its size is the same."""
        if at == len(self.buffers):
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self.buffers[at].numel() != nbytes:
            self.buffers[at] = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
            self.buffers[at] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        return self.buffers[at]

    def list_held(self) -> list[Held]:
        """Return the pieces that are here."""
        return [Held(*self.key, self.size, owner, owner == self.rank) for owner in self.owners]


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


def find_whole(held: Sequence[Sequence[Held]]) -> tuple[Key | None, list[int], dict[Key, list[int]]]:
    """Return the newest version of which all pieces are there, or None; which rank provides each rank's piece of it;
    and of each newer version whose pieces are missing.

    `held`: the pieces of each rank. A rank's own piece is preferred, and then the rank that provides the fewest.
    """
    sizes: dict[Key, int] = {}
    found: dict[Key, dict[int, list[tuple[bool, int]]]] = {}
    for rank, pieces in enumerate(held):
        for number, generation, size, owner, own in pieces:
            key = Key(number, generation)
            sizes[key] = size
            found.setdefault(key, {}).setdefault(owner, []).append((not own, rank))
    missing: dict[Key, list[int]] = {}
    for key in sorted(found, reverse=True):
        absent = [owner for owner in range(sizes[key]) if owner not in found[key]]
        if absent:
            missing[key] = absent
            continue
        providers: list[int] = []
        for owner in range(sizes[key]):
            choices = [(copied, providers.count(rank), rank) for copied, rank in found[key][owner]]
            providers.append(min(choices)[-1])
        return key, providers, missing
    return None, [], missing


# ---- The transfers.


class Refresh(threading.Thread):
    """Sends this rank's piece of a version to the ranks that keep it, and receives theirs; on a thread.

    `comm`: a communicator on host memory for this alone; all ranks make a refresh of the same
    version. `sent`: bytes, once it is done.
    """

    def __init__(self, comm: Communicator, version: Version, keepers: list[list[int]]):
        super().__init__(name=f"collectives shards of commit {version.key.number}")
        self._comm, self._version, self._keepers = comm, version, keepers
        self._error: BaseException | None = None
        self.sent = 0

    def run(self) -> None:
        """Do it; called by the thread."""
        rank = self._comm.rank
        try:
            self._version.wait()
            for at, keeper in enumerate(self._keepers, 1):
                self._exchange(at, keeper[rank], keeper.index(rank))
        except BaseException as error:  # raised by `wait` on the training's thread
            self._error = error

    def wait(self) -> None:
        """Wait until this rank's part is done; raise what has failed in it."""
        self.join()
        if self._error is not None:
            raise self._error

    def _exchange(self, at: int, to: int, source: int) -> None:
        comm, version, own = self._comm, self._version, self._version.buffers[0]
        sizes = torch.tensor([*version.key, own.numel()], device="cpu")
        theirs = torch.empty_like(sizes)
        with comm.group():
            comm.send(sizes, to)
            comm.recv(theirs, source)
        *key, nbytes = theirs.tolist()
        if Key(*key) != version.key:
            raise TransportError(
                f"rank {source} sends its shards of commit {key[0]}, and this rank those of {version.key.number}",
                op=_OP, rank=comm.rank, peers=(source,),
            )  # fmt: skip
        copy = version.reserve(at, nbytes, own.is_pinned())
        with comm.group():
            if own.numel():
                comm.send(own, to)
            if nbytes:
                comm.recv(copy, source)
        version.owners.append(source)
        self.sent += own.numel()


class PieceReader:
    """Reads a version's tensors, in the order of the state, from the ranks that provide its pieces.

    Args:
        comm: A communicator on host memory of the present ranks; None for one rank.
        providers: The rank that has each piece.
        pieces: Those that this rank provides, by their numbers.
    """

    def __init__(self, comm: Communicator | None, providers: list[int], pieces: dict[int, torch.Tensor]):
        self._comm, self._providers, self._pieces = comm, providers, pieces
        self._rank, self._size = (0, 1) if comm is None else (comm.rank, comm.size)
        self._ends = [0] * len(providers)  # of what is read of each piece

    def read(self, entry: Entry, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole next tensor on the host; for a shard `like`, a shard of the same bounds. A collective."""
        item, count = entry.dtype.itemsize, math.prod(entry.shape)
        bounds = _bounds_of(like)
        wanted = [(0, count)] * self._size if bounds is None else list(itertools.pairwise(bounds))
        begin, end = wanted[self._rank]
        part = torch.empty((end - begin) * item, dtype=torch.uint8, device="cpu")
        with contextlib.nullcontext() if self._comm is None else self._comm.group():
            for owner, (first, last) in enumerate(itertools.pairwise(entry.bounds or (0, count))):
                offset = self._ends[owner] - first * item
                self._ends[owner] += _align((last - first) * item)
                for rank, (low, high) in enumerate(wanted):
                    start, stop = max(first, low) * item, min(last, high) * item
                    if start < stop and self._providers[owner] == self._rank:
                        sent = self._pieces[owner][offset + start : offset + stop]
                        if rank == self._rank:
                            part[start - begin * item : stop - begin * item].copy_(sent)
                        else:
                            self._comm.send(sent, rank)
                    elif start < stop and rank == self._rank:
                        self._comm.recv(part[start - begin * item : stop - begin * item], self._providers[owner])
        if bounds is None:
            return part.view(entry.dtype).view(entry.shape)
        part = part.view(entry.dtype).view(like._local_tensor.shape)
        return like.detach().like(part if like.is_meta else part.to(like.device))
