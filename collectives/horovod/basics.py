"""init, shutdown, rank, size: the job of a Horovod program, and its process sets."""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

from ..comm.agree import verify_same
from ..comm.communicator import Communicator
from ..comm.engine import engines
from ..comm.malloc import keep_freed_memory
from ..comm.multinode.topology import group_ranks_by_node
from ..errors import InvalidArgument, Mismatch
from ..recorder import recording
from ..rendezvous import world as job
from ..rendezvous.control import dup_on_host
from ..rendezvous.peers import PeerInfo
from ..rendezvous.process_groups import get_group_timeout
from .controller import Controller
from .process_sets import ProcessSet, global_process_set
from .settings import Settings, log_hierarchical_variables, read_number, read_settings
from .stall_inspector import StallInspector

__all__ = [
    "World",
    "cross_rank",
    "cross_size",
    "current",
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

_INIT_SECONDS = 300.0  # between the first and the last rank's init, without a process group of torch's
_world: World | None = None
_lock = threading.RLock()


class World:
    """An initialised job: its communicator, and its process sets with their controllers.

    ``comm``: the communicator. ``peers``: the host and node of each of its ranks. ``owns``: whether
    `close` closes the communicator. ``seconds``: time limit for the ranks to construct it; None:
    the communicator's own limit.
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
        nodes = group_ranks_by_node(peer.node for peer in peers)
        here = next(ranks for ranks in nodes if self.rank in ranks)
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        with_local_rank = [ranks for ranks in nodes if len(ranks) > self.local_rank]
        self.cross_rank, self.cross_size = with_local_rank.index(here), len(with_local_rank)
        self.homogeneous = len(set(map(len, nodes))) == 1
        self.process_sets: dict[int, ProcessSet] = {}
        self._controllers: dict[int, Controller] = {}
        self._stall_inspector = StallInspector(settings, self.rank)
        # Process sets are split off this communicator, and their ranks compared by it. Nothing else uses it.
        self.admin = dup_on_host(comm, seconds)
        self._next_id = 0

    # ---- Process sets.

    def add_process_set(self, process_set: ProcessSet) -> None:
        """Add a process set to this job; a collective call of all its ranks."""
        ranks = self._read_ranks(process_set)
        known = next((other for other in self.process_sets.values() if other.ranks == ranks), None)
        self._verify_same_ranks(ranks)
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
            control.timeout = None  # a rank may submit late; its death is detected without a limit
            self._controllers[number] = Controller(control, comms, ranks, self.settings)
            self._stall_inspector.add(self._controllers[number])
        self.process_sets[number] = process_set
        process_set.bind(number, ranks, self.rank)

    def remove_process_set(self, process_set: ProcessSet) -> None:
        """Remove a process set; a collective call of all ranks of the job."""
        number = process_set.process_set_id
        self._verify_same_ranks(process_set.ranks)
        controller = self._controllers.pop(number, None)
        if controller is not None:
            controller.close()
        del self.process_sets[number]
        process_set.unbind()

    def controller(self, process_set: ProcessSet) -> Controller:
        """Return the controller of a process set; `ValueError` where this rank isn't in it."""
        number = getattr(process_set, "process_set_id", None)
        controller = self._controllers.get(number)
        if controller is None or self.process_sets.get(number) is not process_set:
            self.check_process_set(process_set)
            raise ValueError(f"rank {self.rank} isn't in process set {number}, which has ranks {process_set.ranks}")
        return controller

    def check_process_set(self, process_set: ProcessSet) -> None:
        """Raise `ValueError` for a process set that wasn't added to this job."""
        number = getattr(process_set, "process_set_id", None)
        if number is None or self.process_sets.get(number) is not process_set:
            raise ValueError(f"{process_set!r} isn't a process set of this job: hvd.add_process_set() makes it one")

    def _read_ranks(self, process_set: ProcessSet) -> list[int]:
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set!r} was added before")
        ranks = sorted(process_set.requested_ranks if process_set.requested_ranks is not None else range(self.size))
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < self.size:
            raise ValueError(f"a process set is of different ranks between 0 and {self.size - 1}, not {ranks}")
        return ranks

    def _verify_same_ranks(self, ranks: list[int]) -> None:
        """Raise `ValueError` on all ranks where the ranks name different process sets."""
        try:
            verify_same(
                self.admin, "the ranks name different process sets", ranks,
                "all ranks of the job must call this, in the same order",
            )  # fmt: skip
        except Mismatch as error:
            raise ValueError(error.message) from None

    # ---- The end.

    def close(self) -> None:
        """Close all controllers and communicators; operations under way fail."""
        self._stall_inspector.stop()
        for controller in self._controllers.values():
            controller.close()
        for process_set in self.process_sets.values():
            process_set.unbind()
        for comm in (self.admin, *((self.comm,) if self.owns else ())):
            if not comm.closed:
                comm.abort() if comm._queue.busy() else comm.close()

    def abort(self, error: BaseException) -> None:
        """Abort all controllers with an error, and all communicators but ``comm``."""
        self._stall_inspector.stop()
        for controller in self._controllers.values():
            controller.abort(error)
        for process_set in self.process_sets.values():
            process_set.unbind()
        self.admin.abort()


