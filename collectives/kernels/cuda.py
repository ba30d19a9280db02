"""CUDA kernels: the sources of kernels/cuda with their headers inlined, compiled by NVRTC through
CuPy at first use.

Binaries are cached on disk (CUPY_CACHE_DIR, else ``~/.cupy/kernel_cache``; nothing with
CUPY_CACHE_IN_MEMORY=1) under a hash of the whole text, the options, the architecture and NVRTC's
version. CuPy's own way from source to module isn't used: it appends ``-ftz=true`` to the options,
the last option counts, and GPUs would flush subnormals.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable
from ctypes import sizeof
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from ..errors import CudaError, EngineUnavailable, InvalidUsage
from ..torch_compat import cuda_current_raw_stream, cuda_get_device
from . import abi
from .rows import Rows

__all__ = ["BLOCK", "OPTIONS", "arguments", "compile_source", "launch", "load", "source_text"]

# No contraction, IEEE division and square root, subnormals kept: the same bits as on the host.
OPTIONS = ("-std=c++17", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-diag-suppress=177")
BLOCK = 256  # COLL_BLOCK
_ADDRESS = struct.Struct("=Q")

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_INSTALL = "pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12, or for CUDA 13 cupy-cuda13x nvidia-cuda-nvrtc"


# ---- From source to binary.
def kernels_folder() -> Path:
    """Return the folder of the kernels' sources: inside an installed package, or next to it in a
    checkout.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_kernels_src", package.parent / "kernels"):
        if (folder / "cuda").is_dir():
            return folder
    places = f"{package / '_kernels_src'} nor {package.parent / 'kernels'}"
    raise EngineUnavailable(f"the kernels' sources are in neither {places}: install this package again")


def source_text(name: str, folder: Path | None = None) -> str:
    """Return a source of kernels/cuda as one text, each of its headers put in place of its first
    #include.
    """
    folder = folder or kernels_folder()
    seen = set()

    def expand(path: Path) -> str:
        seen.add(path)
        return _INCLUDE.sub(lambda found: include(path, found[1]), path.read_text(encoding="utf-8"))

    def include(path: Path, name: str) -> str:
        found = next((base / name for base in (path.parent, folder / "include") if (base / name).is_file()), None)
        if found is None:
            raise EngineUnavailable(f"{path} includes {name}, which isn't there: install this package again")
        found = found.resolve()
        return "" if found in seen else expand(found)

    path = (folder / "cuda" / name).resolve()
    if not path.is_file():
        raise EngineUnavailable(f"the kernels' source {path} isn't there: install this package again")
    return expand(path)


def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise EngineUnavailable(
            f"the CUDA kernels are compiled and started by CuPy, which can't be imported: {_INSTALL}: {error}"
        ) from error
    return cupy


@functools.cache
def _nvrtc():
    """Return CuPy's module of NVRTC's functions, and NVRTC's version."""
    _cupy()
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except Exception as error:  # CuPy has several kinds for a library that it can't load
        text = f"the CUDA kernels are compiled by NVRTC, which CuPy can't load: {_INSTALL}: {error}"
        raise EngineUnavailable(text) from error
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/libnvrtc.so" in line}
    _load_builtins(paths, version)
    return nvrtc, version


def _load_builtins(paths, version) -> None:
    """Load NVRTC's library of builtins from NVRTC's folder.

    NVRTC opens it by its bare name, and the wheel of CUDA 13 sets no path for it.
    """
    for path in paths:
        builtins = Path(path).resolve().with_name("libnvrtc-builtins.so.{}.{}".format(*version))
        if builtins.exists():
            with contextlib.suppress(OSError):  # NVRTC reports it if it finds no other library
                ctypes.CDLL(str(builtins))


