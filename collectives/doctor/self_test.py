"""Self-test: all-reduce on two ranks, checked, and its time beside what this machine's memory allows.

It runs ``python -m collectives.bench`` with Gloo and the backend of torch.distributed beside it. Under
a launcher with several ranks these make the test themselves, on one communicator.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .findings import Section

__all__ = ["examine_self_test", "expected_us", "is_launched", "test_launched_ranks"]

_SMALL, _LARGE = 1 << 10, 25 << 20
_LIMIT = 60  # seconds of the whole test; the bench prints the ranks' stacks then
_SLOW = 5.0  # times what is expected: other programs, a quota, or ranks on one core
_SMALL_US = 500.0  # of 1 KiB, where each rank has a core
_LAUNCHERS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_\w+|GROUP_\w+|ROLE_\w+|MASTER_\w+|TORCHELASTIC_\w+|OMPI_\w+|PMI\w*_\w+|SLURM_\w+)"
)
_BENCH = "--ranks 2 --op all_reduce --sizes 1K,25M -n 5 -m 2 -w 1 --turns 2 --peers gloo,backend".split()
_REASONS = "other programs, a cpu quota, or ranks on one core"
_PASTE = "paste this report into an issue"


def _copy_us(nbytes: int) -> float:
    """Return the time of one thread's copy of so many bytes."""
    numpy = importlib.import_module("numpy")
    source, target = numpy.ones(nbytes, numpy.uint8), numpy.zeros(nbytes, numpy.uint8)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        numpy.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def expected_us(nbytes: int, ranks: int, cores: int) -> float:
    """Return about how long a staged all-reduce on the host takes, by this machine's own copies.

    Each rank copies its data into its slots, and reads its own and the others' while it reduces: of two
    ranks as much traffic as two copies, of more another one. Ranks that share a core take turns.
    """
    passes = 2 if ranks == 2 else 3
    return passes * _copy_us(nbytes) * max(1.0, ranks / cores)


def is_launched() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    try:
        return importlib.import_module("collectives.launcher").detect_launcher().size > 1
    except Exception:  # the variables' section says what is wrong
        return False


def examine_self_test(section: Section) -> None:
    """Run the bench on two ranks, fill in its figures, and judge them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        command = [sys.executable, "-m", "collectives.bench", *_BENCH, "--timeout", str(_LIMIT), "--json", str(rows)]
        environment = {name: value for name, value in os.environ.items() if not _LAUNCHERS.fullmatch(name)}
        root = str(Path(importlib.import_module("collectives").__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT + 15, env=environment, cwd=folder
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stderr or b"").decode(errors="replace")
            section.fail(f"the self-test did not end within {_LIMIT + 15} s: {output[-2000:]}", _PASTE)
            return
        if done.returncode or not rows.exists():
            section.values["output"] = (done.stdout + done.stderr)[-4000:]
            what = f"failed with exit status {done.returncode}"
            if done.returncode == 4:
                what = f"did not end within {_LIMIT} s: the output has the stacks of both ranks"
            section.fail(f"the self-test {what}", _PASTE)
            return
        _judge(section, json.loads(rows.read_text())["rows"])


def _judge(section: Section, rows: list[dict]) -> None:
    cores = len(os.sched_getaffinity(0))
    times: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["in_place"]:
            times[row["engine"], row["bytes"]] = row["time_us"]
        if row["wrong"]:
            section.fail(f"{row['engine']}: {row['wrong']} wrong elements in a sum", _PASTE)
    own = next(row["engine"] for row in rows if row["engine"] in ("host", "nccl"))
    _describe(section, times[own, _SMALL], times[own, _LARGE], 2, cores, own == "host")
    for peer, name in (("backend", 'init_process_group("collectives")'), ("gloo", "Gloo")):
        if (peer, _SMALL) in times:
            cells = (times[peer, _SMALL], times[peer, _LARGE])
            section.values[name] = f"1 KiB {cells[0]:.1f} us, 25 MiB {cells[1] / 1e3:.1f} ms"


def _describe(section: Section, small: float, large: float, ranks: int, cores: int, on_host: bool) -> None:
    """Fill in the figures of an all-reduce, in microseconds, beside those that are expected."""
    bandwidth = _LARGE / large / 1e3
    section.values["all-reduce of 1 KiB"] = f"{small:.1f} us"
    text = f"{large / 1e3:.2f} ms, {bandwidth:.1f} GB/s"
    if not on_host:
        section.values["all-reduce of 25 MiB"] = text
        return
    wanted = expected_us(_LARGE, ranks, cores)
    section.values["all-reduce of 25 MiB"] = (
        f"{text}; by this machine's copies about {wanted / 1e3:.2f} ms, {_LARGE / wanted / 1e3:.1f} GB/s"
    )
    slow = f"25 MiB takes {large / wanted:.1f} times what is expected" if large > _SLOW * wanted else ""
    if not slow and small > _SMALL_US and cores >= ranks:
        slow = f"1 KiB takes {small:.0f} us where each rank has a core"
    if slow:
        section.warn(f"the all-reduce of {slow}: {_REASONS}", "top, and see the cores above")


def test_launched_ranks(section: Section) -> int:
    """Make the test on the ranks that a launcher has started; return this rank. All ranks call it."""
    collectives, torch = importlib.import_module("collectives"), importlib.import_module("torch")
    with collectives.init(timeout=_LIMIT) as comm:
        section.values["ranks"] = f"{comm.size}, engine {comm.engine.name}"
        times = []
        for nbytes in (_SMALL, _LARGE):
            tensor = torch.full((nbytes // 4,), float(comm.rank + 1), device=comm.device)
            comm.all_reduce(tensor)
            if not bool((tensor == comm.size * (comm.size + 1) / 2).all()):
                section.fail(f"a sum of {nbytes} bytes is wrong on rank {comm.rank}", _PASTE)
            tensor.zero_()
            found = []
            for _ in range(10):
                comm.barrier()
                begun = time.perf_counter()
                comm.all_reduce(tensor)
                if comm.device.type == "cuda":
                    torch.cuda.synchronize()
                found.append((time.perf_counter() - begun) * 1e6)
            times.append(statistics.median(found))
        on_host = comm.engine.name == "host" and comm.local_size == comm.size
        _describe(section, *times, comm.size, len(os.sched_getaffinity(0)), on_host)
        return comm.rank
