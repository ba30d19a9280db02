"""Starting a process whose torch has the simulated GPUs: `start` comes before anything imports torch."""

from __future__ import annotations

import gc
import os
import re
import sys

from . import build, device

VARIABLE = "COLLECTIVES_TEST_SIMULATED_GPU"  # the number of devices; set for a rank process before it starts
_started = False


def why_not() -> str:
    """Why torch of this environment can't have simulated GPUs; empty where it can."""
    version = (build.torch_folder() / "version.py").read_text()
    for name in ("cuda", "hip"):
        found = re.search(rf"^{name}\b[^=]*= *(\S+)", version, re.MULTILINE)
        if found and found[1] != "None":
            build_is = f"torch is built for a GPU ({name} {found[1]})"
            return f"{build_is}, so that the real device is registered: the simulated GPU needs a CPU build"
    return ""


def start(devices: int = 4) -> None:
    """Register the devices, import torch, and map torch.cuda, NCCL and the kernels to them."""
    global _started
    if _started:
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the simulated GPU must be registered before")
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    device.load(devices)
    import torch

    from . import torch_cuda

    torch_cuda.install()
    device.library.simulated_watch_host()
    device.library.simulated_take_c10d()
    host = os.environ.get("COLLECTIVES_HOST_LIBRARY") or str(
        build.ROOT / "collectives" / "_lib" / "libcollectives_host.so"
    )
    from . import kernels, nccl

    nccl.load(host)
    kernels.install()
    torch.cuda.set_device(0)
    gc.collect()
    gc.freeze()  # each call collects before it: going through torch's modules would take 0.2 s of it
    _started = True
