"""Copies of the ranks' shards in the memory of other ranks: who keeps whose, the versions of them, the transfer beside
the computation, and what is read from them after a death.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from ..sharded.ragged_tensor import RaggedTensor
from ..torch_compat import tree_map

__all__ = ["Entry", "Key", "PieceReader", "Version", "find_keepers", "find_whole", "refresh"]

_ALIGNMENT = 64  # bytes, of each tensor in a piece

Key = tuple[int, int, int]  # name of a version: its commit, the generation of its ranks, and their number


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a state. `bounds`: of the ranks' rows, each of `inner` elements; None: rank 0's piece has all."""

    dtype: torch.dtype
    shape: torch.Size
    bounds: tuple[int, ...] | None = None
    inner: int = 1

    def span(self, rank: int) -> tuple[int, int]:
        """Return from where to where a rank's piece has the bytes of the flattened tensor."""
        if self.bounds is None:
            return 0, self.shape.numel() * self.dtype.itemsize if rank == 0 else 0
        row = self.inner * self.dtype.itemsize
        return self.bounds[rank] * row, self.bounds[rank + 1] * row

    def room(self, rank: int) -> int:
        """Return the bytes that it takes in a rank's piece."""
        start, stop = self.span(rank)
        return -((start - stop) // _ALIGNMENT) * _ALIGNMENT


def _entry_of(tensor: torch.Tensor) -> Entry:
    if isinstance(tensor, RaggedTensor):
        inner = tensor.shape[1:].numel() if tensor.ragged.by_rows else 1
        return Entry(tensor.dtype, tensor.shape, tensor.ragged.bounds, inner)
    if isinstance(tensor, DTensor) and not all(each.is_replicate() for each in tensor.placements):
        raise InvalidUsage(
            f"a DTensor {list(tensor.shape)} of {tensor.placements} is sharded otherwise than by fully_shard",
            op="elastic.ShardedState",
        )
    return Entry(tensor.dtype, tensor.shape)


@dataclasses.dataclass(eq=False)
class Version:
    """What a rank has in memory of one version: its own piece, and those that it keeps for others.

    A piece is one buffer with the bytes of a rank's shards, in the order of the state. Rank 0's also has the tensors
    that aren't sharded. `state`: with an `Entry` for each tensor; `record`: what is kept with it; `owners`: the ranks
    of the pieces, `buffers`, this rank first; `complete`: how many of them are whole.
    """

    key: Key | None = None  # None: not even this rank's piece is whole
    state: Any = None
    record: Any = None
    owners: list[int] = dataclasses.field(default_factory=list)
    buffers: list[torch.Tensor] = dataclasses.field(default_factory=list)
    complete: int = 0

    @torch.no_grad()
    def take(self, key: Key, state: Any, record: Any, owners: list[int], *, on_gpu: bool) -> None:
        """Copy this rank's part of a state in place of what is here; `refresh` receives the other owners' pieces.

        Blocks. What is on a GPU is copied to page-locked memory.
        """
        self.key, self.complete = None, 0
        parts: list[tuple[Entry, torch.Tensor]] = []

        def note(value):
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            parts.append((_entry_of(value), getattr(value, "_local_tensor", value)))
            return parts[-1][0]

        self.state, self.record, self.owners = tree_map(note, state), record, owners
        sizes = [sum(entry.room(owner) for entry, _ in parts) for owner in owners]
        if [buffer.numel() for buffer in self.buffers] != sizes:
            self.buffers = []  # frees the old memory first
            self.buffers = [torch.empty(each, dtype=torch.uint8, pin_memory=on_gpu, device="cpu") for each in sizes]
        at = 0
        for entry, part in parts:
            start, stop = entry.span(owners[0])
            if start < stop:
                place = self.buffers[0][at : at + stop - start]
                place.view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
            at += entry.room(owners[0])
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self.key, self.complete = key, 1


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


def find_whole(held: Sequence[Sequence]) -> tuple[Key | None, list[int], dict[Key, list[int]]]:
    """Return the newest version of which all pieces are there, or None; which rank provides each rank's piece of it;
    and of each newer version the ranks whose pieces are missing.

    `held`: (key, owner) of the pieces of each rank; the owner is None for a version that the rank only knows of.
    """
    found: dict[Key, list[list[int]]] = {}  # the ranks that have each rank's piece
    for rank, pieces in enumerate(held):
        for key, owner in pieces:
            holders = found.setdefault(tuple(key), [[] for _ in range(key[2])])
            if owner is not None:
                holders[owner].append(rank)
    missing: dict[Key, list[int]] = {}
    for key in sorted(found, reverse=True):
        if all(found[key]):
            return key, [holders[0] for holders in found[key]], missing
        missing[key] = [owner for owner, holders in enumerate(found[key]) if not holders]
    return None, [], missing


def refresh(comm: Communicator, version: Version, keepers: list[list[int]]) -> None:
    """Send this rank's piece of a version to the ranks that keep it, and receive theirs. A collective; blocks.

    `comm`: on host memory, and used by nothing else meanwhile.
    """
    own, *copies = version.buffers
    for keeper, source, kept in zip(keepers, version.owners[1:], copies, strict=True):
        with comm.group():
            if own.numel():
                comm.send(own, keeper[comm.rank])
            if kept.numel():
                comm.recv(kept, source)
        version.complete += 1


class PieceReader:
    """Reads a version's tensors, in the order of the state, from the ranks that provide its pieces.

    `comm`: on host memory, if there are several ranks; `providers`: the rank that has each piece; `pieces`: those of
    this rank, by their numbers.
    """

    def __init__(self, comm: Communicator, providers: list[int], pieces: dict[int, torch.Tensor]):
        self._comm, self._providers, self._pieces = comm, providers, pieces
        self._ends = [0] * len(providers)  # of what has been read of each piece

    def read(self, entry: Entry, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next tensor, on the host; where it was sharded and `like` is, this rank's shard. A collective."""
        comm, me = self._comm, self._comm.rank
        is_shard = entry.bounds is not None and isinstance(like, RaggedTensor)
        wanted = _entry_of(like) if is_shard else Entry(entry.dtype, entry.shape)
        wanted = dataclasses.replace(wanted, dtype=entry.dtype)
        spans = [wanted.span(rank if is_shard else 0) for rank in range(comm.size)]
        begin, end = spans[me]
        part = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        with comm.group():
            for owner, provider in enumerate(self._providers):
                first, last = entry.span(owner)
                at = self._ends[owner] - first
                self._ends[owner] += entry.room(owner)
                for rank in range(comm.size) if provider == me else (me,):
                    start, stop = max(first, spans[rank][0]), min(last, spans[rank][1])
                    if start >= stop:
                        continue
                    if provider != me:
                        comm.recv(part[start - begin : stop - begin], provider)
                    elif rank != me:
                        comm.send(self._pieces[owner][at + start : at + stop], rank)
                    else:
                        part[start - begin : stop - begin] = self._pieces[owner][at + start : at + stop]
        part = part.view(entry.dtype)
        if not is_shard:
            return part.view(entry.shape)
        part = part.view(like._local_tensor.shape)
        return like.detach().like(part if like.is_meta else part.to(like.device))
