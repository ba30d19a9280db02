"""Planted errors in the kernels' launchers, and what runs the same cases with and without them: for test_mutants.py.

A mutant is a change of the text of one file of kernels/. The text is compiled as it would be for the tests: a CUDA
launcher round the shim, a host launcher into a library of its own. Cases are run on it, and what they leave in memory,
guard zones included, is compared with what the kernels of the built library leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from collectives.kernels import abi, cuda, execution

from . import shim

__all__ = ["TYPES", "Arena", "Case", "Mutant", "Outcome", "Rows", "compile_soon", "outcome", "plant", "text_of"]

GUARD, POISON = 0x55, 0x5C  # large numbers in every floating type, but no infinity: reading them shows, too
ZONE = 4096  # bytes of guard on each side of a buffer
LAUNCHES = ((1, 32, "forward"), (3, 256, "reverse"), (7, 96, 5))  # grid, block, order
SECONDS = 12  # for all cases of one mutant


class Mutant(NamedTuple):
    """One change of one file. ``before`` must be there exactly once; "": no change."""

    file: str  # below kernels/
    before: str
    after: str
    source: str = ""  # the launcher to compile, where ``file`` is a header: "cuda/cast.cu", "host/cast.cpp"

    @property
    def launcher(self) -> str:
        return self.source or self.file

    def __str__(self) -> str:
        def short(text: str) -> str:
            return re.sub(r"\s+", " ", text).strip()[:48]

        return f"{self.file}: {short(self.before)} -> {short(self.after) or 'nothing'}"


class Arena:
    """One piece of memory for all buffers of a case, with guard zones between them; the same in every run."""

    def __init__(self, nbytes: int = 8 << 20):
        self.memory = torch.full((nbytes,), GUARD, dtype=torch.uint8)
        self.used = -self.memory.data_ptr() % 4096 + ZONE
        self.start = self.used - ZONE
        self.kept: list[torch.Tensor] = []
        self.random = torch.Generator().manual_seed(1)

    def empty(self, count: int, dtype: torch.dtype, skip: int = 0) -> torch.Tensor:
        """A poisoned buffer, ``skip`` elements past a 64-byte boundary."""
        nbytes = count * dtype.itemsize
        first = self.used + skip * dtype.itemsize
        self.used = -(-(first + nbytes) // 64) * 64 + ZONE
        assert self.used <= self.memory.numel(), "the arena is too small"
        place = self.memory[first : first + nbytes]
        place.fill_(POISON)
        return place.view(dtype)

    def put(self, values: torch.Tensor, skip: int = 0) -> torch.Tensor:
        """A buffer that holds a copy of ``values``."""
        place = self.empty(values.numel(), values.dtype, skip)
        place.copy_(values)
        return place

    def normal(self, count: int, dtype: torch.dtype = torch.float32, skip: int = 0) -> torch.Tensor:
        """A buffer of random numbers of a normal distribution, rounded to ``dtype``."""
        return self.put(torch.randn(count, generator=self.random).to(dtype), skip)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Compare these, too; they lie elsewhere."""
        self.kept += tensors

    def image(self) -> list[bytes]:
        return [each.view(torch.uint8).numpy().tobytes() for each in (self.memory[self.start : self.used], *self.kept)]


Case = Callable[[Arena], None]  # fills the arena and calls kernels
Rows = list[tuple[Mutant, tuple[Case, ...]]]


def plant(file: str, source: str, cases: tuple[Case, ...], *changes: tuple[str, str]) -> Rows:
    """Mutants of one file. ``source``: the launcher to compile, where the file is a header; else ""."""
    return [(Mutant(file, before, after, source), cases) for before, after in changes]


def images(cases: tuple[Case, ...]) -> list[list[bytes]]:
    found = []
    for case in cases:
        arena = Arena()
        case(arena)
        found.append(arena.image())
    return found


@functools.cache
def expected(cases: tuple[Case, ...]) -> list[list[bytes]]:
    return images(cases)


# ---- Compiling.
def tree(mutant: Mutant) -> Path:
    """A copy of kernels/ with the change in it."""
    folder = Path(tempfile.mkdtemp(dir=shim.folder()))
    kernels = folder / "kernels"
    shutil.copytree(cuda.kernels_folder(), kernels)
    path = kernels / mutant.file
    text = path.read_text()
    if mutant.before:
        found = text.count(mutant.before)
        assert found == 1, f"{mutant.file} has {found} times what this mutant changes: {mutant.before!r}"
        path.write_text(text.replace(mutant.before, mutant.after))
    path = kernels / mutant.launcher
    path.write_text(LEFT_OUT.sub("", path.read_text()))
    return kernels


