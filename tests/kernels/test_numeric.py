"""The small floating-point formats against their definitions: every value of fp32, on every instruction set."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from pathlib import Path

import pytest

from collectives import kernels
from collectives.errors import InvalidArgument
from collectives.kernels import cuda

from . import shim

# As setup.py compiles kernels/host for each of them.
OPTIONS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
}


@functools.cache
def program(isa: str) -> Path:
    """Compile the check."""
    target = shim.folder() / f"numeric-{isa}"
    source = Path(__file__).with_name("numeric_check.cpp")
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", *OPTIONS[isa], f"-I{cuda.kernels_folder() / 'include'}"]
    subprocess.run([*shim.compiler(), *flags, str(source), "-o", str(target)], check=True)
    return target


def run(isa: str, step: int) -> subprocess.CompletedProcess:
    with contextlib.ExitStack() as stack:
        stack.callback(kernels.use_isa)
        try:
            kernels.use_isa(isa)
        except InvalidArgument:
            pytest.skip(f"this machine has no {isa}")
    return subprocess.run([str(program(isa)), str(step)], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("isa", OPTIONS)
def test_conversions(isa):
    """Each 61st value, and those round every boundary between two results."""
    done = run(isa, 61)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("isa", OPTIONS)
def test_all_conversions(isa):
    done = run(isa, 1)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) >= 4 * 2**32
