"""The text of the CUDA kernels run on host memory: compiled by the host compiler round a small prelude.

A kernel's text is what NVRTC gets (``source_text``). ``shim/prelude.h`` gives it threadIdx, barriers and the like;
``shim/scheduler.cpp`` runs its blocks one after the other and a block's threads in turn from barrier to barrier.
Shared memory holds garbage at first, and so do arrays of a thread (g++ 12). ``Fault`` is raised for what a GPU would
not forgive: a barrier that some threads miss, a misaligned address, an index out of bounds, a hang.

    with shim.cuda_text(grid=3, block=64, order="reverse"):
        kernels.pack(tensors, flat)  # CPU tensors, the CUDA kernels' text
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from collectives.kernels import abi, cuda, execution
from collectives.kernels.rows import Rows

__all__ = ["ORDERS", "Fault", "Text", "cuda_text", "taken"]

HERE = Path(__file__).resolve().parent / "shim"
KEPT = HERE.parents[2] / "build" / "shim"  # what is compiled; `make clean` removes it
ORDERS = ("forward", "reverse", 1)  # a number: shuffled, by this seed
LIMIT_S = 60.0  # of processor time for one launch

# As on the device: no contraction, and no assumption about types behind pointers.
FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -fno-strict-aliasing -w".split()
CHECKS = ["-fsanitize=alignment,null,bounds,shift,float-cast-overflow,integer-divide-by-zero"]
KERNEL = re.compile(r"^COLL_KERNEL(?:_HELD\(\w+\))?\s+(\w+)\s*\(", re.MULTILINE)


_running = threading.Lock()  # a library runs one kernel at a time


class Fault(Exception):
    """A kernel did what a GPU would not forgive."""


@functools.cache
def folder() -> Path:
    """A folder for what is compiled, for this process."""
    path = Path(tempfile.mkdtemp(prefix="coll-shim-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(path, ignore_errors=True))
    return path


@functools.cache
def compiler() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get("CXX", "")) or ["g++"])


@functools.cache
def poison() -> tuple[str, ...]:
    """The flag that fills variables with garbage at first, where the compiler has it (g++ 12)."""
    flag = "-ftrivial-auto-var-init=pattern"
    command = [*compiler(), flag, "-x", "c++", "-fsyntax-only", "/dev/null"]
    return (flag,) if subprocess.run(command, capture_output=True).returncode == 0 else ()


@contextlib.contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """Give a path to write the target at, or None where it is there. Another process that wants it waits."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        own = target.with_name(f"new.{target.name}")
        yield own
        own.replace(target)


def compiled(name: str, text: str, options: tuple[str, ...]) -> Path:
    """Compile a text into an object, once: it takes up to ten seconds, and is kept for the next run."""
    planted = ["-DCOLL_MUTANTS"] if "COLL_MUTANT" in os.environ else []  # tests/harness/test_mutants.py
    command = [*compiler(), *FLAGS, *planted, *options, f"-I{HERE}", "-c", "-x", "c++"]
    headers = [path.read_text() for path in sorted(HERE.glob("*.*"))]
    key = hashlib.sha256("\0".join([*command, *headers, text]).encode()).hexdigest()[:16]
    target = KEPT / f"{name}.{key}.o"
    with made_once(target) as own:
        if own:
            source = own.with_suffix(".cpp")
            source.write_text(text)
            subprocess.run([*command, str(source), "-o", str(own)], check=True)
            source.unlink()
    return target


class Text:
    """One source of kernels/cuda as a library of the host; ``text``: another text in its place."""

    def __init__(self, source: str, text: str | None = None, optimize: str = "-O1"):
        text = cuda.source_text(source) if text is None else text
        self.names = KERNEL.findall(text)
        table = "".join(f"SHIM_KERNEL({name})\n" for name in self.names)
        after = f"\nconst shim_kernel shim_kernels[] = {{\n{table}{{}}}};\n"
        whole = f'#include "prelude.h"\n#line 1 "{source}"\n{text}{after}'
        scheduler = compiled("scheduler", (HERE / "scheduler.cpp").read_text(), ("-O1", "-U_FORTIFY_SOURCE"))
        kernels = compiled(source, whole, (optimize, *CHECKS, *poison()))
        library = kernels.with_suffix(".so")
        with made_once(library) as own:
            if own:
                subprocess.run([*compiler(), "-shared", str(kernels), str(scheduler), "-o", str(own)], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.shim_args.restype = ctypes.c_size_t
        self.library.shim_args.argtypes = [ctypes.c_char_p]
        self.library.shim_run.restype = ctypes.c_char_p
        self.library.shim_run.argtypes = [
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_int,
        ]

    def run(self, name: str, args: bytes, grid: int, block: int, order: str | int = "forward", limit_s=LIMIT_S) -> None:
        """Run a kernel on a struct of arguments whose addresses are host memory; raise ``Fault``."""
        wanted = self.library.shim_args(name.encode())
        if wanted != len(args):
            raise Fault(f"{name} takes {wanted} bytes of arguments, not {len(args)}")
        number = {"forward": 0, "reverse": 1}.get(order, 2)
        seed = order if number == 2 else 0
        with _running:
            error = self.library.shim_run(name.encode(), args, grid, block, number, seed, int(limit_s * 1000))
        if error:
            raise Fault(f"{name}, order {order}: {error.decode()}")


@functools.cache
def text_of(source: str) -> Text:
    return Text(source)


def taken(kernel: abi.Kernel, args, rows: Rows | None) -> bytes:
    """Give what a launch on a GPU gives a kernel; rows that have no room in it are read where they lie."""
    return bytes(cuda.arguments(kernel, args, rows, lambda: rows.address))


@contextlib.contextmanager
def cuda_text(
    grid: int = 3, block: int = 64, order: str | int = "forward", texts: Callable[[str], Text] = text_of
) -> Iterator[list[str]]:
    """Run the text of the CUDA kernels wherever a kernel would run on the host; gives the names of those that ran.

    ``grid``: blocks, at most one a tile, as on a GPU. ``block``: threads, up to 256.
    """
    ran: list[str] = []

    def run_on_host(kernel: abi.Kernel, args, rows: Rows | None = None) -> None:
        ran.append(kernel.name)
        blocks = max(1, min(grid, args.work.tiles))
        texts(kernel.source).run(kernel.name, taken(kernel, args, rows), blocks, block, order)

    with mock.patch.object(execution, "run_on_host", run_on_host):
        yield ran
