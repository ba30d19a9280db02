"""The communicator of the whole job: `init()`."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator, device_of, parse_device
from ..comm.engine import Engine, get_engine
from ..comm.multinode.comm import open_over
from ..comm.multinode.nccl_hierarchical import use_two_levels
from ..comm.waiting import said
from ..comm.watchdog import Notes, watch
from ..cuda_state import set_first_device
from ..environment import check_variables
from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import default_store
from . import rendezvous
from .exchange import needs_store

__all__ = ["init"]

_world: Communicator | None = None
_generation = 0
_lock = threading.RLock()


def init(
    engine: str | None = None, *, device=None, timeout: float = 60.0, deterministic: bool = False,
    hierarchical: bool | None = None,
) -> Communicator:  # fmt: skip
    """Open the communicator of all ranks of this job, or give the one that is open.

    The ranks are found from torchrun's, mpirun's or srun's variables, or RANK and WORLD_SIZE; with none of them it is a
    world of one. `engine`: "nccl", "host", or None for COLLECTIVES_ENGINE or what the machine has. `device`: None for
    ``cuda:local_rank``, or the CPU. `deterministic`: reduce in rank order only, see `Communicator`. Blocks until all
    ranks have come, at most `timeout` seconds. `hierarchical`: reduce and gather inside of each machine first, then
    between them. CPUs on several machines always do (Gloo carries the data between them), and False is an error there;
    on GPUs NCCL does as it finds best unless it is True. Raises `CollectiveTimeout` naming the ranks that did not come,
    `InvalidUsage` where two ranks have one number, `EngineUnavailable`, `TransportError`. After `close()` it opens
    a new one.

    A GPU becomes torch's current device, as by ``torch.cuda.set_device``, where CUDA was not used before; where it was,
    with another device as the current one, a warning says so: call ``torch.cuda.set_device(local_rank)`` first.
    """
    global _world, _generation
    with _lock:
        if _world is not None and (not _world.closed or _world.forked):
            _same_world(_world, engine, device, deterministic)
            return _world
        check_variables()
        chosen = get_engine(engine, None if device is None else parse_device(device).type)
        identity = rendezvous.identify()
        place = None
        if device is not None:
            place = device_of(chosen, device)
        elif identity.local_rank is not None or chosen.device_type == "cpu":
            place = _local_device(chosen, identity.local_rank)
        if place is not None:
            set_first_device(place)
        # A meeting that fails uses its number up as well: some ranks may have seen it succeed.
        generation, _generation = _generation, _generation + 1
        deadline = time.monotonic() + timeout if isinstance(timeout, int | float) else 0.0
        meeting = rendezvous.meet(
            identity, engine=chosen, timeout=timeout, generation=generation, device=place, hierarchical=hierarchical
        )
        native = None
        if needs_store(meeting, chosen.name):
            chosen, native = open_over(chosen, meeting, identity.rank, max(1.0, deadline - time.monotonic()))
        if place is None:
            place = _local_device(chosen, meeting.local_rank)
            set_first_device(place)
        with said("to open the job's communicator", identity.rank, timeout):
            _world = Communicator(
                chosen, meeting.unique_id, identity.rank, identity.size,
                device=place, local_rank=meeting.local_rank, local_size=meeting.local_size, peers=meeting.peers,
                deterministic=deterministic, native=native,
            )  # fmt: skip
        notes = _notes(meeting, generation)
        if notes is not None and chosen.device_type != "cpu":
            watch(_world, notes)
        if hierarchical and native is None:
            use_two_levels(_world)
        return _world


def _notes(meeting, generation: int) -> Notes | None:
    prefix = f"collectives/watch/{generation}"
    if dist.is_available() and dist.is_initialized():
        return Notes(default_store(), prefix, weak=True)
    return None if meeting.store is None else Notes(meeting.store, prefix)


def _same_world(world: Communicator, engine, device, deterministic) -> None:
    if world.forked:
        raise InvalidUsage(f"init(): {world._native.why}", rank=world.rank)
    if engine is not None and engine != world.engine.name:
        raise InvalidUsage(
            f"init({engine!r}) after a communicator was opened on engine {world.engine.name!r}: close() it first",
            rank=world.rank,
        )
    if device is not None and device_of(world.engine, device) != world.device:
        raise InvalidUsage(
            f"init(device={str(device)!r}) after a communicator was opened on {world.device}: close() it first",
            rank=world.rank,
        )
    if deterministic and not world.deterministic:
        raise InvalidUsage("init(deterministic=True) after a communicator was opened without: close() it first")


def _local_device(engine: Engine, local_rank: int) -> torch.device:
    if engine.device_type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # one device a rank (CUDA_VISIBLE_DEVICES), or several ranks on one GPU
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise InvalidArgument(f"local rank {local_rank} has no GPU of its own, there are {count}: pass device=")
    return torch.device("cuda", local_rank)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