# Half of the types do for finding errors in loops, and compile in a third of the time.
LEFT_OUT = re.compile(r"^ *case [^:\n]*COLL_(?:F16|E4M3)\b[^:\n]*:(?!.*\bcase\b).*(?:break|return .*);\n", re.MULTILINE)
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2)

ENTRY = re.compile(r"^void COLL_HOST_NAME\((\w+)\)", re.MULTILINE)


class HostText:
    """The baseline form of one host launcher as a library of its own."""

    def __init__(self, kernels: Path, launcher: str):
        path = kernels / launcher
        entries = ENTRY.findall(path.read_text())
        export = 'extern "C" void run_coll_{0}(const void* a, int64_t b, int64_t c) {{ COLL_HOST_NAME({0})(a, b, c); }}'
        exports = "\n".join(export.format(name) for name in entries)
        source, library = path.with_suffix(".mutant.cpp"), path.with_suffix(".so")
        # What host/ defines for the launchers. The bigger cases stream.
        source.write_text(f'#include "{path}"\nint64_t coll_stream_from = 1 << 17;\n{exports}')
        include = f"-I{kernels / 'include'}"
        flags = "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -w -DCOLL_ISA=baseline".split()
        subprocess.run([*shim.compiler(), *flags, include, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        self.runs = {}
        for kernel in (each for each in vars(abi).values() if isinstance(each, abi.Kernel)):
            if kernel.name.removeprefix("coll_") in entries:
                run = self.runs[kernel.number] = getattr(loaded, f"run_{kernel.name}")
                run.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
        assert len(self.runs) == len(entries), f"{launcher}: not all of {entries} are in abi.py"

    def has(self, kernel: abi.Kernel) -> bool:
        return kernel.number in self.runs

    def run(self, kernel: abi.Kernel, args, rows, launch: tuple) -> None:
        """All tiles, in parts as threads take them."""
        tiles = args.work.tiles
        cuts = sorted({0, min(1, tiles), tiles // 2, tiles})
        for first, last in zip(cuts, cuts[1:], strict=False):
            self.runs[kernel.number](bytes(args), first, last)


class CudaText:
    """A source of kernels/cuda round the shim."""

    def __init__(self, kernels: Path, launcher: str):
        source = Path(launcher).name
        self.text = shim.Text(source, cuda.source_text(source, kernels), "-O0")  # compiling takes longer than running

    def has(self, kernel: abi.Kernel) -> bool:
        return kernel.name in self.text.names

    def run(self, kernel: abi.Kernel, args, rows, launch: tuple) -> None:
        grid, block, order = launch
        blocks = max(1, min(grid, args.work.tiles))
        self.text.run(kernel.name, shim.taken(kernel, args, rows), blocks, block, order, SECONDS / 4)


Text = HostText | CudaText


def text_of(mutant: Mutant) -> Text:
    """Compile a mutant."""
    return (HostText if mutant.launcher.startswith("host/") else CudaText)(tree(mutant), mutant.launcher)


_compilers = ThreadPoolExecutor(2)


@functools.cache
def compile_soon(mutant: Mutant) -> Future:
    return _compilers.submit(text_of, mutant)


# ---- Running.
@contextlib.contextmanager
def through(text: Text, launch: tuple) -> Iterator[list[str]]:
    """Run the kernels that a text has by it, others as usual; gives the names of the former."""
    usual = execution.run_on_host
    ran: list[str] = []

    def run_on_host(kernel: abi.Kernel, args, rows=None) -> None:
        if text.has(kernel):
            ran.append(kernel.name)
            text.run(kernel, args, rows, launch)
        else:
            usual(kernel, args, rows)

    with mock.patch.object(execution, "run_on_host", run_on_host):
        yield ran


class Outcome(NamedTuple):
    """What running the cases on a text came to."""

    same: bool
    detail: str


def difference(text: Text, cases: tuple[Case, ...]) -> str:
    """What is different from the kernels of the library; "" where nothing is."""
    for launch in LAUNCHES if isinstance(text, CudaText) else ("host",):
        for case, right in zip(cases, expected(cases), strict=True):
            with through(text, launch) as ran:
                try:
                    (image,) = images((case,))
                except shim.Fault as fault:
                    return f"{case.__name__} {launch}: {fault}"
            assert ran, f"{case.__name__} uses no kernel of this text"
            if image != right:
                return f"{case.__name__} {launch}: other bytes in memory"
    return ""


def outcome(text: Text, cases: tuple[Case, ...]) -> Outcome:
    """Run the cases in a forked child, which may crash or hang, and compare."""
    expected(cases)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receive)
            faulthandler.disable()  # a crash is an answer here
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            torch.set_num_threads(1)  # the parent's threads aren't here
            os.write(send, difference(text, cases).encode()[:4000])
            status = 0
        except BaseException as error:
            os.write(send, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(status)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        detail = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome(False, f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
    assert status == 0, detail
    return Outcome(not detail, detail)
