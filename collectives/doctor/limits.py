"""Limits of this process by setrlimit (``ulimit``), and by its cgroup for processes."""

from __future__ import annotations

import glob
import resource

from .cgroups import process_limit
from .finding import ERROR, OK, WARNING, Finding

__all__ = ["check_limits"]

# By name: the resource, ulimit's letter, and ulimit's unit in bytes.
_LIMITS = {
    "nofile": (resource.RLIMIT_NOFILE, "n", 1),
    "nproc": (resource.RLIMIT_NPROC, "u", 1),
    "as": (resource.RLIMIT_AS, "v", 1024),
    "memlock": (resource.RLIMIT_MEMLOCK, "l", 1024),
    "fsize": (resource.RLIMIT_FSIZE, "f", 1024),
    "core": (resource.RLIMIT_CORE, "c", 1024),
}
_FILES = 1024  # open files below which programs with DataLoader workers and checkpoints run out
_FEW_FILES = 64  # what Python with torch and an engine has open, and little more
_PROCESSES = 512
_ADDRESSES = 64 << 30  # bytes; torch and CUDA map far more than they use
_GIB = 1 << 30


def _shown(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _raise(name: str, wanted: int | None) -> str:
    """Return the command that raises a limit as far as the hard one allows; None: to unlimited."""
    number, letter, unit = _LIMITS[name]
    hard = resource.getrlimit(number)[1]
    unlimited = hard == resource.RLIM_INFINITY
    if unlimited or (wanted is not None and hard >= wanted):
        return f"ulimit -S{letter} {'unlimited' if wanted is None else wanted // unit}"
    flag = "unlimited" if wanted is None else wanted
    return f"sudo prlimit --pid $$ --{name}={flag}:{flag}   # the hard limit of this shell"


def _is_below(value: int, wanted: int) -> bool:
    return value != resource.RLIM_INFINITY and value < wanted


def check_limits(root: str = "/") -> list[Finding]:
    """Check the limits that ranks run into. ``root``: of the cgroups' files."""
    soft = {name: resource.getrlimit(entry[0])[0] for name, entry in _LIMITS.items()}
    hard = {name: resource.getrlimit(entry[0])[1] for name, entry in _LIMITS.items()}
    pids = process_limit(root)
    values = {name: {"soft": _shown(soft[name]), "hard": _shown(hard[name])} for name in _LIMITS}
    values["pids"] = {"limit": pids.limit, "used": pids.used, "file": pids.path} if pids else None
    text = ", ".join(f"{name} {_shown(value)}" for name, value in soft.items())
    text += f", pids {pids.used:g} of {pids.limit:g}" if pids else ""
    found = [Finding("limits", OK, text, values=values)]

    def add(name: str, status: str, words: str, remedy: str) -> None:
        found.append(Finding(f"limits.{name}", status, words, remedy))

    if _is_below(soft["nofile"], _FILES):
        few = soft["nofile"] < _FEW_FILES
        add("nofile", ERROR if few else WARNING,
            f"{soft['nofile']} open files: each rank keeps descriptors of every peer on its node, of its libraries and "
            "of its data", _raise("nofile", 65536))  # fmt: skip
    if _is_below(soft["nproc"], _PROCESSES):
        add("nproc", WARNING, f"{soft['nproc']} processes and threads of this user: each rank starts dozens",
            _raise("nproc", 65536))  # fmt: skip
    if _is_below(soft["as"], _ADDRESSES):
        add("as", WARNING, f"{soft['as'] / _GIB:.1f} GiB of addresses: torch and shared memory map more than they use",
            _raise("as", None))  # fmt: skip
    if _is_below(soft["fsize"], 1 << 40):
        add("fsize", ERROR if soft["fsize"] < 64 << 20 else WARNING,
            f"files of {soft['fsize']} bytes at most, which counts for the engine's shared memory, too",
            _raise("fsize", None))  # fmt: skip
    if glob.glob("/sys/class/infiniband/*") and _is_below(soft["memlock"], _GIB):
        add("memlock", WARNING, f"{soft['memlock']} bytes of locked memory: NCCL registers more with InfiniBand",
            _raise("memlock", None))  # fmt: skip
    if pids and pids.limit - pids.used < _PROCESSES:
        add("pids", WARNING, f"{pids.path} leaves {pids.limit - pids.used:g} more processes and threads",
            "docker run --pids-limit=-1 ...")  # fmt: skip
    return found
