"""Launchers and ranks of their own for tests: environments, ports, command lines, a hard time limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.programs import FORKING, ForkedProgram

ROOT = str(Path(__file__).resolve().parents[1])
LAUNCH = Path(__file__).with_name("launch")
WORKER = str(LAUNCH / "worker.py")  # a rank of tests/launch
SRUN = str(LAUNCH / "srun.py")  # stands for Slurm's
LIMIT_S = 90
_LAUNCHERS = re.compile(
    r"(OMPI|PMIX?|PRTE|HYD|MPI|SLURM|TORCHELASTIC|MASTER|GROUP|ROLE|LOCAL)_|(RANK|WORLD_SIZE|COLLECTIVES_.*)$"
)


def clean_environment(**variables) -> dict[str, str]:
    """This process's environment with no trace of a launcher, and these variables."""
    env = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
    for name in ("COLLECTIVES_HOST_LIBRARY", "COLLECTIVES_NCCL_LIBRARY"):  # an instrumented build stays in use
        if name in os.environ:
            env[name] = os.environ[name]
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLLECTIVES_ENGINE": "host"}
    return env | {name: str(value) for name, value in variables.items()}


def worker(*arguments) -> list[str]:
    """The command line of one rank."""
    return [sys.executable, WORKER, *map(str, arguments)]


def forked(command: list[str]) -> list[str]:
    """The command line of a launcher by this Python, changed so that its ranks and itself are forked with torch."""
    return [sys.executable, FORKING, *command[1:]]


def _start(command, env, out):
    """Start a command line: a worker's without a launcher, and one of `forked`, in a process that has torch already."""
    if command[0] == sys.executable and command[1] in (WORKER, FORKING):
        return ForkedProgram(command[1:], env, out, out, tempfile.gettempdir())
    return subprocess.Popen(
        command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=tempfile.gettempdir()
    )


def torchrun(ranks: int, *arguments) -> list[str]:
    """The command line of torchrun for this many ranks, by this Python."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *map(str, arguments)]


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def started(*commands):
    """Start (command line, environment) pairs, in sessions of their own; whatever happens, all are gone at the end."""
    running = []
    with contextlib.ExitStack() as stack:
        try:
            for command, env in commands:
                out = stack.enter_context(tempfile.TemporaryFile("w+"))
                running.append((_start(command, env, out), out))
            yield running
        finally:
            for process, _ in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def finish(running, limit: float = LIMIT_S) -> tuple[list[dict], list[int], str]:
    """Wait for all; their results in the order of rank or of starting, exit codes, and all output."""
    until = time.monotonic() + limit
    codes, texts, late = [], [], False
    for process, _ in running:
        try:
            codes.append(process.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            late = True
            codes.append(None)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGUSR1)  # the ranks write down their stacks
    if late:
        time.sleep(1)
    for _, out in running:
        out.seek(0)
        texts.append(out.read())
    output = "\n".join(texts)
    assert not late, f"not all ended within {limit:g} s:\n{output}"
    results = [json.loads(line.partition("RESULT ")[2]) for line in output.splitlines() if "RESULT " in line]
    return results, codes, output


def run(*commands, results: int, limit: float = LIMIT_S, succeed: bool = True) -> list[dict]:
    """Start commands, wait, and give the ``results`` lines that were printed; by rank where they have one."""
    with started(*commands) as running:
        found, codes, output = finish(running, limit)
    assert len(found) == results, f"{len(found)} results and not {results}, exit codes {codes}:\n{output}"
    assert set(codes) == {0 if succeed else 1}, f"exit codes {codes}:\n{output}"
    if succeed:
        found.sort(key=lambda result: result["rank"])
    return found
