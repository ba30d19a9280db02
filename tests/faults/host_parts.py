"""The program of host_parts.cpp, compiled once: parts of the host engine that no exported function shows."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.rank_process import ROOT

_SOURCES = ("tests/faults/host_parts.cpp", "host/cgroups.cpp", "host/hmac.cpp")


@functools.cache
def _program() -> str:
    folder = tempfile.mkdtemp(prefix="host-parts-")
    path = str(Path(folder, "host_parts"))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    flags = "-std=c++17 -O1 -Wall -Wextra -fsanitize=undefined -fno-sanitize-recover=all -Ihost -Ikernels/include".split()
    subprocess.run([*compiler, *flags, *_SOURCES, "-o", path], cwd=ROOT, check=True, timeout=120)
    return path


def call_part(*words: str) -> str:
    """Return the line that the program prints for these arguments."""
    done = subprocess.run([_program(), *words], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
