"""Memory of a process as Linux counts it: now, its peak, and what it shares."""

import ctypes
import os
from pathlib import Path

_MMAP_THRESHOLD = -3  # mallopt's number, <malloc.h>
_LEAST = 64 << 10  # bytes


def return_freed_memory():
    """Have malloc give every larger array a mapping of its own, which goes back to the system when
    it is freed.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(_LEAST)  # for others who would change it
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LEAST)


def proportional_set_size(*kinds):
    """Return this process's memory in bytes; shared memory is divided by the number of processes
    that share it.

    ``kinds``: some of Anon, Shmem, File; default: all.
    """
    wanted = {f"Pss_{kind}:" for kind in kinds} or {"Pss:"}
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    found = [int(line[1]) << 10 for line in lines if line[0] in wanted]
    if len(found) != len(wanted):
        raise SystemExit(f"/proc/self/smaps_rollup lacks some of {sorted(wanted)}: the kernel is too old")
    return sum(found)


def status_bytes(name):
    """Return a field of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/self/status has no {name}")


def reset_peak():
    """Set VmHWM to VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")
