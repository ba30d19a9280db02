"""Compile every CUDA kernel for this GPU: ptxas's registers, spills, stack and shared memory."""

from __future__ import annotations

import sys
import time

import torch

from .program import Program, open_device

DRY_ARCHITECTURE = "sm_90"


def main() -> int:
    program = Program(__doc__, "compile_kernels")
    arguments = program.parse()
    device = open_device(arguments.device)
    from collectives.kernels import cuda
    from tests.kernels import registers

    if arguments.device == "cuda":
        arch = cuda._arch(device.index)
    else:
        arch = DRY_ARCHITECTURE
    names = set()
    for source in registers.SOURCES[:1] if arguments.dry else registers.SOURCES:
        start = time.perf_counter()
        found = program.attempt(source, registers.usage, source, arch, arch=arch)
        for each in found or ():
            names.add(each.kernel)
            program.row(case="kernel", source=source, **each._asdict())
        program.row(case="source", source=source, arch=arch, seconds=round(time.perf_counter() - start, 2))
    missing = {each.name for each in registers.KERNELS} - names
    if missing and not arguments.dry and not arch.startswith("compute_"):
        program.failures += 1
        program.row(case="kernels", error=f"not compiled: {', '.join(sorted(missing))}")
    program.row(case="torch", version=torch.__version__, arch=arch, kernels=len(names))
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
