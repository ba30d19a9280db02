"""Options, devices, rows, ranks on one GPU, and time by events, for the programs of `make gpu`."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from . import VARIABLE

__all__ = ["Program", "events_seconds", "is_gpu", "median", "run_ranks", "run_ranks_of", "synchronize"]

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICES = ("cuda", "simulated", "cpu")


def open_device(name: str, rank: int = 0) -> torch.device:
    """Return the device to run on: the first GPU, which all ranks share, or a simulated one for
    each rank.
    """
    if name == "cpu":
        return torch.device("cpu")
    if (name == "simulated") != bool(os.environ.get(VARIABLE)):
        raise SystemExit(f"--device {name}: {VARIABLE} must be set for simulated devices, and for no others")
    device = torch.device("cuda", rank if name == "simulated" else 0)
    torch.cuda.set_device(device)
    return device


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a real GPU: neither the CPU nor simulated."""
    return device.type == "cuda" and torch.version.cuda is not None


def synchronize(device: torch.device) -> None:
    """Wait for all that was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def events_seconds(call, device: torch.device, times: int) -> tuple[float, float]:
    """Return seconds of one of so many calls in a row: on the device, by events around all, and on
    the host.
    """
    if not is_gpu(device):
        start = time.perf_counter()
        for _ in range(times):
            call()
        took = (time.perf_counter() - start) / times
        return took, took
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    start = time.perf_counter()
    for _ in range(times):
        call()
    on_host = (time.perf_counter() - start) / times
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) * 1e-3 / times, on_host


def median(values) -> float:
    """Return a median of seconds as microseconds, with two digits behind the point."""
    return round(statistics.median(values) * 1e6, 2)


class Program:
    """A stage's program: its options, and its rows, which go to a file as they come."""

    def __init__(self, text: str, name: str, *, ranks: bool = False):
        self.name = name
        self.parser = argparse.ArgumentParser(description=text.splitlines()[0])
        self.parser.add_argument("--device", choices=DEVICES, default="cuda")
        self.parser.add_argument("--output", type=Path, default=None, help="file of rows")
        self.parser.add_argument("--dry", action="store_true", help="the least of everything: is the program right?")
        if ranks:
            self.parser.add_argument("--ranks", type=int, default=1)
            self.parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
        self.failures = 0

    def parse(self) -> argparse.Namespace:
        self.arguments = self.parser.parse_args()
        return self.arguments

    def row(self, **fields) -> None:
        """Print a row and append it to the file."""
        print(" ".join(f"{key}={value}" for key, value in fields.items()), flush=True)
        if self.arguments.output is not None:
            with self.arguments.output.open("a") as file:
                file.write(json.dumps({"program": self.name, **fields}, default=str) + "\n")

    def attempt(self, case: str, function, *arguments, **fields):
        """Call a function of one case; a failure becomes a row, and the program goes on."""
        try:
            return function(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.failures += 1
            self.row(case=case, error=f"{type(error).__name__}: {error}"[:600], **fields)
            return None

    def status(self) -> int:
        """Return the exit status."""
        return 1 if self.failures else 0


def rank_environment(rank: int, ranks: int, device: str, port: int) -> dict[str, str]:
    """Return the variables with which a rank starts."""
    found = {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if device == "cuda" and ranks > 1:
        from collectives.comm.engine import get_engine
        from tests.one_gpu import environment

        found |= environment(rank, ranks, get_engine("nccl").library.version)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(commands: list[list[str]], device: str, *, cwd=ROOT, seconds: float = math.inf, **variables: str):
    """Run a command for each rank, for some seconds at most; where one fails the others are ended.

    Returns their exit statuses, None for a rank that was ended here, and what each has printed.
    """
    port, end = free_port(), time.monotonic() + seconds
    processes, outputs = [], []
    for rank, command in enumerate(commands):
        environment = {**os.environ, **variables, **rank_environment(rank, len(commands), device, port)}
        outputs.append(tempfile.TemporaryFile())
        processes.append(
            subprocess.Popen(command, cwd=cwd, env=environment, stdout=outputs[-1], stderr=outputs[-1])
        )
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                time.sleep(3)  # the others may say more of it
                break
            time.sleep(0.05)
    finally:
        statuses = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read().decode(errors="replace"))
        output.close()
    return statuses, texts


def run_ranks_of(module: str, arguments: argparse.Namespace) -> int:
    """Start the ranks of one of this folder's programs and wait. Rank 0 writes the rows."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--rank"]
    commands = [[*command, str(rank)] for rank in range(arguments.ranks)]
    statuses, texts = run_ranks(commands, arguments.device, OMP_NUM_THREADS="1")
    for rank, (status, text) in enumerate(zip(statuses, texts, strict=True)):
        print(f"---- rank {rank}: {'ended' if status is None else f'status {status}'}")
        print(text[-100_000:], flush=True)
    return 1 if any(status != 0 for status in statuses) else 0
