"""init, shutdown, rank, size: the job as Horovod's programs see it, and its process sets."""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..comm.engine import engines
from ..comm.memory import large_from_heap
from ..errors import InvalidArgument
from ..rendezvous import world as job
from ..rendezvous.control import dup_on_host
from ..rendezvous.peers import PeerInfo
from ..rendezvous.process_groups import get_group_timeout
from ..tracing import Timeline, timeline
from .controller import Coordinator
from .process_sets import ProcessSet, global_process_set
from .settings import Settings, number_of, read_settings
from .stall_inspector import Watch

__all__ = [
    "World",
    "current",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_OPEN_SECONDS = 300.0  # how far apart the ranks may call init, without a process group of torch's
_world: World | None = None
_lock = threading.RLock()


class World:
    """An initialised job: a communicator over its ranks and what was split off it.

    ``comm``: the communicator; ``peers``: where each of its ranks is; ``owns``: whether `close` ends the communicator;
    ``seconds``: how long its ranks may be in coming to this, None: the communicator's own limit.
    """

    def __init__(
        self, comm: Communicator, peers: list[PeerInfo], *, owns: bool, settings: Settings,
        seconds: float | None = None,
    ):  # fmt: skip
        self.comm = comm
        self.peers = peers
        self.owns = owns
        self.settings = settings
        self.rank, self.size = comm.rank, comm.size
        machines = [peer.node for peer in peers]
        mine = machines[self.rank]
        here = [r for r in range(self.size) if machines[r] == mine]
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        order = list(dict.fromkeys(machines))
        sizes = [machines.count(machine) for machine in order]
        across = [machine for machine, count in zip(order, sizes, strict=True) if count > self.local_rank]
        self.cross_rank, self.cross_size = across.index(mine), len(across)
        self.homogeneous = len(set(sizes)) == 1
        self.sets: dict[int, ProcessSet] = {}
        self._coordinators: dict[int, Coordinator] = {}
        self._watch = Watch(settings, self.rank)
        # Process sets are split off these, and nothing else uses them.
        self.admin = dup_on_host(comm, seconds)
        self._next_id = 0

    # ---- Process sets.

    def add(self, process_set: ProcessSet) -> None:
        """Make a process set of this job; a collective of all its ranks."""
        ranks = self._read_ranks(process_set)
        known = next((other for other in self.sets.values() if other.ranks == ranks), None)
        self._compare(ranks)
        if known is not None:
            raise ValueError(f"a process set with ranks {ranks} was added before (its id is {known.process_set_id})")
        number = self._next_id
        self._next_id += 1
        color = 0 if self.rank in ranks else None
        control = self.admin.split(color)
        comms = {"cpu": self.admin.split(color)}
        if self.comm.device.type != "cpu":
            comms[self.comm.device.type] = self.comm.split(color)
        if color is not None:
            control.timeout = None  # a rank may be long in coming; that it has died is noticed all the same
            self._coordinators[number] = Coordinator(control, comms, ranks, self.settings)
            self._watch.add(self._coordinators[number])
        self.sets[number] = process_set
        process_set.bind(number, ranks, self.rank)

    def remove(self, process_set: ProcessSet) -> None:
        """End a process set; a collective of all its job's ranks."""
        number = process_set.process_set_id
        self._compare(process_set.ranks)
        coordinator = self._coordinators.pop(number, None)
        if coordinator is not None:
            coordinator.close()
        del self.sets[number]
        process_set.unbind()

    def coordinator(self, process_set: ProcessSet) -> Coordinator:
        """Give the coordinator of a process set; `ValueError` where this rank isn't in it."""
        self.check(process_set)
        number = process_set.process_set_id
        coordinator = self._coordinators.get(number)
        if coordinator is None:
            raise ValueError(f"rank {self.rank} isn't in process set {number}, which has ranks {process_set.ranks}")
        return coordinator

    def check(self, process_set: ProcessSet) -> None:
        """Raise `ValueError` for a process set that isn't in use in this job."""
        number = getattr(process_set, "process_set_id", None)
        if number is None or self.sets.get(number) is not process_set:
            raise ValueError(f"{process_set!r} isn't a process set of this job: hvd.add_process_set() makes it one")

    def _read_ranks(self, process_set: ProcessSet) -> list[int]:
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set!r} was added before")
        ranks = sorted(process_set.wanted if process_set.wanted is not None else range(self.size))
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < self.size:
            raise ValueError(f"a process set is of different ranks between 0 and {self.size - 1}, not {ranks}")
        return ranks

    def _compare(self, ranks: list[int]) -> None:
        """Raise `ValueError` on all ranks where they don't name the same ones."""
        mine = torch.tensor([r in ranks for r in range(self.size)], dtype=torch.uint8)
        most, least = mine.clone(), mine
        self.admin.all_reduce(most, "max")
        self.admin.all_reduce(least, "min")
        if not torch.equal(most, least):
            raise ValueError(
                f"the ranks name different process sets, here {ranks}: all ranks of the job must call this, in the "
                "same order"
            )

    # ---- The end.

    def close(self) -> None:
        """End all coordinators; what is under way fails."""
        self._watch.stop()
        for coordinator in self._coordinators.values():
            coordinator.close()
        for process_set in self.sets.values():
            process_set.unbind()
        for comm in (self.admin, *((self.comm,) if self.owns else ())):
            if not comm.closed:
                comm.abort() if comm._lane.busy() else comm.close()

    def abort(self, error: BaseException) -> None:
        """End all that is under way with an error, and all of this world's communicators but the one it is made of."""
        self._watch.stop()
        for coordinator in self._coordinators.values():
            coordinator.abort(error)
        for process_set in self.sets.values():
            process_set.unbind()
        self.admin.abort()


