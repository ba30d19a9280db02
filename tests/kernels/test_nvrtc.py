"""Every CUDA kernel through NVRTC for three architectures: registers, no spill, no stack, and IEEE arithmetic.

It needs NVRTC but no GPU; without NVRTC it fails. The table of registers: ``python -m tests.kernels.registers``.
"""

from __future__ import annotations

import re
import shutil
from ctypes import sizeof
from pathlib import Path

import pytest

from collectives.kernels import cuda
from collectives.kernels.execution import library_path

from .in_flight import CASES, LEAST, TOO_FEW, bytes_in_flight, loads_of
from .registers import ARCHITECTURES, KERNELS, SOURCES, usage

PARAMETERS = 4096  # bytes of arguments that every CUDA takes
SHARED = 48 << 10  # bytes of static shared memory in a block
REGISTERS = 65536  # of a multiprocessor


def test_every_kernel_has_a_source():
    assert {kernel.source for kernel in KERNELS} == set(SOURCES)
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize(
    "arch", [arch if arch == "sm_90" else pytest.param(arch, marks=pytest.mark.thorough) for arch in ARCHITECTURES]
)
@pytest.mark.parametrize("source", SOURCES)
def test_registers(source, arch, record_property):
    used = usage(source, arch)
    assert {each.kernel for each in used} == {kernel.name for kernel in KERNELS if kernel.source == source}
    for each in used:
        record_property(f"{each.kernel} {arch}", each._asdict())
        print(each.row())
        assert (each.spill_stores, each.spill_loads, each.stack) == (0, 0, 0), each.row()
        assert each.shared <= SHARED, each.row()
        # Two blocks on a multiprocessor at least, or nothing hides the memory's latency; of fp64 one block's loads do.
        blocks = 1 if each.kernel == "coll_cast_wide" else 2
        assert each.registers * cuda.BLOCK * blocks <= REGISTERS, each.row()
        if each.kernel in CASES:
            few = bytes_in_flight(each) < LEAST
            assert few == ((each.kernel, arch) in TOO_FEW), f"{each.row()}: {bytes_in_flight(each)} bytes in flight"


def test_every_kernel_but_the_last_step_of_the_statistics_has_its_bytes_counted():
    assert {kernel.name for kernel in KERNELS} - set(CASES) == {"coll_finish"}  # one block, once a reduction
    assert set(CASES) <= {kernel.name for kernel in KERNELS} and {kernel for kernel, _ in TOO_FEW} <= set(CASES)


@pytest.mark.thorough
@pytest.mark.parametrize("source", SOURCES)
def test_loads_of_a_thread(source):
    """All that `in_flight` counts is on its way before a thread waits, by the PTX."""
    for kernel, nbytes in loads_of(source).items():
        assert kernel not in CASES or nbytes >= CASES[kernel].loads, f"{kernel}: {nbytes}"


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
def test_fp8_is_rounded_by_the_instruction_where_there_is_one(arch):
    ptx = cuda.compile_source("quantize.cu", arch)[0].decode()
    for name in ("e4m3x2", "e5m2x2"):
        assert (f"cvt.rn.satfinite.{name}.f32" in ptx) == (arch == "compute_90")


# What makes a device's bits differ from the host's: contraction, flushed subnormals, approximations.
INEXACT = re.compile(r"^.*\b(?:fma|mad)\.(?:\w+\.)*f(?:32|64)\b.*$|^.*\.(?:ftz|approx|full)\b.*$", re.MULTILINE)


# A fused multiplication that the source asks for by name is the same on the host.
NO_FMA = "#define fma(a, b, c) (a)\n#define fmaf(a, b, c) (a)\n"


@pytest.mark.thorough
@pytest.mark.parametrize("source", SOURCES)
def test_arithmetic_is_ieee(source, monkeypatch):
    text = NO_FMA + cuda.source_text(source)
    monkeypatch.setattr(cuda, "source_text", lambda name: text)
    assert not INEXACT.findall(cuda.compile_source(source, "compute_80")[0].decode())


def test_the_look_at_arithmetic_sees(monkeypatch):
    """What the test above looks for, NVRTC writes where our options are not in force."""
    text = 'extern "C" __global__ void k(float* a) { a[0] = a[1] * a[2] + a[3] / a[4] + sqrtf(a[5]); }'
    monkeypatch.setattr(cuda, "source_text", lambda name: text)
    assert not INEXACT.findall(cuda.compile_source("k.cu", "compute_80")[0].decode())
    for option in ("-fmad=true", "-ftz=true", "-prec-div=false", "-prec-sqrt=false"):
        assert INEXACT.findall(cuda.compile_source("k.cu", "compute_80", option)[0].decode()), option


def test_arguments_fit():
    assert all(sizeof(kernel.args) <= PARAMETERS for kernel in KERNELS)


def test_what_nvrtc_opens_by_its_bare_name_is_loaded(tmp_path):
    """CUDA 13's wheel has its builtins beside NVRTC, where nothing looks for them."""
    there = tmp_path / "libnvrtc-builtins.so.99.1"
    shutil.copy(library_path(), there)
    cuda._load_builtins({str(tmp_path / "libnvrtc.so.99"), str(tmp_path / "elsewhere" / "libnvrtc.so.99")}, (99, 1))
    assert str(there) in Path("/proc/self/maps").read_text()
