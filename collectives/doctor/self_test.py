"""Self-test: real ranks that all-reduce, with the time that this node's memory lets one expect."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from contextlib import ExitStack

from .finding import ERROR, OK, WARNING, Finding
from .launching import is_launcher_variable
from .probe import Outcome, start_python

__all__ = ["RANKS", "check_self_test", "expected_seconds", "run_own_ranks", "start_launched_rank"]

RANKS = 2
_SMALL, _BIG = str(1 << 10), str(25 << 20)
_FAR_BELOW = 1 / 3
_SLOW_CALL = 1e-3  # seconds of a small call; a switch of processes takes some microseconds
# What to type where a rank died of a signal. The kernel sends SIGKILL for want of memory.
_SIGNALS = {
    "SIGBUS": "df -h /dev/shm; free -m",
    "SIGILL": "export COLLECTIVES_ISA=baseline",
    "SIGKILL": "dmesg -T | grep -i 'killed process'",
}
_PROGRAM = """
emit(stage="import collectives")
from collectives.doctor.rank import run_rank
run_rank(emit, {engine!r}, {parent}, {folder!r}, {timeout!r})
"""


def expected_seconds(nbytes: int, ranks: int, copy: float) -> float:
    """Return the time of a staged all-reduce in which every byte moves at the speed of a copy.

    ``copy``: seconds in which a rank copies ``nbytes`` while all ranks do, which reads and writes
    them: 2 ``nbytes``. Two ranks each read theirs and write it into a slot, read both slots and
    write the sum: 5 ``nbytes``. More ranks reduce a block each and gather: 5 + 1 / ranks. The slots
    lie in the second-level cache, so a good result is quicker than this. One rank copies nothing.
    """
    touched = 0 if ranks == 1 else 5 if ranks == 2 else 5 + 1 / ranks
    return touched / 2 * copy


def _program(engine: str, folder: str | None, limit: float) -> str:
    return _PROGRAM.format(engine=engine, parent=os.getpid(), folder=folder, timeout=max(1.0, limit * 0.6))


def start_launched_rank(engine: str, limit: float):
    """Start the rank of this process of a launcher, which has its variables."""
    return start_python(_program(engine, None, limit), limit)


def run_own_ranks(engine: str, ranks: int, limit: float) -> list[Outcome]:
    """Run ranks on this node, apart from any launcher's job; return how each ended."""
    base = {name: value for name, value in os.environ.items() if not is_launcher_variable(name)}
    base["COLLECTIVES_JOB_ID"] = f"doctor-{os.getpid()}-{engine}"
    base.pop("COLLECTIVES_HOST_ID", None)
    base |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-doctor-"))
        started = []
        for rank in range(ranks):
            own = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(start_python(_program(engine, folder, limit), limit, own))
            stack.callback(started[-1].kill)
        return [each.wait() for each in started]


def _resolves_own_name() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _rate(nbytes: str, seconds: float) -> str:
    return f"{int(nbytes) / seconds / 1e9:.2f} GB/s"


def check_self_test(engine: str, outcomes: list[Outcome], launched: bool) -> list[Finding]:
    """Return the findings of a run. ``outcomes``: of this process's rank where a launcher started the
    ranks, else of all.
    """
    name = f"self_test.{engine}"
    failed = [(rank, each) for rank, each in enumerate(outcomes) if each.error or each.values.get("stage")]
    first = outcomes[0].values
    size = first.get("size", len(outcomes))
    values = {"engine": engine, "ranks": size, "launched": launched, **_figures(first, size)}
    if failed and "times" not in first:
        # A rank whose peer has ended says only that; the peer says why.
        failed.sort(key=lambda each: "RemoteError" in each[1].error)
        return [_describe_failure(name, failed, values, launched)]
    text = f"{size} rank{'s' * (size != 1)} on engine {engine!r}: " + _describe(values)
    found = [Finding(name, OK, text, values=values)]
    if failed:
        rank, outcome = failed[0]
        stage = outcome.values.get("stage", "")
        gloo = stage.startswith("Gloo")
        values["output"] = outcome.output
        remedy = "python -m collectives.doctor --json"
        if gloo and not _resolves_own_name():
            remedy = "export GLOO_SOCKET_IFNAME=lo"
        found.append(Finding(f"{name}.torch", WARNING if gloo else ERROR,
                             f"rank {rank}, at {stage}: {outcome.error or 'it did not end'}", remedy))  # fmt: skip
    found += _check_figures(name, values, first)
    return found


