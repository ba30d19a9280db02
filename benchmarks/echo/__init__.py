"""Ranks without peers or a GPU: one process of a job of many ranks in which nothing takes time but the host's own code.

`start` gives this process a simulated GPU (``tests/streams``) whose reports nobody reads, a library
with NCCL's ABI in which every other rank is an echo of this one (`echo.cpp`), torch's process group
"fake", and a CuPy whose kernels do nothing. What then takes time in a training step is Python, torch
and the simulation's own stream, event and memory functions; `reports` counts these.

Launches of kernels through CuPy cost their arguments here, and not ``cuLaunchKernel``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
import weakref
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KINDS = (
    "record", "block", "sync event", "sync stream", "sync device", "query event", "query stream", "record_stream",
    "allocate", "free", "operation", "host", "pin", "unpin", "set device", "destroy event", "captured",
)  # fmt: skip  # of tests/streams/library/simulated.h
WAITS = ("sync event", "sync stream", "sync device")

# Of one call to NCCL: function, elements, bytes of one, reduction, ranks, stream.
OPERATION = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64
)

_library: ctypes.CDLL | None = None


def build() -> tuple[Path, Path]:
    """Build the library as NCCL and as the host engine; return their paths."""
    from tests.streams.build import built

    include = ROOT / "kernels" / "include"
    headers = [include / "coll" / "nccl_abi.h", include / "coll" / "host_abi.h"]
    host = HERE / "host.cpp"
    return (
        built("echo_nccl", [HERE / "echo.cpp"], headers, [include], []),
        built("echo_host", [host], [HERE / "echo.cpp", *headers], [include], []),
    )


def start(size: int, report=None, operation=None) -> None:
    """Make this process rank 0 of `size`; before anything imports torch.

    `report`: a `tests.streams.device.CALLBACK` that gets the simulated GPU's reports, None: they are
    counted alone. `operation`: an `OPERATION` that gets NCCL's calls.
    """
    global _library
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the simulated GPU must be registered before")
    from tests.streams import device
    from tests.streams.start import why_not

    if reason := why_not():
        raise SystemExit(f"no host times: {reason}")
    nccl, host = build()
    device.load(1)
    _library = ctypes.CDLL(str(nccl))
    _library.echo_reports.restype = ctypes.c_int64
    if report is None:
        device.library.simulated_set_native_callback(_library.echo_report)
    else:
        device.library.simulated_set_callback(report)
    if operation is not None:
        _library.echo_set_recorder(operation)
    sys.modules["cupy"] = _cupy()
    os.environ.update(
        CUPY_CACHE_IN_MEMORY="1", RANK="0", WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

    from tests.streams import torch_cuda

    torch_cuda.install()
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch.cuda.is_current_stream_capturing = torch.cuda.graphs.is_current_stream_capturing = lambda: False
    device.library.simulated_take_c10d()
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    _open_communicators(nccl, host, size)


def _open_communicators(nccl: Path, host: Path, size: int) -> None:
    """Put communicators of echoed ranks where the package keeps those that it has opened."""
    import torch
    import torch.distributed as dist

    import collectives.horovod  # noqa: F401  all modules that open communicators
    import collectives.sharded  # noqa: F401
    from collectives import cuda_state
    from collectives.comm.communicator import Communicator
    from collectives.comm.engine import get_engine
    from collectives.kernels import execution
    from collectives.rendezvous import control, process_groups, world
    from collectives.rendezvous.peers import PeerInfo
    from collectives.sharded import scheduler

    for name, count in (("cuStreamGetCaptureInfo_v2", 6), ("cuThreadExchangeStreamCaptureMode", 1)):
        getattr(_library, name).argtypes = [ctypes.c_void_p] * count
    cuda_state._driver = lambda: _library
    execution.library()  # the kernels' own, before the path names the echo
    os.environ.update(COLLECTIVES_NCCL_LIBRARY=str(nccl), COLLECTIVES_HOST_LIBRARY=str(host))
    device = torch.device("cuda", 0)
    peers = tuple(PeerInfo(rank, "echo", "echo") for rank in range(size))

    def opened(engine: str, on, ranks: int = size) -> Communicator:
        return Communicator(
            get_engine(engine), bytes(128), 0, ranks, device=on, local_size=ranks, peers=peers[:ranks]
        )  # fmt: skip

    scheduler.compares_order = lambda world: True  # there are no other hosts to compare it with

    def of_group(group, on) -> Communicator:
        known = communicators.get((id(group), on))
        if known is None:
            known = communicators[id(group), on] = (weakref.ref(group), opened("nccl", on, group.size()))
        return known[1]

    communicators, theirs = process_groups._communicators, process_groups.get_communicator
    for module in [each for name, each in sys.modules.items() if name.startswith("collectives.")]:
        if getattr(module, "get_communicator", None) is theirs:
            module.get_communicator = of_group
    control.bootstrap_on_host = lambda comm, seconds=None: opened("host", "cpu", comm.size)
    world._world = opened("nccl", device)
    of_group(dist.group.WORLD, device)


def carry_out(on: bool) -> None:
    """Let operations on the GPU have the results of equal ranks, or do nothing; the control communicators always do."""
    _library.echo_carry_out(int(on))


def reports() -> dict[str, int]:
    """Return how often each of the simulated GPU's functions was called."""
    return {kind: _library.echo_reports(number) for number, kind in enumerate(KINDS)}


# ---- CuPy.
class _Function:
    ptr = 0

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        pass


class _Module:
    def load(self, binary) -> None:
        pass

    def get_function(self, name):
        return _Function()


class _Device:
    def __init__(self, index):
        self.id = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class _Error(Exception):
    pass


def _cupy() -> types.ModuleType:
    """Return what stands for CuPy: NVRTC compiles nothing, and kernels do nothing."""
    nvrtc = types.ModuleType("cupy.cuda.nvrtc")
    vars(nvrtc).update(
        getVersion=lambda: (12, 9), getSupportedArchs=lambda: [80, 90, 100], createProgram=lambda *_: 1,
        compileProgram=lambda *_: None, getCUBIN=lambda *_: b"cubin", getPTX=lambda *_: b"ptx",
        getProgramLog=lambda *_: "", destroyProgram=lambda *_: None, NVRTCError=_Error,
    )  # fmt: skip
    cuda = types.ModuleType("cupy.cuda")
    cuda.nvrtc = nvrtc
    cuda.driver = types.SimpleNamespace(CUDADriverError=_Error, occupancyMaxActiveBlocksPerMultiprocessor=lambda *_: 8)
    cuda.runtime = types.SimpleNamespace(CUDARuntimeError=_Error, getDevice=lambda: 0)
    cuda.Device, cuda.Module = _Device, _Module
    cupy = types.ModuleType("cupy")
    cupy.cuda = cuda
    cupy.__path__ = cuda.__path__ = []
    cupy.ndarray = type("ndarray", (), {})
    sys.modules.update({"cupy.cuda": cuda, "cupy.cuda.nvrtc": nvrtc})
    return cupy
