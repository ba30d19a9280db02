"""The program of host_parts.cpp, compiled once: parts of the host engine that no exported function shows."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.rank_process import ROOT

_FLAGS = "-std=c++17 -O0 -Wall -Wextra -fsanitize=undefined -fno-sanitize-recover=all -Ihost -Ikernels/include"
_SOURCES = ("tests/faults/host_parts.cpp", "host/cgroups.cpp", "host/hmac.cpp")
_folder = tempfile.TemporaryDirectory(prefix="host-parts-")


@functools.cache
def _program() -> str:
    path = str(Path(_folder.name, "host_parts"))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    subprocess.run([*compiler, *_FLAGS.split(), *_SOURCES, "-o", path], cwd=ROOT, check=True, timeout=120)
    return path


def call_part(what: str, calls: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines that the program prints for these pairs of arguments."""
    lines = "".join(f"{what} {first or '-'} {second or '-'}\n" for first, second in calls)
    done = subprocess.run([_program()], input=lines, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.split()
