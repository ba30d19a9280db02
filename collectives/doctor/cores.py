"""Cores: which this process may use, how busy they are, and how many threads the ranks start on them."""

from __future__ import annotations

import glob
import os
import re

from .cgroups import cpu_quota, read_text
from .finding import OK, WARNING, Finding

__all__ = ["check_cores"]

_FLAGS = {"avx2", "avx512f", "avx512bw", "avx512vl", "fma", "f16c", "asimd", "sve"}


def _processor() -> tuple[str, list[str]]:
    """Return the processor's name and those of its instruction sets that the kernels may use."""
    text = read_text("/proc/cpuinfo") or ""
    name = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return name[1] if name else "unknown", sorted(_FLAGS & set(flags[1].split() if flags else ()))


def _physical_cores(cpus: set[int]) -> int:
    """Return how many cores these processors are; hyper-threads of one core count once."""
    cores = set()
    for cpu in cpus:
        cores.add(read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu))
    return len(cores)


def check_cores(ranks: int, root: str = "/") -> list[Finding]:
    """Check the cores of this process for so many ranks on this node. ``root``: of the cgroups' files."""
    allowed, quota = os.sched_getaffinity(0), cpu_quota(root)
    usable = min(len(allowed), quota.limit) if quota else len(allowed)
    name, flags = _processor()
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = 0.0
    values = {
        "processor": name, "instruction_sets": flags, "cpus_of_node": os.cpu_count(), "cpus": sorted(allowed),
        "cores": _physical_cores(allowed), "quota": quota.limit if quota else None,
        "quota_file": quota.path if quota else None, "quota_stops": int(quota.used) if quota else 0,
        "numa_nodes": len(glob.glob("/sys/devices/system/node/node[0-9]*")) or 1, "load": round(load, 2),
        "omp_num_threads": threads or None, "ranks": ranks,
    }  # fmt: skip
    text = (
        f"{name}: {len(allowed)} of {os.cpu_count()} processors ({values['cores']} cores, {values['numa_nodes']} NUMA "
        f"node{'s' * (values['numa_nodes'] != 1)}), load {load:.2f}, "
        + (f"quota {quota.limit:g} cores" if quota else "no quota")
        + f", OMP_NUM_THREADS {threads or 'not set'}"
    )
    found = [Finding("cores", OK, text, values=values)]
    if len(allowed) < ranks:
        found.append(
            Finding(
                "cores.affinity", WARNING,
                f"{ranks} ranks share {len(allowed)} processor{'s' * (len(allowed) != 1)}, so they take turns and each "
                f"wait costs a switch; the node has {os.cpu_count()}",
                f"taskset -c 0-{(os.cpu_count() or 1) - 1} python -m collectives.doctor"
                if len(allowed) < (os.cpu_count() or 1)
                else f"python -m collectives.run -n {len(allowed)} program.py",
            )
        )  # fmt: skip
    if quota and quota.limit < min(ranks, len(allowed)):
        found.append(
            Finding(
                "cores.quota", WARNING,
                f"{quota.path} allows {quota.limit:g} cores for {ranks} ranks: all stop when it is used up (so far "
                f"{values['quota_stops']} times)",
                f"docker run --cpus={ranks} ...   # or resources.limits.cpu of the pod",
            )
        )  # fmt: skip
    if load > 1.5 * usable:
        found.append(
            Finding(
                "cores.load", WARNING,
                f"a load of {load:.2f} on {usable:g} cores: other programs use them, so figures below are too low",
                "top -b -n 1 -o %CPU | head -20   # see what runs, and end it or wait",
            )
        )  # fmt: skip
    if threads.isdigit() and int(threads) * ranks > max(usable, ranks):
        fair = max(1, int(usable) // ranks)
        found.append(
            Finding(
                "cores.threads", WARNING,
                f"OMP_NUM_THREADS={threads} in each of {ranks} ranks is more threads than the {usable:g} cores",
                f"export OMP_NUM_THREADS={fair}",
            )
        )  # fmt: skip
    return found
