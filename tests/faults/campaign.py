"""Fault trials: programs at random, in which ranks die, deviate or lack something, and what came of each.

    python -m tests.faults.campaign kills --trials 100 --seed 1
    python -m tests.faults.campaign deviations --seed 17          # one trial, with all of its row
    python -m tests.faults.campaign fuzz --target requests --inputs 100000

A seed determines the whole trial. Each row is printed where something went wrong; the last line is a summary. The
exit status is the number of trials that went wrong, at most 100.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from tests.faults import deviations, fuzz, fuzz_host, kills, resources, trainings
from tests.faults.fuzz_targets import TARGETS

KINDS = {
    "kills": kills.run_trial, "deviations": deviations.run_trial, "trainings": trainings.run_trial,
    "resources": resources.run_trial,
}  # fmt: skip


def run_fuzz(options) -> int:
    """Run the fuzzing of some targets; return how many things went wrong."""
    wrong = 0
    for target in [options.target] if options.target else [*TARGETS, *fuzz_host.TARGETS]:
        run = fuzz_host.run_trial if target in fuzz_host.TARGETS else fuzz.run_trial
        row = run(options.seed or 0, target, options.inputs)
        print(json.dumps(row), flush=True)
        wrong += len(row["wrong"])
    return wrong


def run_trials(options) -> int:
    """Run the trials of one kind; return how many went wrong."""
    began, rows = time.monotonic(), []
    for seed in range(options.seed or 0, (options.seed or 0) + (options.trials or 1)):
        row = KINDS[options.kind](seed)
        rows.append(row)
        if row["wrong"] or options.trials is None:
            print(json.dumps(row, indent=1), flush=True)
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    wrong = [row["seed"] for row in rows if row["wrong"]]
    print(json.dumps({
        "kind": options.kind, "trials": len(rows), "wrong": wrong, "spent_s": round(time.monotonic() - began, 1),
        "median_s": round(statistics.median(seconds), 3) if seconds else None, "worst_s": max(seconds, default=None),
    }))  # fmt: skip
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*KINDS, "fuzz"])
    parser.add_argument("--seed", type=int, default=None, help="of the first trial")
    parser.add_argument("--trials", type=int, default=None, help="how many (default: 1, and its whole row is printed)")
    parser.add_argument("--target", choices=[*TARGETS, *fuzz_host.TARGETS], help="of fuzz (default: all)")
    parser.add_argument("--inputs", type=int, default=10_000, help="of each target of fuzz (default: %(default)s)")
    options = parser.parse_args()
    return min(100, run_fuzz(options) if options.kind == "fuzz" else run_trials(options))


if __name__ == "__main__":
    sys.exit(main())
