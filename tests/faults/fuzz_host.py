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

__all__ = ["TARGETS", "run_trial"]

BUILD = ROOT / "build" / "fuzz"
TARGETS = ("message", "admit", "knock", "serve", "join")
_FLAGS = "-std=c++17 -g1 -O1 -fno-omit-frame-pointer -pthread -Ikernels/include -Ihost -fsanitize=address,undefined"
# Not enum: what comes may be any number, and refusing the wrong ones is what the engine does.
_FLAGS += " -fno-sanitize=enum -fno-sanitize-recover=all"
_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
_CHUNK = 5000  # inputs of a process
LIMIT = 1200  # seconds of a process


def build() -> Path:
    """Compile what has changed; return the program."""
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), *_FLAGS.split()]
    BUILD.mkdir(parents=True, exist_ok=True)
    headers = [*ROOT.glob("host/*.h"), *ROOT.glob("kernels/include/coll/*.h")]

    def make(made: Path, *words, after: list[Path]) -> Path:
        if not made.exists() or made.stat().st_mtime < max(path.stat().st_mtime for path in after):
            subprocess.run([*compiler, *map(str, words), "-o", str(made)], cwd=ROOT, check=True)
        return made

    def compile_one(source: Path) -> Path:
        made = BUILD / f"{'_'.join(source.relative_to(ROOT).with_suffix('').parts)}.o"
        flags = ["-DCOLL_ISA=baseline"] if "kernels" in source.parts else []
        return make(made, *flags, "-c", source, after=[source, *headers])

    sources = [*ROOT.glob("host/*.cpp"), *ROOT.glob("kernels/host/*.cpp"), ROOT / "tests" / "faults" / "fuzz_host.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    return make(BUILD / "fuzz_host", *objects, after=objects)


def run_trial(seed: int, target: str, inputs: int) -> dict:
    """Run one target's inputs of a seed; return its row."""
    program, began, wrong = build(), time.monotonic(), []
    for first in range(0, inputs, _CHUNK):
        command = ["timeout", LIMIT, program, target, seed, first, min(_CHUNK, inputs - first)]
        done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, env={**os.environ, **_OPTIONS})
        if done.returncode:
            said = done.stderr[-3000:].decode(errors="replace")
            wrong.append(f"inputs from {first} on ended with {done.returncode}: {said}")
    seconds = round(time.monotonic() - began, 1)
    return {"target": target, "seed": seed, "inputs": inputs, "seconds": seconds, "wrong": wrong}
