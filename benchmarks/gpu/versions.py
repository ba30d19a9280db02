"""Versions on this machine: the GPU, its driver, torch, CUDA, NCCL, CuPy, the compilers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

import torch

from .program import Program, is_gpu, open_device

PACKAGES = (
    "torch", "numpy", "cupy-cuda12x", "cupy-cuda13x", "cython", "setuptools", "pytest", "pytest-timeout",
    "pytest-xdist", "hypothesis", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
)  # fmt: skip
COMMANDS = {
    "nvidia-smi": [
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader",
    ],
    "nvcc": ["nvcc", "--version"],
    "g++": ["g++", "--version"],
    "compute-sanitizer": ["compute-sanitizer", "--version"],
}  # fmt: skip


def packages() -> dict[str, str]:
    """Return the versions of the packages that matter and are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def output_of(command: list[str]) -> str:
    """Return a command's output on one line, or why there is none."""
    if shutil.which(command[0]) is None:
        return "not installed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "no answer in 20 s"
    return " | ".join((done.stdout or done.stderr).strip().splitlines())[:400]


def gpu_of(device: torch.device) -> dict:
    """Return the GPU's properties, by torch."""
    if not is_gpu(device):
        return {}
    found = torch.cuda.get_device_properties(device)
    names = ("name", "major", "minor", "multi_processor_count", "total_memory", "L2_cache_size")
    return {name: getattr(found, name, None) for name in names}


def nccl_of_torch() -> str:
    """Return the version of the NCCL that torch was built with."""
    if torch.version.cuda is None:
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def main() -> int:
    program = Program(__doc__, "versions")
    arguments = program.parse()
    program.row(case="packages", python=platform.python_version(), executable=sys.executable, **packages())
    program.row(
        case="torch", version=torch.__version__, cuda=str(torch.version.cuda), nccl=nccl_of_torch(),
        host=platform.platform(), cpus=os.cpu_count(),
    )  # fmt: skip
    device = open_device(arguments.device)
    program.row(case="gpu", device=str(device), **gpu_of(device))
    for name, command in COMMANDS.items():
        program.row(case=name, says=output_of(command))
    try:
        import collectives
    except ImportError as error:  # before the build
        program.row(case="engines", error=str(error)[:200])
    else:
        for info in collectives.engines():
            program.row(case="engines", **info._asdict())
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
