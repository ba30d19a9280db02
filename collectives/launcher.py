"""Launcher variables: the rank, size and local rank of this process as its launcher has set them.

They are read in this order: torchrun's, RANK and WORLD_SIZE set by anything else, Open MPI's,
MPICH's (also Intel MPI's), srun's. With none of them the process is alone. Nothing here contacts
another process. Where variables are missing, are no numbers, or contradict each other,
``InvalidArgument`` names the variable and its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import InvalidArgument

__all__ = ["Identity", "detect_launcher", "get_start_time", "read_stat"]

# Slurm numbers its special steps (batch script, interactive, extern, pending) from the top of the
# 32-bit range.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
# Ports for srun over several nodes without MASTER_PORT: below Linux's ephemeral range
# (32768..60999), and without torch's own default, 29500.
_SLURM_FIRST_PORT, _SLURM_PORTS = 12000, 16000
# How many wrappers (sh -c, timeout, numactl) may be between a rank and its launcher in the process
# tree.
_MAX_WRAPPERS = 16


@dataclass(frozen=True)
class Identity:
    """The numbers of this process that a launcher has set.

    ``rank`` of ``size``; ``local_rank`` of ``local_size`` on this node (``None``: the launcher
    doesn't set it, and the rendezvous finds it). ``launcher``: "torchrun", "openmpi", "mpich" (also
    Intel MPI), "slurm", "env" (RANK and WORLD_SIZE) or "alone". ``master_addr`` and
    ``master_port``: the address of the rendezvous, ``None`` where none is set or needed.
    ``job_key``: a name that all ranks of this job on this node share and no other job does.
    ``restart``: how often the launcher has started this job again. ``agent_store``: torchrun's
    agent already serves a torch ``TCPStore`` at that address, so rank 0 doesn't.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None
    job_key: bytes | None = None
    restart: int = 0
    agent_store: bool = False

    @property
    def is_single_node(self) -> bool:
        """Whether all ranks are known to be on this node."""
        return self.local_size == self.size


def detect_launcher(environ: Mapping[str, str] | None = None) -> Identity:
    """Return this process's identity from its environment.

    ``environ``: a mapping of strings, ``os.environ`` if not given; an empty value counts as unset.
    Doesn't block. Raises ``InvalidArgument`` for a variable that is missing where its companion is
    set, is no number, is out of range, or contradicts another one.
    """
    env = os.environ if environ is None else environ
    own = _read_rank_variables(env)
    if own is not None and own.launcher == "torchrun":
        return _add_master(env, own)
    other = _read_mpi(env) or _read_slurm(env)
    if own is None:
        found = other
    elif other is None or _overrides(env, own, other):
        found = own
    else:
        found = other  # the numbers are the same, and it has this process's local rank, too
        if other.local_rank is None and own.local_rank is not None:
            found = replace(other, local_rank=own.local_rank, local_size=own.local_size)
    if found is None:
        key = _make_job_key(env, "alone", str(os.getpid()), str(get_start_time(os.getpid())))
        return Identity(0, 1, 0, 1, "alone", job_key=key)
    return _add_master(env, found)


# ---- Reading variables.


def _get_first(env: Mapping[str, str], *names: str) -> tuple[str, str] | tuple[None, None]:
    """Return the first of these variables that has a value, and its value."""
    for name in names:
        value = env.get(name, "").strip()
        if value:
            return name, value
    return None, None


def _get_number(env: Mapping[str, str], *names: str) -> int | None:
    name, value = _get_first(env, *names)
    if name is None:
        return None
    if not re.fullmatch(r"[0-9]+", value):
        raise InvalidArgument(f"{name}={value!r} is not a number from 0 up")
    return int(value)


