"""Runs an example as people run it: by a launcher, in a folder of its own, with its output in pipes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 150  # limit of one run; the longest takes 10 to 20 on two idle cores


def clean_environment():
    """Return this process's environment with nothing in it that a launcher sets."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*launchers, "COLLECTIVES_"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_example(launcher, name, *options, cwd):
    """Run an example in ``cwd``; give its exit status, stdout and stderr. Nothing of it outlives the time limit."""
    words = [*launcher, sys.executable, str(EXAMPLES / name), *options]
    with subprocess.Popen(
        words,
        cwd=cwd,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks at this, which SIGKILL would leave behind
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{words} did not end within {SECONDS} s")
    return process.returncode, out, err


def torchrun(ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    return [*run, "--no-python"]
