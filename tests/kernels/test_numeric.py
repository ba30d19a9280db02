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
def program(isa: str, change: tuple[str, str] = ("", "")) -> Path:
    """Compile the check, with one change of numeric.h."""
    include = cuda.kernels_folder() / "include"
    folder = shim.folder() / f"numeric-{isa}-{abs(hash(change))}"
    (folder / "coll").mkdir(parents=True)
    for name in ("numeric.h", "ops.h", "kernel_abi.h", "host_blocks.h"):
        text = (include / "coll" / name).read_text()
        (folder / "coll" / name).write_text(text.replace(*change) if change[0] else text)
    target = folder / "check"
    source = Path(__file__).with_name("numeric_check.cpp")
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", *OPTIONS[isa], f"-I{folder}"]
    subprocess.run([*shim.compiler(), *flags, str(source), "-o", str(target)], check=True)
    return target


def run(isa: str, step: int, change: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess:
    with contextlib.ExitStack() as stack:
        stack.callback(kernels.use_isa)
        try:
            kernels.use_isa(isa)
        except InvalidArgument:
            pytest.skip(f"this machine has no {isa}")
    return subprocess.run([str(program(isa, change)), str(step)], capture_output=True, text=True, timeout=600)


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


CHANGES = {
    "a limit": ("0x477ff000", "0x477fefff"),
    "no ties to even": ("+ 0x7fffu + ((u >> 16) & 1u)", "+ 0x8000u"),
    "the exponent of subnormals": ("(128 - kBias) << 23", "(127 - kBias) << 23"),
    "the largest fp8": ("0x43e00000, 0x7f", "0x43e80001, 0x7f"),
    "fp8's NaN": ("0x43f00000, 0x7fc00000", "0x43f00001, 0x7fc00000"),
    "a NaN that isn't seen": ("a > 0x7f800000 ?", "a > 0x7f800001 ?"),
}


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("name", CHANGES)
def test_planted_errors_are_caught(name):
    done = run("baseline", 1009, CHANGES[name])
    assert done.returncode == 1, done.stdout
