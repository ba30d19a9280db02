"""What ptxas says of every CUDA kernel: registers, spills, stack, shared memory. ``python -m tests.kernels.registers``

Compiled by NVRTC with the options of production; no GPU is needed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from collectives.kernels import abi, cuda

from . import shim

__all__ = ["ARCHITECTURES", "KERNELS", "SOURCES", "Usage", "usage"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SOURCES = tuple(sorted(path.name for path in Path(cuda.kernels_folder(), "cuda").glob("*.cu")))
KERNELS = tuple(each for each in vars(abi).values() if isinstance(each, abi.Kernel))


class Usage(NamedTuple):
    """One kernel on one architecture; bytes, except for the registers of a thread."""

    kernel: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int

    def row(self) -> str:
        return (
            f"{self.kernel:20} {self.arch:8} {self.registers:9} {self.spill_stores + self.spill_loads:7} "
            f"{self.stack:7} {self.shared:7}"
        )


HEADING = f"{'kernel':20} {'arch':8} {'registers':>9} {'spilled':>7} {'stack':>7} {'shared':>7}"
ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)


def number(pattern: str, text: str, default: int | None = None) -> int:
    found = re.search(pattern, text)
    if found is None:
        assert default is not None, f"ptxas says nothing like {pattern!r}:\n{text}"
        return default
    return int(found[1])


def report(source: str, arch: str) -> str:
    """What ptxas says of a source: up to a minute, so it is kept for the next run, as the shim's objects are."""
    key = repr((cuda.source_text(source), cuda.OPTIONS, cuda._nvrtc()[1]))
    target = shim.KEPT / f"{source}.{arch}.{hashlib.sha256(key.encode()).hexdigest()[:16]}.txt"
    with shim.made_once(target) as own:
        if own:
            own.write_text(cuda.compile_source(source, arch, "--ptxas-options=-v")[1])
    return target.read_text()


@functools.cache
def usage(source: str, arch: str) -> tuple[Usage, ...]:
    """What the kernels of a source use on an architecture."""
    log = report(source, arch)
    return tuple(
        Usage(
            name,
            arch,
            number(r"Used (\d+) registers", text),
            number(r"(\d+) bytes spill stores", text),
            number(r"(\d+) bytes spill loads", text),
            number(r"(\d+) bytes stack frame", text),
            number(r"(\d+) bytes smem", text, 0),
        )
        for name, text in ENTRY.findall(log)
    )


def main() -> None:
    print(HEADING)
    for source in SOURCES:
        for arch in ARCHITECTURES:
            for each in usage(source, arch):
                print(each.row())


if __name__ == "__main__":
    main()
