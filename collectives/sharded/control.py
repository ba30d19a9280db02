"""Control: a communicator on host memory, by which the ranks of any communicator tell each other a few numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

from ..communicator import Communicator
from ..engine import get_engine
from ..errors import InvalidUsage

__all__ = ["control_of"]

_UNIQUE_ID = 128  # bytes


def control_of(comm: Communicator) -> Communicator | _Gloo | None:
    """Give what reduces small NumPy arrays over a communicator's ranks, blocking; None for a world of one.

    A collective. On the host it is a communicator of its own, so that queued operations don't hold it up. For ranks on
    GPUs of one machine it is one of the host engine's; for those of several machines a Gloo group of torch's.
    """
    if comm.size == 1:
        return None
    if comm._on_host:
        return comm.split(0)
    machine = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest()[:7]
    ends = torch.tensor([int.from_bytes(machine, "big"), -int.from_bytes(machine, "big")], device=comm.device)
    comm.all_reduce(ends, "max", algorithm="native")
    most, least = ends.tolist()
    if most != -least:
        return _Gloo(comm)
    engine = get_engine("host")
    unique_id = torch.zeros(_UNIQUE_ID, dtype=torch.uint8)
    if comm.rank == 0:
        unique_id = torch.frombuffer(bytearray(engine.library.get_unique_id()), dtype=torch.uint8)
    unique_id = unique_id.to(comm.device)
    comm.broadcast(unique_id)
    return Communicator(engine, bytes(unique_id.tolist()), comm.rank, comm.size, device="cpu", timeout=comm.timeout)


class _Gloo:
    """Torch's Gloo, for ranks of several machines."""

    def __init__(self, comm: Communicator):
        if not dist.is_initialized() or dist.get_world_size() != comm.size or dist.get_rank() != comm.rank:
            raise InvalidUsage(
                "sharding over several machines needs torch.distributed's default group of the same ranks in the same "
                "order: call torch.distributed.init_process_group() first",
                op="fully_shard", rank=comm.rank,
            )  # fmt: skip
        self._group = dist.new_group(backend="gloo")

    def all_reduce(self, array, op: str) -> None:
        ops = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
        dist.all_reduce(torch.from_numpy(array), ops[op], group=self._group)
