"""Memory: what is free for this process, by the node and by its cgroups, and what the kernel does with it."""

from __future__ import annotations

import os
import re

from .cgroups import memory_limit, oom_kills, read_text
from .finding import ERROR, OK, WARNING, Finding

__all__ = ["check_memory"]

_MIB, _GIB = 1 << 20, 1 << 30
_TOO_LITTLE = 256 * _MIB  # free for the ranks; two Python processes with torch take about this
_LITTLE = _GIB
_SMALL_SHM = 64 * _MIB  # of a container whose size was not set


def _meminfo(root: str) -> dict[str, int]:
    """Return /proc/meminfo's entries in bytes."""
    text = read_text(os.path.join(root, "proc/meminfo")) or ""
    return {name: int(value) * 1024 for name, value in re.findall(r"^([\w()]+):\s+(\d+) kB", text, re.MULTILINE)}


def _chosen(path: str) -> str | None:
    """Return the entry in brackets of a file such as "always [madvise] never"."""
    chosen = re.search(r"\[(\w+)\]", read_text(path) or "")
    return chosen[1] if chosen else None


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


def _shm() -> tuple[int, int] | None:
    try:
        system = os.statvfs("/dev/shm")
    except OSError:
        return None
    return system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize


def check_memory(root: str = "/") -> list[Finding]:
    """Check the memory that is free. ``root`` stands for ``/`` of /proc and the cgroups."""
    info, limit, shm = _meminfo(root), memory_limit(root), _shm()
    available = info.get("MemAvailable")
    free = min(([] if available is None else [available]) + ([limit.limit - limit.used] if limit else []), default=None)
    kills = oom_kills(root)
    overcommit = read_text(os.path.join(root, "proc/sys/vm/overcommit_memory"))
    huge = "/sys/kernel/mm/transparent_hugepage/"
    values = {
        "total": info.get("MemTotal"), "available": available, "swap": info.get("SwapTotal"),
        "limit": limit.limit if limit else None, "used_of_limit": limit.used if limit else None,
        "limit_file": limit.path if limit else None, "free": free, "oom_kills": kills,
        "overcommit_memory": overcommit, "transparent_hugepages": _chosen(huge + "enabled"),
        "shmem_hugepages": _chosen(huge + "shmem_enabled"),
        "dev_shm": shm[0] if shm else None, "dev_shm_free": shm[1] if shm else None,
    }  # fmt: skip
    text = "/proc/meminfo can't be read" if available is None else f"{_size(free)} free of {_size(info['MemTotal'])}"
    text += ", " + (
        f"cgroup limit {_size(limit.limit)} with {_size(limit.used)} used" if limit else "no cgroup limit"
    )
    text += f", /dev/shm {_size(shm[0])} with {_size(shm[1])} free" if shm else ", no /dev/shm"
    text += f", huge pages {values['transparent_hugepages']}, for shared memory {values['shmem_hugepages']}"
    found = [Finding("memory", OK, text, values=values)]
    if free is not None and free < _LITTLE:
        by_group = limit is not None and (available is None or free < available)
        found.append(
            Finding(
                "memory.free", ERROR if free < _TOO_LITTLE else WARNING,
                f"{_size(max(free, 0))} are free for the ranks"
                + (f" below the limit of {limit.path}" if by_group else ""),
                "docker run --memory=8g ...   # or resources.limits.memory of the pod, or srun --mem"
                if by_group
                else "ps aux --sort=-rss | head   # see what uses it, and end it",
            )
        )  # fmt: skip
    if kills:
        found.append(
            Finding(
                "memory.oom", WARNING,
                f"{kills} process{'es' * (kills != 1)} of this cgroup had to be killed for want of memory: a rank that "
                "ends with no output may be one",
                "dmesg -T | grep -i 'killed process'",
            )
        )  # fmt: skip
    if overcommit == "2" and info.get("CommitLimit", 0) - info.get("Committed_AS", 0) < 4 * _LITTLE:
        found.append(
            Finding(
                "memory.overcommit", WARNING,
                "vm.overcommit_memory is 2 and nearly all that may be promised is: allocations fail with memory free",
                "sudo sysctl vm.overcommit_memory=0",
            )
        )  # fmt: skip
    if shm and shm[0] <= _SMALL_SHM:
        found.append(
            Finding(
                "memory.dev_shm", WARNING,
                f"/dev/shm has {_size(shm[0])}: the host engine doesn't use it, but NCCL and workers of torch's "
                "DataLoader do, and die of SIGBUS where it is full",
                "sudo mount -o remount,size=8G /dev/shm   # of a container: docker run --shm-size=8g",
            )
        )  # fmt: skip
    return found
