"""ProcessSet: a subset of the job's ranks for operations."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Ranks of the job; `hvd.init` and `hvd.add_process_set` put it in use.

    The attributes ``process_set_id`` and ``ranks`` are None before it is in use.

    Args:
        ranks_or_comm: A list of ranks, or an mpi4py communicator of them.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks_or_comm: Sequence[int] | None):
        if hasattr(ranks_or_comm, "Get_group"):  # an mpi4py communicator
            from mpi4py import MPI

            group = ranks_or_comm.Get_group()
            ranks_or_comm = MPI.Group.Translate_ranks(group, None, MPI.COMM_WORLD.Get_group())
        if ranks_or_comm is not None:
            ranks_or_comm = list(ranks_or_comm)
            if not all(isinstance(rank, Integral) and not isinstance(rank, bool) for rank in ranks_or_comm):
                raise ValueError(f"a process set is made of a list of ranks, not of {ranks_or_comm}")
            ranks_or_comm = [int(rank) for rank in ranks_or_comm]  # NumPy's integers, too
        self.requested_ranks = ranks_or_comm
        self._own_rank: int | None = None

    def bind(self, number: int, ranks: list[int], own_rank: int) -> None:
        """Put it in use in an initialised job."""
        self.process_set_id, self.ranks = number, list(ranks)
        self._own_rank = own_rank

    def unbind(self) -> None:
        """Take it out of use."""
        self.process_set_id = self.ranks = self._own_rank = None

    def size(self) -> int | None:
        """Return the number of ranks; None before it is in use."""
        return None if self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in it; None where this process isn't in it."""
        return self.ranks.index(self._own_rank) if self.included() else None

    def included(self) -> bool:
        """Return whether this process is in it."""
        return self.ranks is not None and self._own_rank in self.ranks

    def __str__(self):
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __repr__(self):
        return f"<{self}>" if self.ranks is not None else f"<ProcessSet({self.requested_ranks}), not in use>"


global_process_set = ProcessSet(None)
