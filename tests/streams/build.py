"""Building and loading the libraries of the simulated GPU; needs no import of torch."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLAGS = "-std=c++20 -O1 -fPIC -fvisibility=hidden -DNDEBUG -w".split()


@functools.cache
def torch_folder() -> Path:
    """Where torch lies, without importing it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def built(name: str, sources: list[Path], headers: list[Path], include: list[Path], link: list[str]) -> Path:
    """Build a shared library where it isn't there yet for these sources; give its path."""
    command = [os.environ.get("CXX", "g++"), *FLAGS, *(f"-I{folder}" for folder in include)]
    key = hashlib.sha256(repr((command, link, (torch_folder() / "version.py").read_bytes())).encode())
    for path in [*sources, *headers]:
        key.update(path.read_bytes())
    folder = ROOT / "build" / f"streams-{key.hexdigest()[:16]}"
    target = folder / f"lib{name}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several rank processes start at the same time
        if target.exists():
            return target
        objects = [folder / f"{path.stem}.o" for path in sources]
        for each in [
            subprocess.Popen([*command, "-c", str(path), "-o", str(to)])
            for path, to in zip(sources, objects, strict=True)
        ]:
            if each.wait():
                raise RuntimeError(f"the simulated GPU's library {name} could not be compiled: {each.args}")
        partial = folder / f"{name}.partial"
        subprocess.run([*command[:1], "-shared", *map(str, objects), *link, "-o", str(partial)], check=True)
        partial.rename(target)
    return target


def device_library() -> Path:
    """Build the device: a guard, hooks, memory and operations."""
    sources = [HERE / "library" / name for name in ("dispatch.cpp", "guard.cpp", "memory.cpp")]
    include = torch_folder() / "include"
    link = [f"-L{torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu"]
    return built(
        "simulated_cuda",
        sources,
        [HERE / "library" / "simulated.h"],
        [include, include / "torch" / "csrc" / "api" / "include"],
        link,
    )


def nccl_library() -> Path:
    """Build the library with NCCL's ABI that records each call and forwards it to the host engine."""
    include = ROOT / "kernels" / "include"
    header = include / "coll" / "nccl_abi.h"
    return built("nccl_recorder", [HERE / "library" / "nccl_recorder.cpp"], [header], [include], ["-ldl"])


@functools.cache
def build_all() -> None:
    """Build what a process with simulated GPUs loads, so that none of them compiles within its time limit."""
    from tests.kernels import shim  # imports torch

    device_library()
    nccl_library()
    for source in sorted((ROOT / "kernels" / "cuda").glob("*.cu")):
        shim.text_of(source.name)


def load_device() -> ctypes.CDLL:
    """Register the simulated GPU; before anything imports torch."""
    path = device_library()
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
