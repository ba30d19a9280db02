"""Runs an example as people run it: by a launcher, in a folder of its own, with its output in pipes."""

import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import launching
from tests.launch.srun import variables
from tests.programs import ForkedProgram

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 150  # limit of one run; the longest takes 10 to 20 on two idle cores


def login_environment():
    """Return what a fresh login has, and nothing that a launcher, this test process or its shell has set.

    The package is found where it is installed; only where this checkout isn't, PYTHONPATH names it.
    """
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    return {**env, "OMP_NUM_THREADS": "1"} | ({} if _installed() else {"PYTHONPATH": str(ROOT)})


@functools.cache
def _installed():
    """Whether `import collectives` gives this checkout's package with no help."""
    find = "import importlib.util as u; found = u.find_spec('collectives'); print(found and found.origin)"
    words = [sys.executable, "-c", find]
    out = subprocess.run(words, cwd="/", env={}, capture_output=True, text=True, timeout=60, check=True).stdout
    return out.strip() == str(ROOT / "collectives" / "__init__.py")


def run_example(launcher, name, *options, cwd):
    """Run an example in ``cwd``; give its exit status, stdout and stderr. Nothing of it outlives the time limit."""
    limit = ["timeout", "--kill-after=20", str(SECONDS)]  # a launcher ends its ranks at the signal before
    words = [*limit, *launcher, sys.executable, str(EXAMPLES / name), *options]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(words, cwd=cwd, env=login_environment(), **pipes)
    assert done.returncode != 124, f"{words} did not end within {SECONDS} s:\n{done.stderr}"
    return done.returncode, done.stdout, done.stderr


def torchrun_variables(rank, ranks, port):
    """What torchrun gives a rank of one machine."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in given.items()}


def fork_example(name, *options, cwd, ranks=2, variables=variables):
    """Run an example as srun would, on ranks that are forked with their imports done; give what `run_example` gives.

    The imports take longer than most examples. One of them is run under each launcher, the others so.
    `variables`: a launcher's, as a function of the rank, their number, and a port that is free.
    """
    words, port = [str(EXAMPLES / name), *options], launching.free_port()  # to srun's it is the number of the job
    processes = []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            for rank in range(ranks):
                env = {**login_environment(), **variables(rank, ranks, port)}
                processes.append(ForkedProgram(words, env, out, err, cwd))
            deadline = time.monotonic() + SECONDS
            codes = [process.wait(max(0, deadline - time.monotonic())) for process in processes]
            out.seek(0)
            err.seek(0)
            return max(map(abs, codes)), out.read(), err.read()
        except subprocess.TimeoutExpired:
            err.seek(0)
            pytest.fail(f"{words} did not end within {SECONDS} s:\n{err.read()}")
        finally:
            for process in processes:
                process.kill()


def torchrun(ranks):
    """The command of torchrun, to which the program's own is added."""
    return launching.torchrun(ranks, "--master-port", launching.free_port(), "--no-python")


def start_two():
    """Return the command that starts two ranks soonest: a launcher that imports no torch of its own."""
    return [sys.executable, launching.SRUN, "-n", "2"]
