"""Control groups of this process: limits of memory, processor time and processes, version 1 and 2.

A limit of a group above binds as well, so each function reads the process's own group and every
group above it. ``root`` is the folder that stands for ``/``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Limit", "cpu_quota", "folders", "memory_limit", "oom_kills", "process_limit", "read_text"]

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for no limit


@dataclass(frozen=True)
class Limit:
    """The lowest limit, how much of it is used, and the file that sets it."""

    limit: float
    used: float
    path: str


def read_text(path: str) -> str | None:
    """Return a file's text without the space around it; None where it can't be read."""
    try:
        with open(path, errors="replace") as file:  # a mount point's name may be of any bytes
            return file.read().strip()
    except OSError:
        return None


def _mounts(root: str) -> list[tuple[str, set[str], str, str]]:
    """Return (type, controllers, the group that is mounted, mount point) of the mounted hierarchies."""
    found = []
    for line in (read_text(os.path.join(root, "proc/self/mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, behind = before.split(), after.split()
        if len(fields) > 4 and len(behind) > 2 and behind[0] in ("cgroup", "cgroup2"):
            found.append((behind[0], set(behind[2].split(",")), fields[3], fields[4]))
    return found


def folders(controller: str, root: str = "/") -> list[str]:
    """Return the folders of the process's groups, its own first; version 2's and this controller's."""
    found = []
    mounts = _mounts(root)
    for line in (read_text(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        second = number == "0" and not controllers
        if not second and controller not in controllers.split(","):
            continue
        for kind, names, mounted, point in mounts:
            if (kind == "cgroup2") != second or not (second or controller in names):
                continue
            inside = os.path.relpath(path, mounted) if path.startswith(mounted) else "."
            parts = [] if inside == "." or inside.startswith("..") else inside.split("/")
            base = os.path.join(root, point.lstrip("/"))
            for length in range(len(parts), -1, -1):
                folder = os.path.join(base, *parts[:length])
                if os.path.isdir(folder) and folder not in found:
                    found.append(folder)
    return found


def _number(text: str | None) -> float | None:
    """Return a number that limits something, None for "max" and what isn't there."""
    try:
        value = float(text or "max")
    except ValueError:
        return None
    return value if 0 <= value < _UNLIMITED else None


def _lowest(controller: str, root: str, names: tuple[tuple[str, str], ...]) -> Limit | None:
    found = []
    for folder in folders(controller, root):
        for limit_name, used_name in names:
            path = os.path.join(folder, limit_name)
            limit = _number(read_text(path))
            if limit is not None:
                used = _number(read_text(os.path.join(folder, used_name))) or 0.0
                cache = _page_cache(folder) if controller == "memory" else 0.0
                found.append(Limit(limit, max(0.0, used - cache), path))
    return min(found, key=lambda each: each.limit - each.used, default=None)


def _page_cache(folder: str) -> float:
    """Return the bytes of file caches that the kernel frees when the group needs memory.

    They are counted as used.
    """
    path = os.path.join(folder, "memory.stat")
    prefix = "total_" if os.path.exists(os.path.join(folder, "memory.usage_in_bytes")) else ""
    return sum(_entry(path, prefix + name) for name in ("inactive_file", "active_file", "slab_reclaimable"))


def memory_limit(root: str = "/", *, hard: bool = False) -> Limit | None:
    """Return the limit of memory, in bytes, that leaves the least room; None where there is none.

    File caches do not count as used. ``hard``: only limits past which the kernel ends a process, as
    the host engine's ``host/cgroups.cpp`` reads them; past ``memory.high`` it slows one down.
    """
    names = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        *(() if hard else (("memory.high", "memory.current"),)),
    )
    return _lowest("memory", root, names)


def process_limit(root: str = "/") -> Limit | None:
    """Return the limit of processes and threads that leaves the least room."""
    return _lowest("pids", root, (("pids.max", "pids.current"),))


def cpu_quota(root: str = "/") -> Limit | None:
    """Return the lowest quota in cores, with how often the group was stopped because of it as used."""
    found = []
    for folder in folders("cpu", root):
        second, first = (os.path.join(folder, name) for name in ("cpu.max", "cpu.cfs_quota_us"))
        quota, _, period = (read_text(second) or "").partition(" ")
        path = second
        if not quota:
            quota, period, path = read_text(first), read_text(os.path.join(folder, "cpu.cfs_period_us")), first
        cores = _number(quota)
        if cores is not None and (_number(period) or 0) > 0:
            stopped = _entry(os.path.join(folder, "cpu.stat"), "nr_throttled")
            found.append(Limit(cores / float(period), stopped, path))
    return min(found, key=lambda each: each.limit, default=None)


def oom_kills(root: str = "/") -> int:
    """Return how many processes of this process's own group were killed for want of memory."""
    counts = [0]
    for folder in folders("memory", root)[:1]:
        counts.append(int(_entry(os.path.join(folder, "memory.events"), "oom_kill")))
        counts.append(int(_entry(os.path.join(folder, "memory.oom_control"), "oom_kill")))
    return max(counts)


def _entry(path: str, name: str) -> float:
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0.0
    return 0.0