def _figures(first: dict, size: int) -> dict:
    """Return the times in seconds, and what is expected where the ranks are on one node's CPU."""
    times, copy = first.get("times"), first.get("copy")
    expected = None
    if times and copy and first.get("nodes") == 1 and size > 1:
        expected = expected_seconds(int(_BIG), size, copy)
    return {
        "latency": times and times[_SMALL], "seconds": times and times[_BIG], "expected_seconds": expected,
        "share_of_expected": expected and expected / times[_BIG], "copy_seconds": copy, "bytes": int(_BIG),
        "small_bytes": int(_SMALL), "c10d": first.get("c10d"), "gloo": first.get("gloo"), "nodes": first.get("nodes"),
        "device": first.get("device"),
    }  # fmt: skip


def _describe(values: dict) -> str:
    text = f"1 KiB in {values['latency'] * 1e6:.1f} us; 25 MiB in {values['seconds'] * 1e3:.2f} ms, "
    text += _rate(_BIG, values["seconds"])
    if values["expected_seconds"]:
        text += (
            f" ({_rate(_BIG, values['expected_seconds'])} expected at the speed of memory: a copy of 25 MiB takes "
            f"{values['copy_seconds'] * 1e3:.2f} ms)"
        )
    for key, title in (("c10d", "dist.all_reduce on backend 'collectives'"), ("gloo", "Gloo")):
        if values[key]:
            text += f"; {title}: {values[key][_SMALL] * 1e6:.0f} us, {values[key][_BIG] * 1e3:.2f} ms"
    return text + ". All sums are right"


def _check_figures(name: str, values: dict, first: dict) -> list[Finding]:
    found = []
    cores = {core for each in first.get("cores", ()) for core in each}
    crowded = values["nodes"] == 1 and 0 < len(cores) < values["ranks"]
    share = values["share_of_expected"]
    if share is not None and share < _FAR_BELOW:
        reasons = "the ranks share a core" if crowded else "other programs on these cores, or a quota of the cgroup"
        text = f"25 MiB takes {1 / share:.1f} times as long as this node's memory lets one expect; likely: {reasons}"
        remedy = "python -m collectives.bench --ranks 2 -b 25M -e 25M   # when nothing else runs"
        found.append(Finding(f"{name}.bandwidth", WARNING, text, remedy))
    if values["latency"] > _SLOW_CALL and values["ranks"] > 1 and values["nodes"] == 1:
        reasons = "the ranks share a core" if crowded else "ranks wait for a core that other programs use"
        text = f"1 KiB takes {values['latency'] * 1e6:.0f} us; likely: {reasons}"
        found.append(Finding(f"{name}.latency", WARNING, text, "top -b -n 1 -o %CPU | head -20"))
    return found


def _describe_failure(name: str, failed: list[tuple[int, Outcome]], values: dict, launched: bool) -> Finding:
    rank, outcome = failed[0]
    rank = outcome.values.get("rank", rank)
    stage, error = outcome.values.get("stage", "start"), outcome.error or "it did not end"
    values |= {"stage": stage, "error": error, "output": "\n".join(each.output for _, each in failed if each.output)}
    text = f"rank {rank} failed at: {stage}: {error}"
    remedy = "python -m collectives.doctor --json   # has the ranks' stacks, to paste into an issue"
    if launched and ("did not come" in error or "not done within" in error):
        remedy = "unset RANK WORLD_SIZE   # if this shell is no rank of a job; else start its other ranks"
    for signal_name, line in _SIGNALS.items():
        if error.endswith(f"signal {getattr(signal, signal_name).value}"):
            text += f" ({signal_name})"
            remedy = line
    return Finding(name, ERROR, text, remedy, values)
