"""The test of the tests: an error planted in a kernel or in the host engine makes a test fail that is there for it.

The places are those of COLL_MUTANT in kernels/ and host/, and the errors are compiled in by -DCOLL_MUTANTS alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS, CONFORMANCE, FAULTS = "tests/kernels/test_{}.py", "tests/conformance/test_{}.py", "tests/faults/test_{}.py"

# Number -> the file and the tests (pytest's -k) that must notice it. In CUDA sources: by the text that the shim runs.
HOST = {
    1: (KERNELS.format("bucketing"), "unaligned"),
    2: (KERNELS.format("bucketing"), "near_the_exact_norm"),
    3: (KERNELS.format("bucketing"), "copies_keep"),
    8: (KERNELS.format("reduction"), ""),
    9: (KERNELS.format("reduction"), ""),
    11: (KERNELS.format("quantization"), "draws"),
    12: (KERNELS.format("quantization"), "test_quantize"),
    13: (KERNELS.format("quantization"), "not_finite"),
    14: (KERNELS.format("wire_parts"), ""),
    17: ("tests/optim/test_optim.py", "steps_as_torch"),
    18: ("tests/optim/test_mixed_precision.py", "grad_scaler"),
    21: (CONFORMANCE.format("collectives"), ""),
    22: (FAULTS.format("mismatch"), ""),
    23: (CONFORMANCE.format("queues"), ""),
    24: (FAULTS.format("death"), ""),
    25: (FAULTS.format("timeouts"), ""),
}
CUDA = {
    4: (KERNELS.format("bucketing"), "unaligned"),
    5: (KERNELS.format("bucketing"), "not_finite"),
    6: (KERNELS.format("bucketing"), "statistics"),
    7: (KERNELS.format("bucketing"), "overflow"),
    10: (KERNELS.format("reduction"), ""),
    15: (KERNELS.format("quantization"), "sizes_by_the_cuda_text"),
    16: (KERNELS.format("quantization"), "by_the_cuda_text"),
    19: (KERNELS.format("optimizers"), "all_paths"),
}


@pytest.fixture(scope="module")
def library() -> str:
    """The host engine with all planted errors in it. Objects are kept for the next run."""
    folder = ROOT / "build" / "mutants"
    command = [sys.executable, "setup.py", "--quiet", "build_host", "--output", folder / "lib.so", "--objects", folder]
    env = {**os.environ, "CXXFLAGS": "-O1 -DCOLL_MUTANTS"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=500)
    return str(folder / "lib.so")


def run_tests(file: str, names: str, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", file, "-k", names]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=550)


def check_noticed(file: str, names: str, number: int, **env) -> None:
    done = run_tests(file, names, COLL_MUTANT=str(number), **env)
    assert done.returncode == 1, f"nothing noticed error {number}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"


def test_a_planted_error_is_noticed():
    """One of them in each run of the suite, in which the tests pass without it."""
    check_noticed(*CUDA[5], number=5)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [number for number in CUDA if number != 5])
def test_errors_of_cuda_kernels_are_noticed(number):
    check_noticed(*CUDA[number], number=number)


@pytest.mark.thorough
@pytest.mark.parametrize("number", HOST)
def test_errors_of_the_engine_are_noticed(number, library):
    check_noticed(*HOST[number], number=number, COLLECTIVES_HOST_LIBRARY=library)


def test_every_place_has_its_tests():
    sources = [
        path for folder in ("host", "kernels") for path in (ROOT / folder).rglob("*.*") if path.name != "mutant.h"
    ]
    numbers = [int(number) for path in sources for number in re.findall(r"COLL_MUTANT\((\d+),", path.read_text())]
    assert sorted(numbers) == sorted({*HOST, *CUDA})
