"""Channel: what the states of an elastic training send to the other ranks, and over what."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import Any

import numpy
import torch

from ..comm.agree import all_gather_bytes
from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from ..rendezvous import world
from ..secret import seal, unseal

__all__ = ["Channel", "CommChannel"]

_PURPOSE = "elastic/state"


class Channel(ABC):
    """The calls that states and samplers make. Each is a collective of all ranks, and blocks."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the object of one rank, which is pickled.

        Args:
            value: The object; only that of ``root`` is used.
            root: The rank whose object is returned.

        Raises:
            ValueError: Where the object can't be pickled.
        """

    @abstractmethod
    def broadcast_module_state(self, state: dict) -> None:
        """Broadcast rank 0's values of a module's state dict, in place."""

    @abstractmethod
    def broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Broadcast rank 0's state and options of an optimizer."""

    @abstractmethod
    def gather_numbers(self, numbers: list[int]) -> list[int]:
        """Return all ranks' numbers, in rank order."""

    @abstractmethod
    def maximum(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum of the ranks' values."""


class CommChannel(Channel):
    """Channel over the job's communicator, which `collectives.init` returns."""

    @property
    def comm(self) -> Communicator:
        """The job's communicator. Raises `InvalidUsage` where none is open."""
        comm = world.current_world()
        if comm is None:
            raise InvalidUsage("call collectives.init() first, or the function that elastic.run has made")
        return comm

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        comm = self.comm
        try:
            data = b"\1" + pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if comm.rank == root else b""
        except Exception as error:  # an object's own __reduce__ may raise anything
            data = b"\0" + f"{type(value).__name__}: {error}".encode()
        sent = all_gather_bytes(comm, seal(data, _PURPOSE) if comm.rank == root else b"")[root]
        if comm.rank != root:
            data = unseal(sent, _PURPOSE)  # verified before it is unpickled
        if data[:1] == b"\0":
            raise ValueError(f"rank {root}'s object can't be pickled: {data[1:].decode(errors='replace')}")
        return value if comm.rank == root else pickle.loads(data[1:])

    def broadcast_module_state(self, state: dict) -> None:
        rest = self.broadcast_object({name: each for name, each in state.items() if not _is_tensor(each)})
        state.update(rest)
        for name in sorted(name for name, each in state.items() if _is_tensor(each)):
            self._broadcast(state[name])

    def broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state = self.broadcast_object(optimizer.state_dict())
        if self.rank != 0:
            optimizer.load_state_dict(state)

    def gather_numbers(self, numbers: list[int]) -> list[int]:
        rows = all_gather_bytes(self.comm, numpy.array(numbers, dtype=numpy.int64).tobytes())
        return numpy.frombuffer(b"".join(rows), dtype=numpy.int64).tolist()

    def maximum(self, values: list[float]) -> list[float]:
        comm = self.comm
        most = torch.tensor(values, dtype=torch.float64, device="cpu").to(comm.device)
        comm.all_reduce(most, "max")
        return most.tolist()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        comm = self.comm
        sent = tensor.detach().to(comm.device).contiguous()
        comm.broadcast(sent, 0)
        if comm.rank != 0:
            with torch.no_grad():
                tensor.copy_(sent)


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_sparse
