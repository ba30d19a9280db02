"""Communicator of all ranks of the job, which `init()` opens."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import torch

from ..comm.arguments import parse_timeout
from ..comm.communicator import Communicator
from ..comm.config import CommConfig, parse_config
from ..comm.engine import Engine, get_engine, parse_device, resolve_device
from ..comm.liveness import ProcessExits
from ..comm.waiting import log_while_waiting
from ..cuda_state import set_first_device
from ..environment import check_variables
from ..errors import CollectiveTimeout, InvalidArgument, InvalidUsage, RemoteError, TransportError
from .join import identify_process, join_over_store, join_rendezvous
from .launcher_store import LauncherStore
from .open import open_communicator, remaining_seconds
from .rounds import Round, Rounds, find_rounds

if TYPE_CHECKING:
    from ..argument_types import Device, EngineName

__all__ = [
    "OPERATION_S", "current_round", "current_world", "has_joiners", "init", "init_with_limits", "join_next_round",
    "replace_world", "round_store",
]  # fmt: skip

_world: Communicator | None = None
_round: Round | None = None  # of an elastic job, whose communicator `_world` is
_rounds: Rounds | None = None
_generation = 0
_lock = threading.RLock()
OPENING_S, OPERATION_S = 60.0, 1800.0  # the limits where `init` gets none
_OPEN_SECONDS = 30.0  # for the members of a closed round to connect
_log = logging.getLogger("collectives.elastic")


def init(
    engine: EngineName | None = None, *, device: Device | None = None, timeout: float | None = None,
    deterministic: bool = False, config: CommConfig | dict | None = None,
) -> Communicator:  # fmt: skip
    """Open the communicator of all ranks of this job, or return the one that is open.

    Rank and size come from torchrun's, mpirun's or srun's variables, or from RANK and WORLD_SIZE;
    with none of them it is a world of one. Blocks until all ranks have come. After `close()` it
    opens a new communicator. CPUs on several nodes reduce and gather inside of each node first,
    then between nodes, over TCP connections.

    A GPU becomes torch's current device, as by ``torch.cuda.set_device``, if CUDA was not used
    before. If it was, with another current device, a warning says so: call
    ``torch.cuda.set_device(local_rank)`` first.

    Args:
        engine: "nccl" or "host". None: COLLECTIVES_ENGINE, or what the node has.
        device: The device whose memory is sent. None: ``cuda:local_rank``, or the CPU.
        timeout: The limit in seconds of the opening, of each operation, and of `split` and
            `shrink`, as of ``torch.distributed.init_process_group``. None: 60 s for the opening,
            and 1,800 s for the others. It becomes the limit of a communicator that is open already,
            too; ``comm.timeout = seconds`` changes it after the opening.
        deterministic: Reduce in rank order only, see `Communicator`.
        config: A `CommConfig` or a dict of its fields, the same on all ranks: settings of NCCL,
            without effect on the host.

    Raises:
        CollectiveTimeout: Names the ranks that did not come.
        InvalidUsage: Where two processes have one rank, or the open communicator has other
            settings.
        EngineUnavailable: Where the engine can't be used.
        TransportError: Where the ranks can't connect.
    """
    opening, limit = (OPENING_S, OPERATION_S) if timeout is None else [parse_timeout(timeout, None)] * 2
    with _lock:
        world = init_with_limits(opening, limit, engine, device=device, deterministic=deterministic, config=config)
        if timeout is not None and world.timeout != timeout:  # it was open
            world.timeout = timeout
        return world


def init_with_limits(
    opening: float, limit: float | None, engine: str | None = None, *, device=None, deterministic: bool = False,
    config: CommConfig | dict | None = None,
) -> Communicator:  # fmt: skip
    """Open the job's communicator as `init` does, in at most `opening` seconds, with the `limit` of an
    operation; or return the one that is open.
    """
    global _world, _generation
    with _lock:
        if _world is not None and (not _world.closed or _world.forked):
            _verify_arguments(_world, engine, device, deterministic, config)
            return _world
        check_variables()
        config = parse_config(config)
        chosen = get_engine(engine, None if device is None else parse_device(device).type)
        if (rounds := _open_rounds()) is not None:
            return _join_round(
                rounds, chosen, device, opening, deterministic, config, seconds=opening, comm_timeout=limit
            )
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
            identity, engine=chosen, timeout=opening, generation=generation, device=own_device,
            config=repr(config),
        )  # fmt: skip
        if own_device is None:
            own_device = _select_device(chosen, rendezvous.local_rank)
            set_first_device(own_device)
        with log_while_waiting("to open the job's communicator", identity.rank, opening):
            _world = open_communicator(
                rendezvous, chosen, device=own_device, seconds=remaining_seconds(began + opening, opening),
                timeout=limit, deterministic=deterministic, config=config,
            )  # fmt: skip
        return _world


def current_round() -> Round | None:
    """Return the round of the elastic job that `init` has joined last; None outside of such a job."""
    return _round


def current_world() -> Communicator | None:
    """Return the communicator that `init` has opened; None where there is none, or it is closed."""
    return None if _world is None or _world.closed else _world


def replace_world(comm: Communicator) -> None:
    """Make a communicator the one that `init` returns."""
    global _world
    _world = comm


def has_joiners() -> bool:
    """Return whether a process waits to join this elastic job; False outside of such a job."""
    return _round is not None and _open_rounds().has_joiners(_round)


def round_store(name: str):
    """Return a part of the elastic job's store that its present round has for itself, over a connection
    of its own, which a wait doesn't keep from others; None outside of such a job.
    """
    return None if _round is None else _open_rounds().connect_part(f"{name}/{_round.number}")


def _open_rounds() -> Rounds | None:
    """Return the rounds of this process's elastic job, None outside of one; connect once."""
    global _rounds
    if _rounds is None:
        _rounds = find_rounds()
    return _rounds


