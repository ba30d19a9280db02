"""GPUs: what torch and nvidia-smi say of them, and how they are linked. Nothing opens a context on one."""

from __future__ import annotations

import glob
import re

from .finding import ERROR, OK, WARNING, Finding
from .probe import Outcome, run_command

__all__ = ["check_gpus", "parse_query", "parse_topology"]

_LIMIT = 10.0  # seconds of nvidia-smi
_FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_mode", "mig.mode.current",
           "pcie.link.gen.current", "pcie.link.width.current")  # fmt: skip


def parse_query(text: str) -> list[dict]:
    """Return the GPUs of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
    rows = (re.split(r",\s*", line.strip()) for line in text.splitlines() if line.strip())
    return [dict(zip(_FIELDS, row, strict=False)) for row in rows]


def parse_topology(text: str) -> dict[str, str]:
    """Return the links of ``nvidia-smi topo -m``: {"GPU0-GPU1": "NV18"}; each pair once."""
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = next((re.findall(r"\bGPU\d+\b", line) for line in lines if len(re.findall(r"\bGPU\d+\b", line)) > 0), [])
    links = {}
    for line in lines:
        row = line.split()
        if row and row[0] in header and len(row) > len(header):
            for name, link in zip(header, row[1:], strict=False):
                if header.index(name) > header.index(row[0]):
                    links[f"{row[0]}-{name}"] = link
    return links


def check_gpus(outcome: Outcome) -> list[Finding]:
    """Check the GPUs. ``outcome``: of the engine's probe, in which torch has listed its devices."""
    devices, torch = outcome.values.get("devices"), outcome.values.get("torch") or {}
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    listed, why = run_command(query, _LIMIT)
    gpus = parse_query(listed) if listed is not None else []
    topology = run_command(["nvidia-smi", "topo", "-m"], _LIMIT)[0] if len(gpus) > 1 else None
    links = parse_topology(topology) if topology else {}
    values = {"torch": devices, "peer_access": outcome.values.get("peers"), "nvidia_smi": gpus, "links": links,
              "nvidia_smi_error": why, "topology": topology}  # fmt: skip
    parts = [_describe(gpu) for gpu in gpus] or [
        f"cuda:{index} {each['name']}, {each['memory'] >> 20} MiB" for index, each in enumerate(devices or ())
    ]
    text = "; ".join(parts)
    if links:
        text += "; links " + ", ".join(f"{pair} {link}" for pair, link in links.items())
    if not parts:
        text = f"none, so NCCL can't be used and ranks compute on the CPU ({why})"
    found = [Finding("gpus", OK, text, values=values)]
    if listed is None and "not installed" not in why and glob.glob("/dev/nvidia[0-9]*"):
        found.append(Finding("gpus.driver", ERROR, f"there are NVIDIA devices, but the driver doesn't answer: {why}",
                             "sudo modprobe nvidia   # after a driver update: reboot"))  # fmt: skip
    if gpus and devices == []:
        if torch.get("cuda"):
            text = f"nvidia-smi lists {len(gpus)}, but torch for CUDA {torch['cuda']} sees none: an old driver " \
                   f"({gpus[0].get('driver_version')}), or CUDA_VISIBLE_DEVICES hides them"  # fmt: skip
            remedy = "unset CUDA_VISIBLE_DEVICES   # or a driver for that CUDA"
        else:
            text, remedy = "there are GPUs, but torch is built without CUDA", "pip install --force-reinstall torch"
        found.append(Finding("gpus.torch", WARNING, text, remedy))
    for gpu in gpus:
        if gpu.get("compute_mode") == "Prohibited":
            found.append(Finding("gpus.compute_mode", ERROR, f"GPU {gpu['index']} allows no program (compute mode)",
                                 f"sudo nvidia-smi -i {gpu['index']} -c DEFAULT"))  # fmt: skip
        if gpu.get("mig.mode.current") == "Enabled":
            text = f"GPU {gpu['index']} is divided (MIG), and NCCL connects no parts of one GPU"
            found.append(Finding("gpus.mig", WARNING, text, f"sudo nvidia-smi -i {gpu['index']} -mig 0"))
    peers = outcome.values.get("peers") or []
    if any(not each for row in peers for each in row):
        rows = "; ".join("".join("y" if each else "n" for each in row) for row in peers)
        text = f"not every GPU reads every other directly, so NCCL copies through host memory: {rows}"
        found.append(Finding("gpus.peer_access", WARNING, text, "nvidia-smi topo -p2p r"))
    return found


def _describe(gpu: dict) -> str:
    link = f"PCIe {gpu.get('pcie.link.gen.current')} x{gpu.get('pcie.link.width.current')}"
    return (
        f"GPU {gpu.get('index')} {gpu.get('name')}, {gpu.get('memory.used')} of {gpu.get('memory.total')} MiB used, "
        f"driver {gpu.get('driver_version')}, compute mode {gpu.get('compute_mode')}, "
        f"MIG {gpu.get('mig.mode.current')}, {link}"
    )