def compile_source(source: str, arch: str, *more: str) -> tuple[bytes, str]:
    """Compile a source of kernels/cuda; return the binary and the compiler's log. It needs no GPU.

    ``arch``: "sm_90" makes a cubin, "compute_90" PTX. ``more``: options of NVRTC after ``OPTIONS``.
    Raises ``EngineUnavailable`` without CuPy or NVRTC and where NVRTC refuses the text; ``detail``
    is its log then.
    """
    nvrtc, version = _nvrtc()
    program = nvrtc.createProgram(source_text(source), source, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"-arch={arch}", *more))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise EngineUnavailable(
                f"NVRTC {'.'.join(map(str, version))} could not compile {source} for {arch} ({error}):\n{log}",
                detail=log,
            ) from error
        binary = nvrtc.getCUBIN(program) if arch.startswith("sm_") else nvrtc.getPTX(program)
        return binary if isinstance(binary, bytes) else binary.encode(), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _arch(index: int) -> str:
    """Return what to compile for: the GPU's own architecture, or PTX if NVRTC doesn't know that.

    The driver translates PTX.
    """
    nvrtc, version = _nvrtc()
    major, minor = torch.cuda.get_device_capability(index)
    own = 10 * major + minor
    known = nvrtc.getSupportedArchs()
    if own in known:
        return f"sm_{own}"
    older = [each for each in known if each < own]
    if not older:
        raise EngineUnavailable(
            f"GPU {index} has compute capability {major}.{minor}; NVRTC {'.'.join(map(str, version))} knows "
            f"{', '.join(map(str, known))}: install an older CUDA"
        )
    return f"compute_{max(older)}"


def _cached(source: str, arch: str) -> bytes:
    """Return the binary of `compile_source`, from the cache on disk if it is there.

    A cache that can't be written is no error.
    """
    key = hashlib.sha256(repr((source_text(source), OPTIONS, arch, _nvrtc()[1])).encode()).hexdigest()
    path = None
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "") in ("", "0"):
        folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
        path = folder / f"collectives-{source.partition('.')[0]}-{arch}-{key[:32]}"
        with contextlib.suppress(OSError):
            kept = path.read_bytes()
            if hashlib.sha256(kept[32:]).digest() == kept[:32]:
                return kept[32:]
    binary, _ = compile_source(source, arch)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(binary).digest() + binary)
            os.replace(file.name, path)
    return binary


# ---- Launching.
class _Stream:
    """torch's stream as CuPy's functions take one: they read ``ptr``. (CuPy's ExternalStream is
    deprecated.)
    """

    __slots__ = ("ptr",)

    def __init__(self, ptr: int):
        self.ptr = ptr


_streams: dict[int, _Stream] = {}  # by their addresses


class _Loaded(NamedTuple):
    """A kernel on a GPU."""

    function: object  # cupy.cuda.Function
    value: numpy.dtype  # its arguments as one opaque value
    most_blocks: int
    current_device: object  # CuPy's
    errors: tuple[type[Exception], ...]


_loaded: dict[tuple[str, int], _Loaded] = {}
_modules: dict[tuple[str, int], object] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def _on(index: int):
    """Make a GPU the current one of torch and of CuPy."""
    with torch.cuda.device(index), _cupy().cuda.Device(index):
        yield


def load(kernel: abi.Kernel, index: int) -> _Loaded:
    """Compile a kernel's source and load it into a GPU, once; blocks. Not while a CUDA graph is captured."""
    with _lock:
        if (kernel.name, index) in _loaded:
            return _loaded[kernel.name, index]
        if torch.cuda.is_current_stream_capturing():
            raise InvalidUsage(
                "the kernel is not compiled yet, and can't be while a CUDA graph is captured: make the same call once "
                "before the capture",
                op=kernel.name,
            )
        cupy = _cupy()
        errors = (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)
        binary = b"" if (kernel.source, index) in _modules else _cached(kernel.source, _arch(index))
        try:
            with _on(index):
                if binary:
                    module = cupy.cuda.Module()
                    module.load(binary)
                    _modules[kernel.source, index] = module
                function = _modules[kernel.source, index].get_function(kernel.name)
                # Each block gets an equal run of tiles: more than run at once would come in a
                # second wave.
                held = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, BLOCK, 0)
        except errors as error:
            message = f"could not be loaded into GPU {index}: {error}"
            raise CudaError(message, op=kernel.name, detail=str(error)) from error
        loaded = _Loaded(
            function,
            numpy.dtype((numpy.void, sizeof(kernel.args) if kernel.rows_at is None else abi.ARGUMENTS)),
            torch.cuda.get_device_properties(index).multi_processor_count * max(held, 1),
            cupy.cuda.runtime.getDevice,
            errors,
        )
        _loaded[kernel.name, index] = loaded
        return loaded


