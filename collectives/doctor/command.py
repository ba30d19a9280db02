"""The command line of the doctor, and the order of its checks."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence

from .install import PROBE_S, check_engine, check_install, check_torch, read_version, start_engine_probe
from .launching import check_launcher, check_variables_set, read_identity
from .node import check_cores, check_gpus, check_limits, check_memory
from .probe import Outcome
from .report import ERROR, Finding, find_worst, write_json, write_text
from .self_test import RANKS, check_self_test, run_own_ranks, start_launched_rank

__all__ = ["main"]

_FORMAT = 2  # of the JSON; a change of a key's meaning raises it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print the report. Returns 1 where an error was found, else 0.

    `arguments`: default ``sys.argv``'s. Under a launcher rank 0 prints; every rank takes part in
    the self-test, and the others return 0, since a launcher would end rank 0 for a failure. What is
    waited for is a line on stderr.
    """
    options = _parse(arguments)
    identity = read_identity()
    launched = identity is not None and identity.size > 1
    if launched and identity.rank > 0:
        if options.test:
            _follow(options, identity.rank)
        return 0
    begin = time.monotonic()
    _show_progress("importing torch, asking for the engines and the GPUs", PROBE_S)
    probe = start_engine_probe()
    ranks = (identity.local_size or identity.size) if launched else RANKS
    install, surroundings = check_install(), [*check_variables_set(), *check_launcher()]
    cores, limits = check_cores(ranks), check_limits()
    outcome = probe.wait()
    remedy = next((each.remedy for each in install if each.remedy and each.name.startswith("package.")), "")
    findings = [*install, *check_torch(outcome), *check_engine(outcome, remedy), *check_gpus(outcome), *cores]
    findings += [*check_memory(outcome), *limits, *surroundings]
    if options.test:
        findings += _test(outcome, launched, options.timeout)
    try:
        _report(findings, options, time.monotonic() - begin)
    except BrokenPipeError:  # of `| head`, which has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python writes at its end has a place
    return 1 if find_worst(findings) == ERROR else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m collectives.doctor",
        description="Check this install and its surroundings, and print the line that fixes what is wrong.",
        epilog="The exit status is 1 where an error was found; warnings alone leave it 0.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with all that was read")
    parser.add_argument("--no-test", dest="test", action="store_false", help="leave the self-test out")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="of the self-test (default 60)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if not 1 <= options.timeout < 1e6:
        parser.error(f"--timeout {options.timeout:g}: not a number of seconds from 1 up")
    return options


def _show_progress(text: str, seconds: float) -> None:
    """Say on stderr what is done now, and how long it may take."""
    print(f"doctor: {text}, up to {seconds:g} s ...", file=sys.stderr, flush=True)


def _follow(options: argparse.Namespace, rank: int) -> None:
    """Take part in the self-test of rank 0's report."""
    outcome = start_engine_probe().wait()
    if "chosen" in outcome.values:
        outcome = start_launched_rank(outcome.values["chosen"], options.timeout).wait()
    if outcome.error:
        where = f"rank {rank}: {outcome.values.get('stage', 'start')}"
        print(f"{where}: {outcome.error}\n{outcome.output}", file=sys.stderr)


def _test(outcome: Outcome, launched: bool, limit: float) -> list[Finding]:
    """Run the self-test on the engine that a program would use; on the host engine beside NCCL, too."""
    chosen = outcome.values.get("chosen")
    if chosen is None:
        return []  # the findings say why
    _show_progress("the ranks of the self-test all-reduce", limit)
    if launched:
        return check_self_test(chosen, [start_launched_rank(chosen, limit).wait()], True)
    findings = []
    if chosen == "nccl":
        ranks = min(RANKS, len(outcome.values.get("devices") or [None]))
        findings += check_self_test("nccl", run_own_ranks("nccl", ranks, limit), False)
    if any(each["name"] == "host" and each["available"] for each in outcome.values["engines"]):
        findings += check_self_test("host", run_own_ranks("host", RANKS, limit), False)
    return findings


def _report(findings: list[Finding], options: argparse.Namespace, seconds: float) -> None:
    sys.stdout.reconfigure(errors="backslashreplace")  # a path or a variable may hold what this terminal can't show
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    version = read_version()
    if options.json:
        header = {"format": _FORMAT, "version": version, "time": when, "seconds": round(seconds, 2)}
        write_json(findings, header, sys.stdout)
    else:
        where = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
        write_text(findings, f"collectives {version} on {where}, {when}, {seconds:.1f} s", sys.stdout)
