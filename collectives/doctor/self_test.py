"""Self-test: real ranks that all-reduce, beside Gloo."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from contextlib import ExitStack

from .launching import is_launcher_variable
from .probe import Outcome, Probe
from .report import ERROR, OK, WARNING, Finding

__all__ = ["RANKS", "check_self_test", "run_own_ranks", "start_launched_rank"]

RANKS = 2
_SMALL, _BIG = str(1 << 10), str(25 << 20)  # bytes
_SLOW_CALL = 1e-3  # seconds of a small call; a switch of processes takes some microseconds
# What to type where the error has these words. The kernel sends SIGKILL for want of memory.
_REMEDIES = {
    "(SIGBUS)": "df -h /dev/shm; free -m",
    "(SIGILL)": "export COLLECTIVES_ISA=baseline",
    "(SIGKILL)": "dmesg -T | grep -i 'killed process'",
    "Operation not permitted": "docker run --security-opt seccomp=unconfined ...   # a profile refuses a system call",
    "Function not implemented": "uname -r   # Linux 5.3 or newer has it",
    "Too many open files": "ulimit -Sn 65536",
}
_PROGRAM = """
emit(stage="import collectives")
from collectives.doctor.rank import run_rank
run_rank(emit, {engine!r}, {parent}, {folder!r}, {timeout!r})
"""


def _program(engine: str, folder: str | None, limit: float) -> str:
    return _PROGRAM.format(engine=engine, parent=os.getpid(), folder=folder, timeout=max(1.0, limit * 0.6))


def start_launched_rank(engine: str, limit: float) -> Probe:
    """Start the rank of this process of a launcher, which has its variables."""
    return Probe(_program(engine, None, limit), limit)


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
            started.append(Probe(_program(engine, folder, limit), limit, own))
            stack.callback(started[-1].kill)
        return [each.wait() for each in started]


def check_self_test(engine: str, outcomes: list[Outcome], launched: bool) -> list[Finding]:
    """Return the findings of a run.

    `outcomes`: of this process's rank where a launcher started the ranks, else of all.
    """
    name, first = f"self_test.{engine}", outcomes[0].values
    failed = [(rank, each) for rank, each in enumerate(outcomes) if each.error or each.values.get("stage")]
    size = first.get("size", len(outcomes))
    values = {"engine": engine, "ranks": size, "launched": launched, "nodes": first.get("nodes"),
              "device": first.get("device"), "times": first.get("times"), "c10d": first.get("c10d"),
              "gloo": first.get("gloo")}  # fmt: skip
    # A rank whose peer has ended says only that; the peer says why.
    failed.sort(key=lambda each: "RemoteError" in each[1].error)
    if failed and "times" not in first:
        return [_describe_failure(name, failed, values, launched)]
    titles = {"times": f"engine {engine!r}", "c10d": "dist.all_reduce on backend 'collectives'", "gloo": "Gloo"}
    parts = [
        f"{title}: 1 KiB in {values[key][_SMALL] * 1e6:.0f} us, 25 MiB in {values[key][_BIG] * 1e3:.2f} ms"
        for key, title in titles.items()
        if values[key]
    ]
    text = f"{size} rank{'s' * (size != 1)}, all sums are right; {'; '.join(parts)}"
    findings = [Finding(name, OK, text, values=values)]
    if failed:
        failure = _describe_failure(f"{name}.torch", failed, {}, launched)
        if failed[0][1].values.get("stage", "").startswith("Gloo"):
            failure.status = WARNING
            failure.remedy = failure.remedy if _resolves_own_name() else "export GLOO_SOCKET_IFNAME=lo"
        findings.append(failure)
    ours = values["times"]
    slow = ours[_SMALL] > _SLOW_CALL or (values["gloo"] and ours[_BIG] > values["gloo"][_BIG])
    if slow and size > 1 and values["nodes"] == 1:
        text = "a small call takes more than 1 ms, or a large one longer than on Gloo: ranks wait for a core that " \
               "they share, or that other programs use"  # fmt: skip
        findings.append(Finding(f"{name}.slow", WARNING, text, "top -b -n 1 -o %CPU | head -20"))
    return findings


def _resolves_own_name() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _describe_failure(name: str, failed: list[tuple[int, Outcome]], values: dict, launched: bool) -> Finding:
    rank, outcome = failed[0]
    rank = outcome.values.get("rank", rank)
    stage, error = outcome.values.get("stage", "start"), outcome.error or "it did not end"
    if "killed by signal" in error:
        error += f" ({signal.Signals(int(error.split()[-1])).name})"
    values |= {"stage": stage, "error": error, "output": "\n".join(each.output for _, each in failed if each.output)}
    remedy = "python -m collectives.doctor --json   # has the ranks' stacks, to paste into an issue"
    if launched and ("did not come" in error or "not done within" in error):
        remedy = "unset RANK WORLD_SIZE   # if this shell is no rank of a job; else start its other ranks"
    remedy = next((line for words, line in _REMEDIES.items() if words in error), remedy)
    return Finding(name, ERROR, f"rank {rank} failed at: {stage}: {error}", remedy, values)
