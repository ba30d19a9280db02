"""PieceReader: reads a state from the pieces that ranks have in memory, as of a checkpoint's files."""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, WriteItemType
from torch.futures import Future

from .dist_wrapper import DistWrapper
from .rank_piece import read_piece
from .snapshot import align_offset
from .state_reader import StateReader

__all__ = ["PieceReader"]


class PieceReader(StateReader):
    """Index of a state that lies in the memory of ranks, and what is read by it.

    `pieces`: those that this rank has for the others, as (head, data) of a `RankPiece` by numbers;
    each piece is on one rank. Each read is a collective of `ranks`: a rank gets exactly the elements
    that it asks for, so it needs memory for what it loads, and for what it sends, once.
    """

    def __init__(self, ranks: DistWrapper, source: str, pieces: dict[int, tuple[bytes, torch.Tensor]]):
        self._ranks = ranks
        self._planners: dict[int, DefaultSavePlanner] = {}
        tables = ranks.run_on_all("list its pieces", lambda: {at: self._list(at, *each) for at, each in pieces.items()})
        holders = {number: rank for rank, table in enumerate(tables) for number in table}
        found = {number: each for table in tables for number, each in table.items()}
        numbers = sorted(found)
        plans, metadata = DefaultSavePlanner().create_global_plan([found[number][0] for number in numbers])
        super().__init__(source, metadata)
        self._places = {
            item.index: (holders[number], number)
            for number, plan in zip(numbers, plans, strict=True)
            for item in plan.items
        }
        self._objects = {
            item.index: found[number][1][item.index]
            for number, plan in zip(numbers, plans, strict=True)
            for item in plan.items
            if item.type is WriteItemType.BYTE_IO
        }

    def _list(self, number: int, head: bytes, data: torch.Tensor) -> tuple:
        """Return DCP's plan of a piece, and its objects, pickled."""
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(read_piece(head, data), is_coordinator=True)
        plan = planner.create_local_plan()
        self._planners[number] = planner
        objects = {
            item.index: planner.resolve_data(item).getvalue()
            for item in plan.items
            if item.type is WriteItemType.BYTE_IO
        }
        return plan, objects

    def _end_of(self, item: ReadItem, begin: int) -> int:
        """Return where an item's bytes end that begin at an aligned offset."""
        return begin + item.lengths.numel() * self.entries[item.storage_index.fqn].properties.dtype.itemsize

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan has. A collective."""
        wanted: list[list[ReadItem]] = [[] for _ in range(self._ranks.size)]
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._objects[item.storage_index]))
            else:
                wanted[self._places[item.storage_index][0]].append(item)
        tables = self._ranks.run_on_all("ask for its elements", lambda: wanted)
        sends = [self._pack(table[self._ranks.rank]) for table in tables]
        received = self._ranks.all_to_all_bytes(sends, [self._size_of(items) for items in wanted])
        for items, part in zip(wanted, received, strict=True):
            end = 0
            for item in items:
                begin = align_offset(end)
                end = self._end_of(item, begin)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part[begin:end].view(target.dtype).view(target.shape))
                planner.commit_tensor(item, target)
        made: Future = Future()
        made.set_result(None)
        return made

    def _size_of(self, items: list[ReadItem]) -> int:
        """Return the bytes of a part with some items. The next rank's part, behind it, begins aligned, too."""
        end = 0
        for item in items:
            end = self._end_of(item, align_offset(end))
        return align_offset(end)

    def _pack(self, items: list[ReadItem]) -> torch.Tensor:
        """Return the elements that a rank has asked for, in one buffer."""
        made, end = torch.empty(self._size_of(items), dtype=torch.uint8, device="cpu"), 0
        for item in items:
            begin = align_offset(end)
            end = self._end_of(item, begin)
            found = self._planners[self._places[item.storage_index][1]].lookup_object(item.storage_index).detach()
            bounds = zip(item.storage_offsets, item.lengths, strict=True)
            part = found[tuple(slice(first, first + count) for first, count in bounds)]
            made[begin:end].view(part.dtype).view(part.shape).copy_(part)
        return made

    # ---- The rest of DCP's interface.

    def reset(self, checkpoint_id=None) -> None:
        """Do nothing: there is no other source."""

    def set_up_storage_reader(self, metadata, is_coordinator: bool, *args, **kwargs) -> None:
        """Do nothing: the index is there."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        """Return False: pieces have no name."""
        return False
