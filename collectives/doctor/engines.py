"""Which engine would be used, and why not the other; the GPUs and their links."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess

from .findings import Section
from .installed import import_collectives

__all__ = ["examine_engines", "examine_gpus"]

_SECONDS = 20
_FIELDS = (
    "index,name,memory.total,memory.used,driver_version,compute_mode,mig.mode.current,pcie.link.gen.current,"
    "pcie.link.width.current"
)


def examine_engines(section: Section) -> None:
    """Fill in the engines, the chosen one, and the reasons against the others."""
    package, error = import_collectives()
    if package is None:
        section.values["engine"] = f"unknown: import collectives fails ({error})"
        return
    for info in package.engines():
        version = f"{info.version}, {info.path}" if info.path else "not loaded"
        section.values[info.name] = f"available ({version})" if info.available else f"not available: {info.reason}"
    engine = importlib.import_module("collectives.comm.engine")
    try:
        chosen = engine.get_engine()
    except Exception as failure:
        source = os.environ.get("COLLECTIVES_ENGINE")
        remedy = "unset COLLECTIVES_ENGINE" if source else "pip install --force-reinstall collectives"
        for name in ("COLLECTIVES_HOST_LIBRARY", "COLLECTIVES_NCCL_LIBRARY"):
            if os.environ.get(name):
                remedy = f"unset {name}"
        section.fail(f"no engine can be used: {failure}", remedy)
        return
    section.values["used"] = f"{chosen.name} (on {chosen.device_type})"
    if chosen.name == "host" and os.path.exists("/proc/driver/nvidia/version"):
        section.warn(
            "this machine has an NVIDIA driver, and the host engine would be used",
            "pip install a CUDA build of torch, and nvidia-nccl of the same CUDA: see \"nccl\" above",
        )


def _output_of(*command: str) -> str:
    """Return a command's output, at most `_SECONDS` later. Raises what subprocess raises."""
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout


def examine_gpus(section: Section) -> None:
    """Fill in each GPU, and how they are linked. Makes no CUDA context in this process."""
    tool = shutil.which("nvidia-smi")
    driver = os.path.exists("/proc/driver/nvidia/version")
    if tool is None:
        section.values["gpus"] = "nvidia-smi isn't on the path" if driver else "none: no NVIDIA driver, no nvidia-smi"
        if driver:
            section.warn("there is an NVIDIA driver, and no nvidia-smi on the path", "install nvidia-utils")
        return
    try:
        rows = [
            [cell.strip() for cell in line.split(",")]
            for line in _output_of(tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader").splitlines()
            if line.strip()
        ]
    except subprocess.TimeoutExpired:
        section.fail(f"nvidia-smi did not answer within {_SECONDS} s", "reboot (the driver hangs: see dmesg)")
        return
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)).strip().splitlines()
        section.values["gpus"] = f"nvidia-smi fails: {reason[0] if reason else error}"
        section.fail("nvidia-smi fails, so CUDA can't be used", "load or reinstall the driver: modprobe nvidia")
        return
    section.values["gpus"] = len(rows)
    for index, name, total, used, version, mode, mig, generation, width in rows:
        section.values[f"gpu {index}"] = (
            f"{name}, {total} ({used} used), driver {version}, PCIe {generation} x{width}"
            + ("" if mode == "Default" else f", compute mode {mode}") + (", MIG" if mig == "Enabled" else "")
        )  # fmt: skip
        if mode == "Prohibited":
            section.fail(f"GPU {index} takes no processes", f"nvidia-smi -i {index} -c DEFAULT")
        if mig == "Enabled":
            section.warn(f"GPU {index} is in MIG mode: NCCL connects no MIG instances", f"nvidia-smi -i {index} -mig 0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        section.values["CUDA_VISIBLE_DEVICES"] = visible or "(empty: no GPU)"
        if not visible.strip():
            section.warn("CUDA_VISIBLE_DEVICES is empty, so CUDA finds no GPU", "unset CUDA_VISIBLE_DEVICES")
    if len(rows) > 1:
        try:
            section.values["links"] = _output_of(tool, "topo", "-m").rstrip()
        except (OSError, subprocess.SubprocessError) as error:
            section.values["links"] = f"nvidia-smi topo -m fails: {error}"