def arguments(kernel: abi.Kernel, args, rows: Rows | None, place: Callable[[], int]) -> bytes | bytearray:
    """Return the bytes that a CUDA kernel takes: its arguments, and behind them its table's rows
    where there is room.

    ``rows``: of the table; None where ``args`` has their address. ``place``: returns an address
    where the kernel can read them; it is called if there is no room.
    """
    if kernel.rows_at is None:
        return bytes(args)
    size = sizeof(args)
    whole = bytearray(abi.ARGUMENTS)
    whole[:size] = bytes(args)
    if rows is not None:
        by_value = rows.nbytes <= abi.ARGUMENTS - size
        _ADDRESS.pack_into(whole, kernel.rows_at, 0 if by_value else place())
        if by_value:
            whole[size : size + rows.nbytes] = rows.array.tobytes()
    return whole


class KeptArguments:
    """Memory for the arguments of a kernel that is launched again and again with the same ones, so
    that its table's rows are put behind them once.
    """

    __slots__ = ("_values", "_whole")

    def __init__(self):
        self._values = self._whole = None

    def renew(self, kernel: abi.Kernel, args, rows: Rows | None, value: numpy.dtype) -> tuple[numpy.ndarray] | None:
        """Return what a CUDA function takes for ``args`` as they are now; None where the rows don't
        fit behind them.

        ``rows``: the same in all calls, and unchanged.
        """
        whole = self._whole
        if whole is not None:
            whole[: sizeof(args)] = args
            if rows is not None:
                _ADDRESS.pack_into(whole, kernel.rows_at, 0)
        elif self._values is None:
            if kernel.rows_at is None:
                whole = args
            elif rows is None or rows.nbytes <= abi.ARGUMENTS - sizeof(args):
                whole = self._whole = arguments(kernel, args, rows, None)
            else:
                return None
            # An array of one opaque element goes by value.
            self._values = (numpy.frombuffer(whole, value),)
        return self._values


def launch(
    kernel: abi.Kernel, args, device: torch.device, rows: Rows | None = None, kept: KeptArguments | None = None
) -> None:
    """Queue a kernel on torch's current stream of a GPU. Never waits for it; the first call
    compiles.

    From the second call on it can be captured in a CUDA graph. ``args`` and ``rows``, those of the
    table that the kernel reads, are copied before this returns. ``kept``: of the same ``args`` and
    ``rows`` alone, and of one thread at a time. Raises ``CudaError``, maybe of an
    earlier kernel on that GPU, as CUDA does.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    loaded = _loaded.get((kernel.name, index)) or load(kernel, index)
    values = None if kept is None else kept.renew(kernel, args, rows, loaded.value)
    held = []
    if values is None:

        def place() -> int:
            held.append(rows.on_device())
            return held[0].data_ptr()

        values = (numpy.frombuffer(arguments(kernel, args, rows, place), loaded.value),)
    grid = (max(1, min(args.work.tiles, loaded.most_blocks)),)
    address = cuda_current_raw_stream(index)
    stream = _streams.get(address)
    if stream is None:
        stream = _streams[address] = _Stream(address)
    try:
        if cuda_get_device()() == index and loaded.current_device() == index:
            loaded.function(grid, (BLOCK,), values, 0, stream)
        else:
            with _on(index):
                loaded.function(grid, (BLOCK,), values, 0, stream)
    except loaded.errors as error:
        raise CudaError(
            f"could not be started on GPU {index} ({error}); the cause may be an earlier kernel",
            op=kernel.name,
            detail=str(error),
        ) from error
