"""Limits of this process: cores, memory, control groups, ulimits, and what the engine needs of Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
from pathlib import Path

from .findings import Section

__all__ = ["cgroup_limits", "examine_cores", "examine_memory", "show_bytes"]

_GIB = 1 << 30
_LEAST_FREE = 1 << 30  # bytes below which the engine's shared memory is likely to be refused
_FILES_PER_RANK = 64  # descriptors that a rank with some peers, a store and a framework needs at least
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number about so large for "none"


def show_bytes(count: float | None) -> str:
    """Return a number of bytes as text."""
    if count is None:
        return "no limit"
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.0f} MiB"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) < _NO_LIMIT else None


# ---- Control groups.


def _own_groups(root: Path) -> list[tuple[Path, bool]]:
    """Return the folders of this process's control groups and of all above them, and whether they are
    of version 2.
    """
    mounts = []  # (mount point, root of the mount, controllers or None for version 2)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if kind and kind[0] in ("cgroup", "cgroup2"):
            mounts.append((words[4], words[3], None if kind[0] == "cgroup2" else set(kind[2].split(","))))
    found = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for point, inside, kinds in mounts:
            if (kinds is None) != (not controllers) or (kinds and not kinds & set(controllers.split(","))):
                continue
            inner = os.path.relpath(path, inside) if path.startswith(inside) else path.lstrip("/")
            top = root / point.lstrip("/")
            folder = Path(os.path.normpath(top / inner))
            while folder.is_relative_to(top):
                found.append((folder, kinds is None))
                folder = folder.parent
    return found


def cgroup_limits(root: str = "/") -> dict:
    """Return ``memory``, ``memory_used`` (bytes) and ``cpus`` that the control groups of this process
    allow, None for no limit, and ``group``, the one that has the least memory left.

    `root`: where ``/proc`` and ``/sys`` are. Every group from this process's own up counts, of version 1
    and 2.
    """
    memory = used = cpus = group = None
    for folder, second in _own_groups(Path(root)):
        names = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, current = (_number(_read(folder / name)) for name in names)
        high = _number(_read(folder / "memory.high"))
        limit = min((each for each in (limit, high) if each is not None), default=None)
        if limit is not None and (memory is None or limit - (current or 0) < memory - (used or 0)):
            memory, used, group = limit, current or 0, str(folder)
        if second:
            quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit():
            cpus = min(int(quota) / int(period), cpus or float("inf"))
    return {"memory": memory, "memory_used": used, "cpus": cpus, "group": group}


# ---- Cores.


def examine_cores(section: Section, root: str = "/") -> None:
    """Fill in the processors that this process may use, and how busy they are."""
    values, allowed = section.values, len(os.sched_getaffinity(0))
    info = (_read(Path(root, "proc/cpuinfo")) or "").splitlines()
    found = dict(line.split(":", 1) for line in reversed(info) if ":" in line)
    cells = {key.strip(): value.strip() for key, value in found.items()}
    flags = cells.get("flags", "").split()
    values["processor"] = cells.get("model name") or platform.machine()
    values["cores"] = f"{allowed} of {os.cpu_count()} may be used"
    sets = [name for name, flag in (("avx2", "avx2"), ("avx512", "avx512bw")) if flag in flags]
    values["instruction sets"] = ", ".join(["baseline", *sets])
    nodes = list(Path(root, "sys/devices/system/node").glob("node[0-9]*"))
    values["memory nodes"] = len(nodes) or 1
    limit = cgroup_limits(root)["cpus"]
    if limit is not None:
        values["cpu quota"] = f"{limit:g} cores"
    load = os.getloadavg()[0]
    values["load average"] = f"{load:.1f}"
    usable = min(allowed, limit or allowed)
    if usable < 2:
        section.warn(
            f"this process may use {usable:g} core: ranks take turns on it",
            "taskset -c 0,1 python ..., or give the container or job step more cores",
        )
    if load > usable + 1:
        section.warn(f"other programs keep the cores busy (load {load:.1f} on {usable:g})", "top, and end them")
    threads = os.environ.get("OMP_NUM_THREADS")
    values["OMP_NUM_THREADS"] = threads or "not set"
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if threads and threads.isdigit() and ranks.isdigit() and int(threads) * int(ranks) > usable:
        section.warn(
            f"{ranks} ranks with {threads} threads each are more than {usable:g} cores",
            f"export OMP_NUM_THREADS={max(1, int(usable // int(ranks)))}",
        )


# ---- Memory.


def examine_memory(section: Section, root: str = "/") -> None:
    """Fill in memory, its limits, and the functions of Linux that the engine uses."""
    values = section.values
    lines = (line.partition(":") for line in (_read(Path(root, "proc/meminfo")) or "").splitlines())
    info = {name: int(rest.split()[0]) << 10 for name, _, rest in lines}
    total, free = info.get("MemTotal"), info.get("MemAvailable")
    values["memory"] = f"{show_bytes(free)} of {show_bytes(total)} are free"
    group = cgroup_limits(root)
    if group["memory"] is not None:
        left = max(0, group["memory"] - group["memory_used"])
        values["control group"] = f"{show_bytes(left)} of {show_bytes(group['memory'])} are free ({group['group']})"
        free = left if free is None else min(free, left)
        if left < _LEAST_FREE:
            section.warn(
                f"the control group has {show_bytes(left)} left: past it the kernel kills the process",
                "give the container or job more memory (docker run --memory, sbatch --mem), or use smaller batches",
            )
    elif free is not None and free < _LEAST_FREE:
        section.warn(f"this machine has {show_bytes(free)} of memory left", "end other programs")
    _examine_ulimits(section)
    _examine_kernel(section)


def _examine_ulimits(section: Section) -> None:
    kinds = {"open files": "NOFILE", "locked memory": "MEMLOCK", "address space": "AS", "processes": "NPROC"}
    for name, kind in kinds.items():
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))
        unlimited = soft == resource.RLIM_INFINITY
        in_bytes = kind in ("MEMLOCK", "AS")
        section.values[f"ulimit, {name}"] = "no limit" if unlimited else show_bytes(soft) if in_bytes else soft
        if kind == "NOFILE" and not unlimited and soft < 4 * _FILES_PER_RANK:
            most = "" if hard == resource.RLIM_INFINITY or hard > soft else " (as root: the hard limit is as low)"
            section.warn(f"a process may open {soft} files only: every peer needs some", f"ulimit -n 4096{most}")
        if kind == "AS" and not unlimited:
            section.warn("the address space is limited, and peers' memory is mapped into it", "ulimit -v unlimited")
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    section.values["/dev/shm"] = (
        f"{show_bytes(shm.f_bavail * shm.f_frsize)} free (torch's DataLoader uses it; the engine doesn't)"
        if shm else "there is none"
    )  # fmt: skip
    if shm and shm.f_bavail * shm.f_frsize < 64 << 20:
        section.warn(
            "/dev/shm is almost full: DataLoader workers die of it (the engine doesn't use it)",
            "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
        )


def _examine_kernel(section: Section) -> None:
    """Try the functions that the engine needs: a sandbox may refuse what the kernel has."""
    tried = {"memfd_create": _try_memfd, "pidfd_open": _try_pidfd, "abstract sockets": _try_socket, "futex": _try_futex}
    for name, attempt in tried.items():
        try:
            attempt()
            section.values[name] = "works"
        except OSError as error:
            section.values[name] = f"fails: {error}"
            section.fail(
                f"{name} fails here ({error}), which the host engine needs",
                "allow it in the sandbox (docker run --security-opt seccomp=unconfined), or use Linux 5.3 or newer",
            )


def _try_memfd() -> None:
    handle = os.memfd_create("collectives-doctor")
    try:
        os.posix_fallocate(handle, 0, 1 << 20)
    finally:
        os.close(handle)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_socket() -> None:
    name = f"\0collectives-doctor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET
    ) as client:
        server.bind(name)
        server.listen(1)
        client.connect(name)


_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1


def _try_futex() -> None:
    number = _SYS_FUTEX.get(platform.machine())
    if number is None:
        return
    word = ctypes.c_int(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
