"""Fuzzing of the host engine's bootstrap: the program of fuzz_host.cpp, under the address and undefined-behaviour
sanitizers.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.rank_process import ROOT

__all__ = ["TARGETS", "build", "run_trial"]

BUILD = ROOT / "build" / "fuzz"
TARGETS = ("message", "admit", "knock", "serve", "join")
_FLAGS = "-std=c++17 -g1 -O1 -fno-omit-frame-pointer -pthread -Ikernels/include -Ihost -fsanitize=address,undefined"
# Not enum: what comes may be any number, and refusing the wrong ones is what the engine does.
_FLAGS += " -fno-sanitize=enum -fno-sanitize-recover=all"
_CHUNK = 5000  # inputs of a process
LIMIT = 1200.0  # seconds of a process


def build() -> Path:
    """Compile what has changed; return the program."""
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), *_FLAGS.split()]
    BUILD.mkdir(parents=True, exist_ok=True)
    headers = [*ROOT.glob("host/*.h"), *ROOT.glob("kernels/include/coll/*.h")]
    newest = max(path.stat().st_mtime for path in headers)

    def compile_one(source: Path) -> Path:
        made = BUILD / f"{'_'.join(source.relative_to(ROOT).with_suffix('').parts)}.o"
        if not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            flags = ["-DCOLL_ISA=baseline"] if "kernels" in source.parts else []
            subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(made)], cwd=ROOT, check=True)
        return made

    sources = [*ROOT.glob("host/*.cpp"), *ROOT.glob("kernels/host/*.cpp"), ROOT / "tests" / "faults" / "fuzz_host.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = BUILD / "fuzz_host"
    if not program.exists() or program.stat().st_mtime < max(made.stat().st_mtime for made in objects):
        subprocess.run([*compiler, *map(str, objects), "-o", str(program)], cwd=ROOT, check=True)
    return program


def run_trial(seed: int, target: str, inputs: int) -> dict:
    """Run one target's inputs of a seed; return its row."""
    program, began = build(), time.monotonic()
    row = {"trial": "fuzz", "target": target, "seed": seed, "inputs": inputs, "read": 0, "refused": 0, "wrong": []}
    for first in range(0, inputs, _CHUNK):
        command = [str(program), target, str(seed), str(first), str(min(_CHUNK, inputs - first))]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False,
                env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            row["wrong"].append(f"inputs from {first} on did not end within {LIMIT:g} s")
            continue
        if done.returncode:
            row["wrong"].append(f"inputs from {first} on ended with {done.returncode}: {done.stderr[-3000:]}")
            continue
        _, read, refused = map(int, done.stdout.split())
        row["read"] += read
        row["refused"] += refused
    return {**row, "seconds": round(time.monotonic() - began, 1)}
