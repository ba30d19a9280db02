"""Communicator of all ranks of the job, which `init()` opens."""

from __future__ import annotations

import os
import threading
import time

import torch

from ..comm.communicator import Communicator
from ..comm.config import CommConfig, parse_config
from ..comm.engine import Engine, get_engine, parse_device, resolve_device
from ..comm.waiting import log_while_waiting
from ..cuda_state import set_first_device
from ..environment import check_variables
from ..errors import InvalidArgument, InvalidUsage
from .join import identify_process, join_rendezvous
from .open import open_communicator, remaining_seconds

__all__ = ["init"]

_world: Communicator | None = None
_generation = 0
_lock = threading.RLock()


def init(
    engine: str | None = None, *, device=None, timeout: float = 60.0, deterministic: bool = False,
    hierarchical: bool | None = None, config: CommConfig | dict | None = None,
) -> Communicator:  # fmt: skip
    """Open the communicator of all ranks of this job, or return the one that is open.

    Rank and size come from torchrun's, mpirun's or srun's variables, or from RANK and WORLD_SIZE;
    with none of them it is a world of one. Blocks until all ranks have come.

    `engine`: "nccl", "host", or None for COLLECTIVES_ENGINE or what the node has. `device`: None
    for ``cuda:local_rank``, or the CPU. `timeout`: seconds. `deterministic`: reduce in rank order
    only, see `Communicator`. `hierarchical`: reduce and gather inside of each node first, then
    between nodes. CPUs on several nodes always do (Gloo carries the data between them), and False
    is an error there; on GPUs NCCL chooses by itself unless it is True. `config`: a `CommConfig` or
    a dict of its fields, the same on all ranks: settings of NCCL, without effect on the host.

    Raises `CollectiveTimeout` naming the ranks that did not come, `InvalidUsage` where two
    processes have one rank, `EngineUnavailable`, `TransportError`. After `close()` it opens a new
    communicator.

    A GPU becomes torch's current device, as by ``torch.cuda.set_device``, if CUDA was not used
    before. If it was, with another current device, a warning says so: call
    ``torch.cuda.set_device(local_rank)`` first.
    """
    global _world, _generation
    with _lock:
        if _world is not None and (not _world.closed or _world.forked):
            _verify_arguments(_world, engine, device, deterministic, config)
            return _world
        check_variables()
        config = parse_config(config)
        chosen = get_engine(engine, None if device is None else parse_device(device).type)
        identity = identify_process()
        own_device = None
        if device is not None:
            own_device = resolve_device(chosen, device)
        elif identity.local_rank is not None or chosen.device_type == "cpu":
            own_device = _select_device(chosen, identity.local_rank)
        if own_device is not None:
            set_first_device(own_device)
        # A rendezvous that fails uses its number up as well: it may have succeeded on some ranks.
        generation, _generation = _generation, _generation + 1
        began = time.monotonic()
        rendezvous = join_rendezvous(
            identity, engine=chosen, timeout=timeout, generation=generation, device=own_device,
            hierarchical=hierarchical, config=repr(config),
        )  # fmt: skip
        if own_device is None:
            own_device = _select_device(chosen, rendezvous.local_rank)
            set_first_device(own_device)
        with log_while_waiting("to open the job's communicator", identity.rank, timeout):
            _world = open_communicator(
                rendezvous, chosen, device=own_device, seconds=remaining_seconds(began + timeout, timeout),
                deterministic=deterministic, hierarchical=hierarchical, config=config,
            )  # fmt: skip
        return _world


def _verify_arguments(world: Communicator, engine, device, deterministic, config) -> None:
    """Raise `InvalidUsage` where the open communicator doesn't fit the arguments of `init`."""
    if world.forked:
        raise InvalidUsage(f"init(): {world._native.reason}", rank=world.rank)
    if engine is not None and engine != world.engine.name:
        raise InvalidUsage(
            f"init({engine!r}) after a communicator was opened on engine {world.engine.name!r}: close() it first",
            rank=world.rank,
        )
    if device is not None and resolve_device(world.engine, device) != world.device:
        raise InvalidUsage(
            f"init(device={str(device)!r}) after a communicator was opened on {world.device}: close() it first",
            rank=world.rank,
        )
    if deterministic and not world.deterministic:
        raise InvalidUsage("init(deterministic=True) after a communicator was opened without: close() it first")
    if config is not None and parse_config(config) != world.config:
        raise InvalidUsage(
            f"init(config={parse_config(config)!r}) after a communicator was opened with {world.config!r}: close() it "
            "first",
            rank=world.rank,
        )


def _select_device(engine: Engine, local_rank: int) -> torch.device:
    """Return the device of a local rank: the CPU, or the GPU of that number."""
    if engine.device_type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # each rank sees one device (CUDA_VISIBLE_DEVICES), or several ranks share one GPU
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise InvalidArgument(f"local rank {local_rank} has no GPU of its own, there are {count}: pass device=")
    return torch.device("cuda", local_rank)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