class _Names(NamedTuple):
    """A launcher's variables, those that count first."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_NAMES = {
    "env": _Names(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "openmpi": _Names(
        ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "mpich": _Names(
        ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    ),
    "slurm": _Names(
        ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",), ()
    ),
}  # fmt: skip


def _get_numbers(env: Mapping[str, str], launcher: str) -> tuple[int, int, int | None, int | None] | None:
    """Return a launcher's (rank, size, local rank, ranks on this node); None for what isn't set.

    None where neither rank nor size is set. Raises where one is missing or numbers don't fit
    together.
    """
    names = _NAMES[launcher]
    rank_name, size_name, local_rank_name, local_size_name = (_get_first(env, *each)[0] for each in names)
    rank, size = _get_number(env, *names.rank), _get_number(env, *names.size)
    if rank is None and size is None:
        return None
    if rank is None:
        raise InvalidArgument(f"{size_name}={size} is set, but {names.rank[0]} isn't")
    if size is None:
        raise InvalidArgument(f"{rank_name}={rank} is set, but {names.size[0]} isn't")
    if size == 0:
        raise InvalidArgument(f"{size_name}=0: a job has at least one rank")
    if rank >= size:
        raise InvalidArgument(f"{rank_name}={rank} is not below {size_name}={size}")
    local_rank, local_size = _get_number(env, *names.local_rank), _get_number(env, *names.local_size)
    if local_size is not None and not 0 < local_size <= size:
        raise InvalidArgument(f"{local_size_name}={local_size} is not between 1 and the number of ranks, {size}")
    limit = size if local_size is None else local_size
    if local_rank is not None and local_rank >= limit:
        raise InvalidArgument(
            f"{local_rank_name}={local_rank} is not below the number of ranks on this machine, {limit}"
        )
    return rank, size, local_rank, local_size


# ---- One function for each launcher, which returns None where its variables are not set.


def _read_rank_variables(env: Mapping[str, str]) -> Identity | None:
    """Read RANK and WORLD_SIZE: torchrun's, or set by hand or another launcher."""
    numbers = _get_numbers(env, "env")
    if numbers is None:
        return None
    rank, size, local_rank, local_size = numbers
    torchrun = _get_first(env, "TORCHELASTIC_RUN_ID", "GROUP_RANK")[0] is not None
    if not torchrun and local_size is None and local_rank in (None, rank) and _is_rank_zero_local(env):
        local_rank, local_size = rank, size
    return Identity(
        rank,
        size,
        local_rank,
        local_size,
        "torchrun" if torchrun else "env",
        job_key=_make_parent_key(env, "RANK", "WORLD_SIZE"),
        restart=_get_number(env, "TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",  # as torch compares it
    )


def _is_rank_zero_local(env: Mapping[str, str]) -> bool:
    """Return whether rank 0 is on this node, by MASTER_ADDR.

    Without an address all ranks have to be.
    """
    _, address = _get_first(env, "MASTER_ADDR")
    return address is None or address == "localhost" or address == "::1" or address.startswith("127.")


def _read_mpi(env: Mapping[str, str]) -> Identity | None:
    openmpi, mpich = _read_open_mpi(env), _read_mpich(env)
    if openmpi is None or mpich is None:
        return openmpi or mpich
    if (openmpi.rank, openmpi.size) == (mpich.rank, mpich.size) or mpich.size == 1:
        return openmpi
    if openmpi.size == 1:  # one launcher has started the other
        return mpich
    raise InvalidArgument(
        f"OMPI_COMM_WORLD_RANK={openmpi.rank} of OMPI_COMM_WORLD_SIZE={openmpi.size} contradicts PMI_RANK={mpich.rank} "
        f"of PMI_SIZE={mpich.size}: two MPI launchers have started this process; unset one's variables"
    )


def _read_open_mpi(env: Mapping[str, str]) -> Identity | None:
    numbers = _get_numbers(env, "openmpi")
    if numbers is None:
        return None
    names = [value for value in (env.get("PMIX_NAMESPACE"), env.get("OMPI_MCA_orte_hnp_uri")) if value]
    if names:
        key = _make_job_key(env, "openmpi", *names)
    else:
        key = _make_parent_key(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return Identity(*numbers, "openmpi", job_key=key)


def _read_mpich(env: Mapping[str, str]) -> Identity | None:
    numbers = _get_numbers(env, "mpich")
    if numbers is None:
        return None
    # Hydra sets no job id, but one proxy process starts all ranks of a node.
    return Identity(*numbers, "mpich", job_key=_make_parent_key(env, "PMI_RANK", "PMI_SIZE"))


def _read_slurm(env: Mapping[str, str]) -> Identity | None:
    """Read a task of srun.

    SLURM_NTASKS alone isn't enough: sbatch and salloc set it for programs that run once.
    """
    if _get_first(env, "SLURM_PROCID")[0] is None:
        return None
    step = _get_number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    step_size = _get_number(env, "SLURM_STEP_NUM_TASKS")
    if step is not None and step >= _SLURM_SPECIAL_STEPS:
        return None
    if step is None and step_size is None and env.get("ENVIRONMENT") == "BATCH":
        return None  # the batch script itself: it has SLURM_PROCID=0, but srun has not started it
    rank, size, local_rank, _ = _get_numbers(env, "slurm")
    hosts = _get_first(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")[1]
    local_size = _read_slurm_local_size(env, size, rank, local_rank, hosts)
    if local_rank is not None and local_size is not None and local_rank >= local_size:
        raise InvalidArgument(f"SLURM_LOCALID={local_rank} is not below the tasks on this machine, {local_size}")
    job = _get_first(env, "SLURM_JOB_ID", "SLURM_JOBID")[1]
    if job is not None:
        key = _make_job_key(env, "slurm", job, str(step))
    else:
        key = _make_parent_key(env, "SLURM_PROCID", "SLURM_NTASKS")
    master_addr = master_port = None
    if local_size != size and hosts is not None:
        master_addr = _parse_first_host(hosts)
        digits = int(re.sub(r"[^0-9]", "", job or "") or 0)
        master_port = _SLURM_FIRST_PORT + (digits * 31 + (step or 0)) % _SLURM_PORTS
    restart = _get_number(env, "SLURM_RESTART_COUNT") or 0
    return Identity(rank, size, local_rank, local_size, "slurm", master_addr, master_port, key, restart)


def _read_slurm_local_size(
    env: Mapping[str, str], size: int, rank: int, local_rank: int | None, hosts: str | None
) -> int | None:
    nodes = _get_number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if nodes == 1 or size == 1 or (nodes is None and hosts is not None and re.fullmatch(r"[^\[\],]+", hosts)):
        return size
    name, spread = _get_first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = _get_number(env, "SLURM_NODEID")
    if spread is not None and node is not None:
        counts: list[int] = []
        for part in spread.split(","):  # "2(x3),1": three nodes with two tasks, then one with one
            match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
            if match is None:
                raise InvalidArgument(f"{name}={spread!r} is not a list of task counts such as '2(x3),1'")
            counts += [int(match[1])] * min(int(match[2] or 1), size)
        if node < len(counts) and sum(counts) == size:  # else it is the job's spread, not this step's
            return counts[node]
    if nodes is None and hosts is None and local_rank in (None, rank):
        return size  # no variable shows other nodes
    return None


def _parse_first_host(hosts: str) -> str:
    """Return the first name of Slurm's compressed list of nodes.

    It is "rack1node003" for "rack1node[003-006,9],b".
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts)
    if first is None:
        raise InvalidArgument(f"SLURM_STEP_NODELIST={hosts!r} is not a list of machines")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


# ---- Contradictions.


def _overrides(env: Mapping[str, str], own: Identity, other: Identity) -> bool:
    """Return whether RANK and WORLD_SIZE count.

    Otherwise the numbers of the MPI or Slurm launcher around this process do.
    """
    if (own.rank, own.size) == (other.rank, other.size):
        return False
    # A launcher has started one process (or one for each node), which has then started and numbered
    # the ranks.
    if other.size == 1 or _get_first(env, "LOCAL_RANK")[0] is not None:
        return True
    rank_name, size_name = (_get_first(env, *names)[0] for names in _NAMES[other.launcher][:2])
    raise InvalidArgument(
        f"RANK={own.rank} of WORLD_SIZE={own.size} contradicts {rank_name}={other.rank} of {size_name}={other.size}: "
        "unset RANK and WORLD_SIZE to use the launcher's numbers, or set LOCAL_RANK too to use your own"
    )


def _add_master(env: Mapping[str, str], found: Identity) -> Identity:
    """Add MASTER_ADDR and MASTER_PORT. A world of one needs no rendezvous and ignores them."""
    if found.size == 1:
        return found
    address, port = _get_first(env, "MASTER_ADDR")[1], _get_number(env, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise InvalidArgument(f"MASTER_PORT={port} is not a port between 1 and 65535")
    if address is not None and port is None:
        if found.master_port is None:
            raise InvalidArgument(f"MASTER_ADDR={address} is set, but MASTER_PORT isn't")
        port = found.master_port
    if port is None:
        return found
    if address is None:
        if found.is_single_node:
            address = "127.0.0.1"
        elif found.master_addr is not None:
            address = found.master_addr
        else:
            raise InvalidArgument(
                f"MASTER_PORT={port} is set, but MASTER_ADDR isn't, and the ranks are on several machines "
                f"({found.local_size} of {found.size} on this one): set it to a name or address of rank 0's machine"
            )
    return replace(found, master_addr=address, master_port=port)


# ---- A name for the job.


def _make_job_key(env: Mapping[str, str], *parts: str) -> bytes:
    """Make the job's key from what names the job, or from COLLECTIVES_JOB_ID if set.

    Each user has keys of its own.
    """
    _, given = _get_first(env, "COLLECTIVES_JOB_ID")
    if given is not None:
        parts = ("given", given)
    return "\0".join(("collectives", str(os.getuid()), *parts)).encode("utf-8", "surrogateescape")


def _make_parent_key(env: Mapping[str, str], *names: str) -> bytes:
    """Make the job's key from the process that has started the ranks.

    It is the nearest ancestor without this rank's numbers in its environment. Mostly that is the
    parent; but a wrapper (``sh -c``, ``timeout``, a script) between the launcher and the rank has
    the rank's own variables. ``names``: the variables with rank and size.
    """
    pid = os.getppid()
    mine = {f"{name}={env[name]}".encode("utf-8", "surrogateescape") for name in names if name in env}
    for _ in range(_MAX_WRAPPERS):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                wrapper = mine <= set(file.read().split(b"\0"))
            name, fields = read_stat(pid)
        except OSError:  # it has ended, is another user's, or is outside this container: no wrapper of ours
            break
        above = int(fields[1])
        if not wrapper or name == b"hydra_pmi_proxy" or above == 0:
            break
        pid = above
    return _make_job_key(env, "parent", str(pid), str(get_start_time(pid)))


def get_start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if unknown.

    It is unknown for a parent outside of the container.
    """
    try:
        return int(read_stat(pid)[1][19])
    except OSError:
        return 0


def read_stat(pid: int) -> tuple[bytes, list[bytes]]:
    """Return a process's name and the fields behind it in /proc/PID/stat: state, parent, ..."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        name, _, fields = file.read().partition(b"(")[2].rpartition(b")")
    return name, fields.split()