def join_next_round(
    seconds: float, *, commits: int = 0, report: dict | None = None, least: int | None = None
) -> tuple[Communicator, Round]:
    """Join the next round of the elastic job, with the present communicator's options; return its
    communicator, which `init` returns from now on, and the round.

    The present communicator is aborted. Blocks until the living ranks have come, at most for
    ``seconds`` for each. The other arguments and the errors are `Rounds.join`'s; deaths meanwhile
    lead to a further round.
    """
    with _lock:
        old = _world
        if old is None or _round is None:
            raise InvalidUsage("there is no elastic job that this process has joined", op="init")
        old.abort()
        _join_round(
            _open_rounds(), old.engine, old.device, seconds, old.deterministic, old.config,
            seconds=seconds, commits=commits, report=report, least=least, comm_timeout=old.timeout,
        )  # fmt: skip
        return _world, _round


def _join_round(
    rounds: Rounds, engine: Engine, device, timeout: float, deterministic: bool, config, *,
    seconds: float, commits: int = 0, report: dict | None = None, least: int | None = None,
    comm_timeout: float | None,
) -> Communicator:  # fmt: skip
    """Join rounds until the communicator of one could be opened, and make it the job's."""
    global _world, _round
    engine = get_engine(engine.name, engine.device_type)  # a communicator over several nodes has a library of its own
    while True:
        joined = rounds.join(_round, seconds, commits=commits, report=report, least=least)
        _round, moves = joined, rounds.launcher_store.moves
        _set_master(rounds.launcher_store)
        name = f"open/{joined.number}"
        processes = [member.process for member in joined.members]
        try:
            rendezvous = join_over_store(
                rounds.store, name, joined.rank, joined.size, engine=engine, timeout=min(timeout, _OPEN_SECONDS),
                device=device, purpose=f"to open round {joined.number} of the elastic job",
                exits=ProcessExits(processes), config=repr(config),
            )  # fmt: skip
            own_device = device if device is not None else _select_device(engine, rendezvous.local_rank)
            set_first_device(resolve_device(engine, own_device))
            _world = open_communicator(
                rendezvous, engine, device=own_device, seconds=min(timeout, _OPEN_SECONDS), timeout=comm_timeout,
                deterministic=deterministic, config=config,
            )  # fmt: skip
            return _world
        except (RemoteError, CollectiveTimeout) as error:  # a member of this round has died
            _log.warning("round %d of the elastic job: %s; the next one is joined", joined.number, error)
        except TransportError as error:
            if not rounds.has_another_store(moves):
                raise
            _log.warning("round %d of the elastic job: %s; the next one is joined", joined.number, error)


def _set_master(store: LauncherStore) -> None:
    """Set the variables of the launcher's store where it isn't any more the one that they name."""
    if store.moves:
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = store.place.rpartition(":")


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
