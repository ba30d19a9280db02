"""The thread pool of the host kernels: the same results for any number of threads and callers, and after a fork."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from tests.programs import run_python

BIG = 300 * 4096 + 7  # elements: past the size from which a kernel is shared out


@pytest.fixture(autouse=True)
def as_before():
    yield
    kernels.set_num_threads(None)


def packed(threads: int | None, source: torch.Tensor):
    kernels.set_num_threads(threads)
    flat = torch.empty(BIG + 16, dtype=torch.bfloat16)
    statistics = kernels.Statistics()
    kernels.pack([source], flat, scale=0.75, statistics=statistics)
    return flat[:BIG], statistics.sum_of_squares.item(), statistics.nonfinite.item()


@pytest.fixture(scope="module")
def source():
    values = torch.randn(BIG, generator=torch.Generator().manual_seed(1))
    values[::99_991] = float("inf")
    return values


def test_results_do_not_depend_on_the_number_of_threads(source):
    finite = torch.where(source.isfinite(), source, 1.0)
    for values in (source, finite):
        expected = packed(1, values)
        assert torch.equal(expected[0], (values * 0.75).bfloat16())
        assert expected[2] == int((~values.isfinite()).sum())
        for threads in (2, 3, 8, None):
            found = packed(threads, values)
            assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:], threads


def test_several_threads_of_python_at_once(source):
    """One call has the pool; the others do their work alone and don't wait for it."""
    expected = packed(2, source)[0]
    failures, rounds = [], []

    def many():
        try:
            for _ in range(20):
                flat = torch.empty(BIG + 16, dtype=torch.bfloat16)
                kernels.pack([source], flat, scale=0.75)
                if not torch.equal(flat[:BIG], expected):
                    failures.append("other bits")
                rounds.append(1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert failures == [] and len(rounds) == 4 * 20


FORKS = """
import os, signal, torch
from collectives import kernels
torch.set_num_threads(1)  # its own threads don't survive a fork
kernels.set_num_threads(2)
source = torch.ones(300 * 4096); flat = torch.empty(300 * 4096)
kernels.pack([source], flat, scale=2.0)
for generation in range(3):  # a child, its child, and that one's
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        break
    signal.alarm(30)
    flat.zero_()
    kernels.pack([source], flat, scale=2.0)
    assert bool((flat == 2).all())
    workers = len(os.listdir("/proc/self/task"))
    assert workers == 2, workers  # a worker of its own
"""


def test_a_forked_child_starts_threads_of_its_own():
    done = run_python(FORKS)
    assert done.returncode == 0, done.stderr


TELL = "from collectives import kernels; print(kernels.get_num_threads())"


def test_the_variable_and_the_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    clean = {"COLLECTIVES_KERNEL_THREADS": "", "RANK": "", "WORLD_SIZE": ""}
    assert run_python(TELL, **clean | {"COLLECTIVES_KERNEL_THREADS": "5"}).stdout == "5\n"
    assert run_python(TELL, **clean).stdout == f"{min(cores, 8)}\n"
    ranks = {"RANK": "0", "WORLD_SIZE": str(cores), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(cores)}
    assert run_python(TELL, **clean | ranks).stdout == "1\n"


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "2147483648", "9" * 50])
def test_a_variable_that_is_no_number_is_refused(monkeypatch, value):
    monkeypatch.setenv("COLLECTIVES_KERNEL_THREADS", value)
    with pytest.raises(InvalidArgument, match=f"COLLECTIVES_KERNEL_THREADS={value}: must be a whole number from 1"):
        kernels.get_num_threads()


@pytest.mark.parametrize("value", [0, -2, 1.0, True, "2", 1 << 31, pytest.param(10**5000, id="of 5000 digits")])
def test_a_number_of_threads_that_is_none_is_refused(value):
    with pytest.raises(InvalidArgument, match="number of threads must be a whole number from 1"):
        kernels.set_num_threads(value)


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    with pytest.raises(InvalidArgument, match="instruction set 'sse9'"):
        kernels.use_isa("sse9")
    for wrong in (5, b"avx2", "", "avx2\0"):
        with pytest.raises(InvalidArgument, match="the instruction set must be a name"):
            kernels.use_isa(wrong)
    monkeypatch.setenv("COLLECTIVES_ISA", "sse9")
    with pytest.raises(InvalidArgument, match="COLLECTIVES_ISA=sse9"):
        kernels.use_isa()
    monkeypatch.setenv("COLLECTIVES_ISA", "baseline")
    assert kernels.use_isa() == "baseline"
    monkeypatch.delenv("COLLECTIVES_ISA")
    assert kernels.use_isa() in ("baseline", "avx2", "avx512")


def test_a_library_of_another_version_is_refused(tmp_path):
    program = "from collectives import kernels; kernels.use_isa()"
    other = tmp_path / "libother.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(other)],
        input='extern "C" { int collKernelRun() { return 0; } unsigned long collKernelArgsSize(int) { return 7; } '
        "const char* collKernelIsa(const char*) { return 0; } }",
        text=True,
        check=True,
        timeout=60,
    )
    done = run_python(program, COLLECTIVES_HOST_LIBRARY=str(other))
    assert "EngineUnavailable" in done.stderr and "coll_cast takes 7 bytes there" in done.stderr
    done = run_python(program, COLLECTIVES_HOST_LIBRARY=str(tmp_path / "none.so"))
    assert "EngineUnavailable" in done.stderr and "none.so" in done.stderr
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(other)], check=True, timeout=60)
    done = run_python(program, COLLECTIVES_HOST_LIBRARY=str(other))
    assert "EngineUnavailable" in done.stderr and "has no collKernelRun" in done.stderr
