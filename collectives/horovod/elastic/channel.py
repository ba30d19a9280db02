"""Channel of elastic states over Horovod's operations."""

from __future__ import annotations

import torch

from ... import elastic
from ..basics import current, rank
from ..functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from ..operations import Max, allgather_async, allreduce_async, synchronize

__all__ = ["CHANNEL", "HorovodChannel"]


class HorovodChannel(elastic.Channel):
    """Channel over the global process set; its calls are negotiated as the program's are."""

    @property
    def rank(self) -> int:
        return rank()

    @property
    def size(self) -> int:
        return current().size

    def broadcast_object(self, value, root: int = 0):
        return broadcast_object(value, root)

    def broadcast_module_state(self, state: dict) -> None:
        broadcast_parameters(state, root_rank=0)

    def broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        broadcast_optimizer_state(optimizer, root_rank=0)

    def gather_numbers(self, numbers: list[int]) -> list[int]:
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return synchronize(allgather_async(mine, _waits=True)).tolist()

    def maximum(self, values: list[float]) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        return synchronize(allreduce_async(mine, op=Max, _waits=True)).tolist()


CHANNEL = HorovodChannel()