# ---- Functions that programs call.


def init(comm=None, process_sets=None) -> None:
    """Initialise the job; call it before all other functions. Another call does nothing.

    Blocks until all ranks call it. The ranks are found as `collectives.init` finds them: torchrun,
    mpirun, srun, or a single process. HOROVOD_GLOO_TIMEOUT_SECONDS is what `timeout` is of
    `collectives.init`: the limit of the opening, and of an operation once all ranks have submitted
    it. Where it isn't set, that is the timeout of torch.distributed's default group; without one,
    300 s for the opening and 1,800 s for an operation. Raises as `collectives.init` does.

    Args:
        comm: A list of the job's ranks with which this rank works (all ranks call `init`, each with
            the list that it is in), or an mpi4py communicator. None: all ranks.
        process_sets: `ProcessSet` objects to add, or "dynamic", which changes nothing: process sets
            can always be added.
    """
    global _world
    with _lock:
        if _world is not None:
            return
        settings = read_settings()
        owns = job._world is None or job._world.closed
        name, inherited = "HOROVOD_GLOO_TIMEOUT_SECONDS", _group_timeout()
        opening = read_number(name, _INIT_SECONDS if inherited is None else inherited)
        named = inherited is not None or os.environ.get(name, "").strip()
        base = job.init_with_limits(opening, opening if named else job.OPERATION_S)
        if base.rank == 0:
            log_hierarchical_variables()
        peers = list(base.peers) if base.peers else None
        if peers is None:
            raise InvalidArgument("the communicator that is open doesn't tell where its ranks are", op="hvd.init")
        if comm is not None:
            ranks = _ranks_of(comm, base)
            base, owns = base.split(min(ranks), ranks.index(base.rank)), True
            peers = [peers[r] for r in ranks]
        keep_freed_memory()  # operations return new tensors, whose page faults would cost more than the sums
        activate(World(base, peers, owns=owns, settings=settings, seconds=opening), process_sets)


def _group_timeout() -> float | None:
    """Return the timeout of torch.distributed's default group, None where there is none."""
    if dist.is_available() and dist.is_initialized():
        return get_group_timeout(dist.group.WORLD, torch.device("cpu"))
    return None


def activate(world: World, process_sets=None) -> None:
    """Make a world the current one, and add its process sets."""
    global _world
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets must be a list of ProcessSet or 'dynamic', not {process_sets!r}")
        process_sets = None
    global_process_set.unbind()
    try:
        world.add_process_set(global_process_set)
        for process_set in process_sets or ():
            world.add_process_set(process_set)
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
    """End the job.

    Operations under way fail with `HorovodInternalError`, here and on ranks that wait for this one.
    """
    global _world
    with _lock:
        world, _world = _world, None
        stop_timeline()
        if world is not None:
            world.close()


def current() -> World:
    """Return the initialised job, or raise `ValueError`."""
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` not since."""
    return _world is not None


def rank() -> int:
    """Return this process's rank in the job."""
    return current().rank


def size() -> int:
    """Return the number of ranks."""
    return current().size


def local_rank() -> int:
    """Return this process's rank on its node: the index of its GPU."""
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current().local_size


def cross_rank() -> int:
    """Return this node's rank among the nodes that have this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Return the number of nodes that have this local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return current().homogeneous


# ---- Timelines.

_timeline = None  # the `Timeline` that start_timeline started


def start_timeline(file_path, mark_cycles: bool = False) -> None:
    """Start to record the ranks' operations as a Chrome trace, with `collectives.timeline`.

    Call it on all ranks. Each rank writes a file of its own at the end, ``name.rank0.json`` and so
    on; where torch.distributed is initialised, rank 0 writes it for all ranks.

    Args:
        file_path: The file of the trace.
        mark_cycles: Accepted, without effect.
    """
    global _timeline
    current()
    if _timeline is not None:
        raise ValueError("a timeline is being recorded: hvd.stop_timeline() ends it")
    _timeline = recording.start(file_path)


def stop_timeline() -> None:
    """End the recording and write the file. All ranks call it."""
    global _timeline
    recorded, _timeline = _timeline, None
    if recorded is not None:
        recorded.stop()


# ---- Queries of the build.


def mpi_threads_supported() -> bool:
    """Return True: programs may use mpi4py, because nothing here calls MPI."""
    current()
    return True


def _not_built() -> bool:
    """Return False: it is neither built in nor used."""
    return False


mpi_built = mpi_enabled = ddl_built = ccl_built = mlsl_built = rocm_built = _not_built


def gloo_built() -> bool:
    """Return True: as with Horovod's Gloo the job needs no MPI, but our engine, and torch's Gloo
    between nodes.
    """
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22304; 0 where it can't be used."""
    info = next((each for each in engines() if each.name == "nccl"), None)
    if info is None or not info.available or info.version is None:
        return 0
    return int("".join(f"{int(part):02d}" for part in info.version.split(".")))


def cuda_built() -> bool:
    """Return whether this torch has CUDA."""
    return torch.version.cuda is not None


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
