"""Stages of `make gpu`, in order of value: three parts of at most nine minutes."""

from __future__ import annotations

import dataclasses
import os

__all__ = ["PARTS", "PART_SECONDS", "STAGES", "Stage"]

PARTS = (1, 2, 3)
PART_SECONDS = 540.0

# The folders whose tests run on a GPU: below the front ends, and the front ends.
LOWER = ("tests/kernels", "tests/optim", "tests/comm", "tests/rendezvous", "tests/conformance", "tests/abi")
FRONT_ENDS = (
    "tests/gpu", "tests/compression", "tests/gradients", "tests/ddp", "tests/sharded", "tests/horovod", "tests/auto",
    "tests/tracing", "tests/bench", "tests/faults",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command under a time limit.

    ``words``: what follows the interpreter; "{device}", "{output}" (a file for rows), "{folder}"
    (where reports go) and "{dry}" (options of a dry run, or nothing) are filled in. ``seconds``:
    its share of its part's budget; what the stages before it have left over comes on top. ``dry``:
    the words of a dry run, where those differ, and ``dry_lacks``: what such a run then doesn't do.
    """

    name: str
    part: int
    seconds: float
    words: tuple[str, ...]
    dry: tuple[str, ...] | None = None
    dry_lacks: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def program(name: str, part: int, seconds: float, module: str, *options: str, lacks: str = "", **environment: str):
    """Return the stage of one of this folder's programs."""
    words = ("-m", f"benchmarks.gpu.{module}", "--device", "{device}", "--output", "{output}", *options, "{dry}")
    return Stage(name, part, seconds, words, None, lacks, tuple(environment.items()))


def tests(name: str, part: int, seconds: float, folders: tuple[str, ...], ranks: int, *options: str, jobs: int = 0):
    """Return the stage of tests marked `gpu`; a dry run collects them and runs none."""
    words = (
        "-m", "pytest", "-q", "-rfEs", "--tb=short", "--color=no", "-p", "benchmarks.gpu.selection", "-m",
        "gpu and not multigpu", "--gpu-ranks", str(ranks), "--gpu-output", "{output}",
        "--continue-on-collection-errors", *options, *folders,
    )  # fmt: skip
    beside = ("-n", str(min(jobs, os.cpu_count() or 1)), "--dist", "worksteal") if jobs else ()
    limits = ("--timeout", "150")
    return Stage(
        name, part, seconds, (*words, *beside, *limits), (*words, "--collect-only"),
        "the tests are collected; the suite runs their bodies on the simulated GPU and on the host engine",
        (("COLLECTIVES_REQUIRE_GPU", "1"),),
    )  # fmt: skip


def build(part: int, seconds: float) -> Stage:
    """Return the stage that builds in place; each part has one, since parts may run on different
    machines.
    """
    return Stage(
        f"build{part}", part, seconds, ("setup.py", "-q", "build_ext", "--inplace"), ("setup.py", "--name"),
        "setup.py is executed; nothing is built",
    )  # fmt: skip


STAGES = (
    build(1, 60),
    program("versions", 1, 30, "versions"),
    program("copy", 1, 40, "copy_ceiling", lacks="small copies: no rate of a GPU"),
    program("compile", 1, 60, "compile_kernels", lacks="one source, for sm_90"),
    tests("dlpack", 1, 30, ("tests/gpu/test_streams.py",), 0),
    tests("kernels", 1, 120, LOWER[:1], 0, jobs=12),
    tests("unit", 1, 80, LOWER[1:], 1, jobs=12),
    program("examples", 1, 120, "examples", lacks="one example, on the CPU"),
    build(2, 120),
    tests("front ends, 1 rank", 2, 200, FRONT_ENDS, 1, jobs=12),
    tests("front ends, 2 ranks", 2, 150, FRONT_ENDS, 2, jobs=4),
    tests("units, 2 ranks", 2, 70, LOWER[1:], 2, jobs=4),
    build(3, 120),
    program("sync audit", 3, 60, "sync_audit", lacks="torch's own check, which needs CUDA"),
    program("memcheck", 3, 50, "sanitizer", "--tool", "memcheck", lacks="the kernels without compute-sanitizer"),
    program("racecheck", 3, 50, "sanitizer", "--tool", "racecheck", lacks="the kernels without compute-sanitizer"),
    program("kernel times", 3, 80, "kernel_times", lacks="small arrays, no graphs"),
    program("host times", 3, 50, "host_times", lacks="few calls"),
    program("steps, 1 rank", 3, 50, "steps", "--ranks", "1", lacks="few steps of a small model"),
    program("steps, 2 ranks", 3, 50, "steps", "--ranks", "2", lacks="few steps of a small model"),
    program("predicted", 3, 10, "predicted", "--report", "{folder}/report.json", lacks="measurements of a GPU"),
    program("trace", 3, 20, "trace", "--trace", "{folder}/trace.json.gz", lacks="the GPU's own activities"),
)
