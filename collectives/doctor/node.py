"""The node: GPUs and their links, cores, memory, and the limits of this process."""

from __future__ import annotations

import glob
import os
import re
import resource

from .probe import Outcome, run_command
from .report import ERROR, OK, WARNING, Finding

__all__ = ["check_cores", "check_gpus", "check_limits", "check_memory", "parse_topology"]

_MIB, _GIB = 1 << 20, 1 << 30
_SMI_S = 10.0  # limit of nvidia-smi
_TOO_LITTLE, _LITTLE = 256 * _MIB, _GIB  # free memory; two Python processes with torch take about the first
_SMALL_SHM = 64 * _MIB  # of a container whose size was not set


# ---- GPUs.


def parse_topology(text: str) -> dict[str, str]:
    """Return the links of ``nvidia-smi topo -m``: {"GPU0-GPU1": "NV18"}; each pair once."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = next(([word for word in line if re.fullmatch(r"GPU\d+", word)] for line in lines), [])
    return {
        f"{row[0]}-{name}": link
        for row in lines[1:]
        if row[0] in header
        for name, link in zip(header, row[1:], strict=False)
        if header.index(name) > header.index(row[0])
    }


def check_gpus(outcome: Outcome) -> list[Finding]:
    """Check the GPUs and their links; opens no context. `outcome`: of the engine probe."""
    devices, torch = outcome.values.get("devices"), outcome.values.get("torch") or {}
    query = ["nvidia-smi", "--query-gpu=index,driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    listed, why = run_command(query, _SMI_S)
    gpus = [re.split(r",\s*", line.strip()) for line in (listed or "").splitlines() if line.strip()]
    topology = run_command(["nvidia-smi", "topo", "-m"], _SMI_S)[0] if len(gpus) > 1 else None
    links = parse_topology(topology or "")
    peers = outcome.values.get("peers") or []
    values = {"torch": devices, "peer_access": peers, "nvidia_smi": gpus, "links": links}
    text = ", ".join(devices or []) or f"torch sees none, so ranks compute on the CPU ({why or f'{len(gpus)} listed'})"
    if links:
        text += "; links " + ", ".join(f"{pair} {link}" for pair, link in links.items())
    findings = [Finding("gpus", OK, text, values=values)]
    if listed is None and "not installed" not in why and glob.glob("/dev/nvidia[0-9]*"):
        text = f"there are NVIDIA devices, but the driver doesn't answer: {why}"
        findings.append(Finding("gpus.driver", ERROR, text, "sudo modprobe nvidia   # after a driver update: reboot"))
    if gpus and devices == [] and torch.get("cuda"):
        text = (
            f"nvidia-smi lists {len(gpus)}, but torch for CUDA {torch['cuda']} sees none: an old driver "
            f"({gpus[0][1]}), or CUDA_VISIBLE_DEVICES hides them"
        )
        remedy = "unset CUDA_VISIBLE_DEVICES   # or a driver for that CUDA"
        findings.append(Finding("gpus.torch", WARNING, text, remedy))
    elif gpus and devices == []:
        text = "there are GPUs, but torch is built without CUDA"
        findings.append(Finding("gpus.torch", WARNING, text, "pip install --force-reinstall torch"))
    for index, _, mode, mig in (gpu for gpu in gpus if len(gpu) == 4):
        if mode == "Prohibited":
            remedy = f"sudo nvidia-smi -i {index} -c DEFAULT"
            findings.append(
                Finding("gpus.compute_mode", ERROR, f"GPU {index} allows no program (compute mode)", remedy)
            )
        if mig == "Enabled":
            text = f"GPU {index} is divided (MIG), and NCCL connects no parts of one GPU"
            findings.append(Finding("gpus.mig", WARNING, text, f"sudo nvidia-smi -i {index} -mig 0"))
    if not all(map(all, peers)):
        rows = "; ".join("".join("y" if each else "n" for each in row) for row in peers)
        text = f"not every GPU reads every other directly, so NCCL copies through host memory: {rows}"
        findings.append(Finding("gpus.peer_access", WARNING, text, "nvidia-smi topo -p2p r"))
    return findings


# ---- Cores.


def _read(path: str) -> str:
    """Return a file's text; "" where it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _read_quota(root: str) -> tuple[float, str] | None:
    """Return the lowest quota in cores of this process's control group and of those above, and its file.

    Version 2 alone: control groups of memory, of both versions, are read by the host engine.
    """
    found = re.search(r"^0::/(.*)$", _read(os.path.join(root, "proc/self/cgroup")), re.MULTILINE)
    parts = [part for part in (found[1] if found else "").split("/") if part not in ("", "..")]
    quotas = []
    for length in range(len(parts) + 1):
        path = os.path.join(root, "sys/fs/cgroup", *parts[:length], "cpu.max")
        microseconds, _, period = _read(path).partition(" ")
        if microseconds.isdigit():
            quotas.append((int(microseconds) / int(period), path))
    return min(quotas, default=None)