# ---- What programs call.


def init(comm=None, process_sets=None) -> None:
    """Start, before anything else; again: does nothing. Blocks until all ranks have come.

    The ranks are found as `collectives.init` finds them: torchrun, mpirun, srun, or alone. ``comm``: a list of the
    job's ranks that this rank is to work with (all ranks call `init`, each with the list that it is in), or an mpi4py
    communicator; None: all. ``process_sets``: `ProcessSet` objects to add, or "dynamic", which changes nothing: they
    can always be added. Raises as `collectives.init`, within HOROVOD_GLOO_TIMEOUT_SECONDS; without that, within the
    timeout of torch.distributed's default group where there is one, else 300 s.
    """
    global _world
    with _lock:
        if _world is not None:
            return
        settings = read_settings()
        owns = job._world is None or job._world.closed
        seconds = number_of("HOROVOD_GLOO_TIMEOUT_SECONDS", _open_seconds())
        base = job.init(timeout=seconds)
        peers = list(base.peers) if base.peers else None
        if peers is None:
            raise InvalidArgument("the communicator that is open doesn't tell where its ranks are", op="hvd.init")
        if comm is not None:
            ranks = _ranks_of(comm, base)
            base, owns = base.split(min(ranks), ranks.index(base.rank)), True
            peers = [peers[r] for r in ranks]
        large_from_heap()  # operations give new tensors, whose page faults would cost more than the sums
        enter(World(base, peers, owns=owns, settings=settings, seconds=seconds or None), process_sets)


def _open_seconds() -> float:
    if dist.is_available() and dist.is_initialized():
        return get_group_timeout(dist.group.WORLD, torch.device("cpu"))
    return _OPEN_SECONDS


def enter(world: World, process_sets=None) -> None:
    """Make a world the current one, with its process sets."""
    global _world
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets must be a list of ProcessSet or 'dynamic', not {process_sets!r}")
        process_sets = None
    global_process_set.unbind()
    try:
        world.add(global_process_set)
        for process_set in process_sets or ():
            world.add(process_set)
    except BaseException:
        world.close()
        raise
    _world = world
    if world.settings.timeline and _timeline is None:
        start_timeline(world.settings.timeline)


def _ranks_of(comm, base: Communicator) -> list[int]:
    ranks = comm.allgather(base.rank) if hasattr(comm, "allgather") else list(comm)
    good = all(isinstance(r, int) and 0 <= r < base.size for r in ranks)
    if not good or len(set(ranks)) < len(ranks) or base.rank not in ranks:
        raise ValueError(
            f"init(comm={ranks}): it must be a list of different ranks, with this one, {base.rank}, of {base.size}"
        )
    return ranks


def shutdown() -> None:
    """End; what is under way fails with `HorovodInternalError`, here and on the ranks that wait for this one."""
    global _world
    with _lock:
        world, _world = _world, None
        stop_timeline()
        if world is not None:
            world.close()


def current() -> World:
    """Give the initialised job, or raise `ValueError`."""
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def is_initialized() -> bool:
    """Tell whether `init` was called, and `shutdown` not since."""
    return _world is not None


def rank() -> int:
    """Give this process's rank in the job."""
    return current().rank


def size() -> int:
    """Give the number of ranks."""
    return current().size


def local_rank() -> int:
    """Give this process's rank on its machine: the number of its GPU."""
    return current().local_rank


def local_size() -> int:
    """Give the number of ranks on this machine."""
    return current().local_size


def cross_rank() -> int:
    """Give this machine's number among those that have a rank of this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Give the number of machines that have a rank of this local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Tell whether all machines have the same number of ranks."""
    return current().homogeneous


# ---- Traces.

_timeline: Timeline | None = None


def start_timeline(file_path, mark_cycles: bool = False) -> None:
    """Record from now on what the ranks do, as Chrome traces; `collectives.timeline`. Call it on all ranks.

    Each rank writes a file of its own at the end, ``name.rank0.json`` and so on; where torch.distributed is
    initialised, rank 0 writes one of all. ``mark_cycles``: taken, and changes nothing.
    """
    global _timeline
    current()
    if _timeline is not None:
        raise ValueError("a timeline is being recorded: hvd.stop_timeline() ends it")
    _timeline = timeline(file_path)


def stop_timeline() -> None:
    """End the recording and write the file. All ranks call it."""
    global _timeline
    recorded, _timeline = _timeline, None
    if recorded is not None:
        recorded.stop()


# ---- What there is.


def mpi_threads_supported() -> bool:
    """Tell that programs may use mpi4py beside this: nothing here calls MPI."""
    current()
    return True


def _absent() -> bool:
    """Tell that nothing of it is in here: neither built in nor used."""
    return False


mpi_built = mpi_enabled = ddl_built = ccl_built = mlsl_built = rocm_built = _absent


def gloo_built() -> bool:
    """Tell that the job needs no MPI: our engine, and torch's Gloo between machines, do what Horovod's Gloo does."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Give NCCL's version as a number, such as 22304; 0 where it can't be used."""
    info = next((each for each in engines() if each.name == "nccl"), None)
    if info is None or not info.available or info.version is None:
        return 0
    version = info.version
    return version if isinstance(version, int) else int("".join(f"{int(part):02d}" for part in str(version).split(".")))


def cuda_built() -> bool:
    """Tell whether this torch has CUDA."""
    return torch.version.cuda is not None


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
