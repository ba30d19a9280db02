"""CUDA kernels: the sources of kernels/cuda with their headers put in, compiled by NVRTC through CuPy at first use.

CuPy keeps what it has compiled on disk (CUPY_CACHE_DIR, else ``~/.cupy/kernel_cache``), under a hash of the whole text.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

from ..errors import CudaError, EngineUnavailable
from . import abi

__all__ = ["OPTIONS", "launch", "source_text"]

# No contraction, IEEE division and square root, subnormals kept: the same bits as on the host.
OPTIONS = ("-std=c++17", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-diag-suppress=177")
BLOCK = 256  # COLL_BLOCK
BLOCKS_A_PROCESSOR = 8

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def kernels_folder() -> Path:
    """Give the folder of the kernels' sources: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_kernels_src", package.parent / "kernels"):
        if (folder / "cuda").is_dir():
            return folder
    places = f"{package / '_kernels_src'} nor {package.parent / 'kernels'}"
    raise EngineUnavailable(f"the kernels' sources are in neither {places}: install this package again")


def source_text(name: str, folder: Path | None = None) -> str:
    """Give a source of kernels/cuda as one text, each of its headers put in place of its first #include."""
    folder = folder or kernels_folder()
    seen = set()

    def expand(path: Path) -> str:
        seen.add(path)
        return _INCLUDE.sub(lambda found: include(path, found[1]), path.read_text())

    def include(path: Path, name: str) -> str:
        found = next((base / name for base in (path.parent, folder / "include") if (base / name).is_file()), None)
        if found is None:
            raise EngineUnavailable(f"{path} includes {name}, which isn't there")
        return "" if found in seen else expand(found)

    return expand(folder / "cuda" / name)


@functools.cache
def _function(source: str, name: str, index: int):
    try:
        import cupy
    except ImportError as error:
        raise EngineUnavailable(
            "the CUDA kernels are compiled by CuPy, which isn't there: pip install 'collectives[cuda12]' (or "
            f"[cuda13]): {error}"
        ) from error
    try:
        with cupy.cuda.Device(index):
            return cupy.RawModule(code=source_text(source), options=OPTIONS, backend="nvrtc").get_function(name)
    except Exception as error:
        raise EngineUnavailable(f"kernel {name} could not be compiled by NVRTC: {error}") from error


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def launch(kernel: abi.Kernel, args, device: torch.device) -> None:
    """Queue a kernel on torch's current stream of a device."""
    import cupy
    import numpy

    function = _function(kernel.source, kernel.name, device.index)
    grid = max(1, min(args.work.tiles, _processors(device.index) * BLOCKS_A_PROCESSOR))
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device.index)
    try:
        with cupy.cuda.Device(device.index), stream:
            function((grid,), (BLOCK,), (numpy.void(bytes(args)),))
    except cupy.cuda.driver.CUDADriverError as error:
        raise CudaError(f"{kernel.name}: {error}", op=kernel.name) from error