def check_cores(ranks: int, root: str = "/") -> list[Finding]:
    """Check the cores of this process for so many ranks on this node. `root`: of /proc and /sys."""
    allowed, of_node = sorted(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, quota_file = _read_quota(root) or (None, None)
    usable = len(allowed) if quota is None else min(len(allowed), quota)
    threads, load = os.environ.get("OMP_NUM_THREADS", "").strip(), os.getloadavg()[0]
    values = {"cpus": allowed, "cpus_of_node": of_node, "quota": quota, "quota_file": quota_file,
              "load": round(load, 2), "omp_num_threads": threads or None, "ranks": ranks}  # fmt: skip
    text = (
        f"{len(allowed)} of {of_node} processors, load {load:.2f}, "
        + ("no quota" if quota is None else f"quota {quota:g} cores")
        + f", OMP_NUM_THREADS {threads or 'not set'}"
    )
    findings = [Finding("cores", OK, text, values=values)]

    def warn(name: str, text: str, remedy: str) -> None:
        findings.append(Finding(f"cores.{name}", WARNING, text, remedy))

    if len(allowed) < ranks:
        remedy = f"python -m collectives.run -n {len(allowed)} program.py"
        if len(allowed) < of_node:
            remedy = f"taskset -c 0-{of_node - 1} python -m collectives.doctor"
        warn("affinity", f"{ranks} ranks take turns on {len(allowed)} of {of_node} processors", remedy)
    if quota is not None and quota < min(ranks, len(allowed)):
        warn("quota", f"{quota_file} allows {quota:g} cores for {ranks} ranks: all stop when it is used up",
             f"docker run --cpus={ranks} ...   # or resources.limits.cpu of the pod")  # fmt: skip
    if load > 1.5 * usable:
        warn("load", f"a load of {load:.2f} on {usable:g} cores: other programs use them, so times below are too long",
             "top -b -n 1 -o %CPU | head -20   # see what runs, and end it or wait")  # fmt: skip
    if threads.isdigit() and int(threads) * ranks > max(usable, ranks):
        warn("threads", f"OMP_NUM_THREADS={threads} in each of {ranks} ranks is more threads than the {usable:g} cores",
             f"export OMP_NUM_THREADS={max(1, int(usable) // ranks)}")  # fmt: skip
    return findings


# ---- Memory and other limits.


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"


def check_memory(outcome: Outcome) -> list[Finding]:
    """Check the memory that is free. `outcome`: of the engine probe, in which the host engine says it."""
    free = outcome.values.get("free_memory")
    try:
        system = os.statvfs("/dev/shm")
        shm = {"size": system.f_blocks * system.f_frsize, "free": system.f_bavail * system.f_frsize}
    except OSError:
        shm = None
    text = "not known, since there is no host engine to ask" if free is None else f"{_size(free)} free for the ranks"
    text += f", /dev/shm {_size(shm['size'])} with {_size(shm['free'])} free" if shm else ", no /dev/shm"
    findings = [Finding("memory", OK, text, values={"free": free, "dev_shm": shm})]
    if free is not None and free < _LITTLE:
        status = ERROR if free < _TOO_LITTLE else WARNING
        text = f"{_size(free)} are free for the ranks, on the node or below the limit of a control group"
        remedy = "ps aux --sort=-rss | head   # end what uses it; or docker run --memory=8g ..., or srun --mem"
        findings.append(Finding("memory.free", status, text, remedy))
    if shm and shm["size"] <= _SMALL_SHM:
        text = f"/dev/shm has {_size(shm['size'])}: the host engine doesn't use it, but NCCL and workers of torch's " \
               "DataLoader do, and die of SIGBUS where it is full"  # fmt: skip
        remedy = "sudo mount -o remount,size=8G /dev/shm   # of a container: docker run --shm-size=8g"
        findings.append(Finding("memory.dev_shm", WARNING, text, remedy))
    return findings


# By name: the resource, ulimit's letter, ulimit's unit in bytes, the least that is enough, a value
# to raise it to (None: unlimited), and what needs it.
_LIMITS = {
    "nofile": (resource.RLIMIT_NOFILE, "n", 1, 1024, 65536,
               "open files: each rank has descriptors of its peers, its libraries and its data"),
    "as": (resource.RLIMIT_AS, "v", 1024, 64 * _GIB, None, "bytes of addresses: torch maps far more than it uses"),
    "memlock": (resource.RLIMIT_MEMLOCK, "l", 1024, _GIB, None,
                "bytes of locked memory: NCCL registers more with InfiniBand"),
}  # fmt: skip


def check_limits() -> list[Finding]:
    """Check the limits of this process by setrlimit (``ulimit``)."""
    limits = {name: resource.getrlimit(entry[0]) for name, entry in _LIMITS.items()}
    unlimited = resource.RLIM_INFINITY
    shown = {name: ["unlimited" if value == unlimited else value for value in limit] for name, limit in limits.items()}
    values = {name: {"soft": soft, "hard": hard} for name, (soft, hard) in shown.items()}
    text = ", ".join(f"{name} {soft}" for name, (soft, _) in shown.items())
    findings = [Finding("limits", OK, text, values=values)]
    for name, (_, letter, unit, least, wanted, use) in _LIMITS.items():
        soft, hard = limits[name]
        if soft == unlimited or soft >= least or (name == "memlock" and not glob.glob("/sys/class/infiniband/*")):
            continue
        if hard == unlimited or (wanted is not None and hard >= wanted):
            remedy = f"ulimit -S{letter} {'unlimited' if wanted is None else wanted // unit}"
        else:
            flag = "unlimited" if wanted is None else wanted
            remedy = f"sudo prlimit --pid $$ --{name}={flag}:{flag}   # the hard limit of this shell"
        findings.append(Finding(f"limits.{name}", WARNING, f"{soft} {use}", remedy))
    return findings
