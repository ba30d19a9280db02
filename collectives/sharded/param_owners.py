"""Owners of whole parameters: the rank on which each parameter is put together for an optimizer that
needs it whole, and the exchange of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..errors import InternalError
from .param import ShardedParam
from .param_group import ParamGroup

__all__ = ["OwnedParam", "assign_owners", "default_cost", "exchange"]

_SLACK = 1.1  # how much more than its part a rank may get for less communication


def default_cost(shape: torch.Size) -> float:
    """Return a parameter's cost: its elements, times the shorter side of it as a matrix, as a product
    with itself takes.
    """
    count = math.prod(shape)
    return float(count * min(shape[0], count // shape[0])) if len(shape) > 1 and count else float(count)


def assign_owners(costs: list[float], held: list[list[int]], loads: list[float]) -> list[int]:
    """Return a rank for each parameter, the same on all ranks; `loads`, what each rank has already, is
    added to.

    `held`: how many elements of each parameter the ranks have. From the dearest on, a parameter
    goes to the rank that has most of it, where that keeps the balance, else to the rank with the
    least load.
    """
    size = len(loads)
    most = _SLACK * (sum(costs) + sum(loads)) / size
    owners = [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        owner = max(range(size), key=lambda rank: (held[at][rank], -rank))
        if loads[owner] + costs[at] > most:
            owner = min(range(size), key=lambda rank: (loads[rank], -held[at][rank], rank))
        owners[at] = owner
        loads[owner] += costs[at]
    return owners


def intervals(param: ShardedParam, group: ParamGroup) -> list[tuple[int, int]]:
    """Return the first element and the number of elements that each rank has of a parameter."""
    found = []
    for rank in range(group.ranks.size):
        low = rank * group.shard_numel
        begin = min(max(param.offset, low), low + group.shard_numel)
        end = min(max(param.offset + param.count, low), low + group.shard_numel)
        found.append((begin - param.offset if end > begin else 0, end - begin))
    if found[group.ranks.rank] != (param.start, param.shard.numel()):
        raise InternalError(f"{param!r} begins at {param.start}, and the layout says {found[group.ranks.rank]}")
    return found


class OwnedParam:
    """A sharded parameter that one rank, its owner, steps as a whole.

    `full`: the parameter, of its full shape, that the owner's optimizer holds. It has memory and a
    gradient on the owner between `acquire` and `release`; otherwise, and on the other ranks, it is
    expanded from one NaN. Where the owner has all of it, that is the shard's memory.
    """

    def __init__(self, param: ShardedParam, group: ParamGroup, name: str):
        self.param = param
        self.name = name
        self.comm: Communicator = group.ranks.shard
        self.intervals = intervals(param, group)
        self.owner = -1
        value = math.nan if group.dtype.is_floating_point or group.dtype.is_complex else 0
        self._nothing = torch.full((), value, dtype=group.dtype, device=group.store).expand(param.shape)
        self.full = nn.Parameter(self._nothing, requires_grad=False)
        self.full.__dict__.update(param.shard.__dict__)

    @property
    def is_here(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.comm.rank

    @property
    def held(self) -> list[int]:
        """The elements that each rank has."""
        return [count for _, count in self.intervals]

    def set_owner(self, owner: int) -> None:
        """Set the owner's rank. Its optimizer may step the parameter, and no other rank's."""
        self.owner = owner
        self.full.requires_grad_(self.is_here and self.param.shard.requires_grad)

    def broadcast(self, value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the owner's tensor of the parameter's shape on all ranks. A collective of `comm`.
        `value`: that tensor, on the owner.
        """
        if value is None:
            value = torch.empty(self.param.shape, dtype=dtype, device=self.full.device)
        sent = value.detach().contiguous()
        if sent.numel():
            self.comm.broadcast(sent.view(-1).view(torch.uint8), self.owner)
        return sent

    def shard_values(self) -> torch.Tensor:
        """Return the shard, flat, where it lies."""
        return self.param.shard.detach().view(-1)

    def shard_grad(self) -> torch.Tensor:
        """Return the shard's gradient, flat; zeros where there is none."""
        grad = self.param.shard.grad
        values = self.shard_values()
        if grad is None:
            return torch.zeros_like(values)
        return grad.detach().to(values.dtype).reshape(-1)

    def acquire(self, *, values: bool = True) -> None:
        """Allocate the parameter and its gradient, with this rank's parts. `values`: False: zeros."""
        shard, shape = self.shard_values(), self.param.shape
        if not values:
            self.full.data = torch.zeros(shape, dtype=self.full.dtype, device=self.full.device)
            return
        grad = self.shard_grad()
        if shard.numel() == self.param.count:
            self.full.data, self.full.grad = shard.view(shape), grad.view(shape)
            return
        start, count = self.intervals[self.comm.rank]
        made = []
        for mine in (shard, grad):
            made.append(torch.empty(shape, dtype=mine.dtype, device=mine.device))
            made[-1].view(-1)[start : start + count].copy_(mine)
        self.full.data, self.full.grad = made

    def store(self) -> None:
        """Copy the owner's part of what was stepped to its shard, unless it lies there."""
        shard = self.shard_values()
        start, count = self.intervals[self.comm.rank]
        mine = self.full.detach().reshape(-1)[start : start + count]
        if count and mine.data_ptr() != shard.data_ptr():
            shard.copy_(mine)

    def release(self) -> None:
        """Free the parameter's memory and its gradient's."""
        self.full.data, self.full.grad = self._nothing, None


def exchange(params: Iterable[OwnedParam], *, back: bool) -> None:
    """Send the parts of parameters and gradients to the owners, or `back` from the owners to the
    shards. A collective of each communicator that the parameters are sharded over.

    All of a communicator's messages are one group. On the host it blocks; on CUDA it is ordered on
    the current stream.
    """
    by_comm: dict[int, tuple[Communicator, list[OwnedParam]]] = {}
    for each in params:
        by_comm.setdefault(id(each.comm), (each.comm, []))[1].append(each)
    for comm, members in by_comm.values():
        messages = []
        for each in members:
            if each.is_here:
                flats = [each.full.detach().reshape(-1)]
                flats += [] if back else [each.full.grad.view(-1)]
                for rank, (start, count) in enumerate(each.intervals):
                    if rank != comm.rank and count:
                        messages += [(back, flat[start : start + count], rank) for flat in flats]
            elif each.intervals[comm.rank][1]:
                flats = [each.shard_values()] if back else [each.shard_values(), each.shard_grad()]
                messages += [(not back, flat, each.owner) for flat in flats]
        if messages:
            with comm.group():
                for sends, flat, peer in messages:
                    comm.send(flat, peer) if sends else comm.recv(flat, peer)
