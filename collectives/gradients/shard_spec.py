"""Which of a bucket's elements a rank owns, and an optimizer's state of these alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import InvalidArgument
from ..optim import HALF_DTYPES, init_step_count, new_state_tensor, state_dtype

__all__ = ["KEYS", "Ownership", "assembled", "check_ranks", "cut", "described", "fill", "part_of", "read"]

KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param")  # of state by element


class Ownership(NamedTuple):
    """Which of a bucket's elements a rank owns: `own`, its part of the first `whole`, and the rest, as all ranks do."""

    size: int  # elements of the bucket
    ranks: int
    align: int  # elements; parts are multiples of it
    rank: int

    @property
    def part(self) -> int:
        """The elements of a rank's own part."""
        return self.size // (self.ranks * self.align) * self.align

    @property
    def whole(self) -> int:
        """The elements of all parts; the rest begins here."""
        return self.part * self.ranks

    @property
    def own(self) -> slice:
        """This rank's part."""
        return slice(self.rank * self.part, (self.rank + 1) * self.part)

    @property
    def rest(self) -> slice:
        """What all ranks own alike."""
        return slice(self.whole, self.size)

    def pieces(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Give (first, count) of what is owned of the `count` elements from `offset`; `first` counts from there."""
        spans = [(self.own.start, self.own.stop), (self.whole, self.size)]
        if spans[0][1] == spans[1][0]:
            spans = [(spans[0][0], spans[1][1])]  # the last rank's
        return _within(spans, offset, count)

    def others(self, offset: int, count: int) -> list[tuple[int, int]]:
        """The same of what only other ranks own."""
        return _within([(0, self.own.start), (self.own.stop, self.whole)], offset, count)


def _within(spans, offset, count) -> list[tuple[int, int]]:
    cut = [(max(first, offset) - offset, min(end, offset + count) - offset) for first, end in spans]
    return [(first, end - first) for first, end in cut if end > first]


def part_of(tensor, first, count) -> torch.Tensor:
    """Elements of a dense tensor in the order of its memory, as a tensor of one dimension that shares it."""
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset() + first)


def cut(full, pieces, dtype) -> torch.Tensor:
    """A copy of the pieces of a parameter's state."""
    parts = [full.as_strided((count,), (1,), first) for first, count in pieces]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=full.device)


def read(shard) -> tuple[int, Ownership, list[int]]:
    offset, size, ranks, align, rank, *strides = shard.tolist()
    return offset, Ownership(size, ranks, align, rank), strides


def check_ranks(shard, ranks, rank, name) -> None:
    _, owned, _ = read(shard)
    if (owned.ranks, owned.rank) != (ranks, rank):
        raise InvalidArgument(
            f"the state of {name} is the shard of rank {owned.rank} of {owned.ranks}, and this is rank {rank} of "
            f"{ranks}: save and load the full state (state_dict(full=True)), which any number of ranks can load"
        )


def described(param, state, owned, name) -> tuple:
    """What of a parameter's state must be the same on all ranks, or `InvalidArgument` for what can't be used."""
    shard = state.get("shard")
    here = [key for key in KEYS if isinstance(state.get(key), torch.Tensor)]
    if shard is None:
        for key in here:
            if state[key].shape != param.shape:
                raise InvalidArgument(
                    f"{key} of {name} has the shape {tuple(state[key].shape)}, its parameter {tuple(param.shape)}: "
                    "load a state of this model"
                )
        layout = None
    else:
        check_ranks(shard, owned.ranks, owned.rank, name)
        offset, known, strides = read(shard)
        count = sum(count for _, count in known.pieces(offset, param.numel()))
        if len(strides) != param.dim() or any(state[key].shape != (count,) for key in here):
            raise InvalidArgument(f"the sharded state of {name} isn't of a parameter of shape {tuple(param.shape)}")
        layout = (offset, *known[:3], strides)
    step = state.get("step")
    return layout, here, None if step is None else float(step)


def assembled(comm, param, value, shard) -> torch.Tensor:
    """Put a parameter's state together again, in the parameter's shape and order. Collective, where it is sharded."""
    if shard is None:
        return new_state_tensor(param).copy_(value)
    offset, owned, strides = read(shard)
    full = torch.zeros(param.numel(), dtype=value.dtype, device=value.device)
    place = 0
    for first, count in owned.pieces(offset, param.numel()):
        # What all ranks have is rank 0's to give.
        most = count if owned.rank == 0 else max(0, min(count, owned.whole - offset - first))
        full[first : first + most] = value[place : place + most]
        place += count
    if comm.size > 1 and full.numel():
        comm.all_reduce(full.view(torch.int32), "sum")  # as integers, since -0.0 + 0.0 has other bits
    ordered = full.as_strided(param.shape, strides)
    if list(param.stride()) == strides:
        return ordered
    return torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format).copy_(ordered)


@torch.inference_mode(False)
def fill(param, state, group, columns, counts, pieces, name) -> None:
    """Give a parameter's sharded state what is missing."""
    if counts:
        init_step_count(param, state, columns)
    for key in columns:
        if state.get(key) is None:
            total = sum(count for _, count in pieces)
            state[key] = torch.zeros(total, dtype=state_dtype(param), device=param.device)
    if group["master_weights"]:
        if param.dtype not in HALF_DTYPES:
            state.pop("master_param", None)  # after model.float(): the parameter is as wide itself
        elif state.get("master_param") is None:
            parts = [part_of(param, first, count) for first, count in pieces]
            state["master_param"] = (torch.cat(parts) if parts else param.new_empty(0)).to(torch.float32)
