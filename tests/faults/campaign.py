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
from functools import partial

from tests.faults import deviations, fuzz, fuzz_host, kills, resources, trainings
from tests.faults.fuzz_targets import TARGETS

KINDS = {
    "kills": kills.run_trial, "deviations": deviations.run_trial, "trainings": trainings.run_trial,
    "resources": resources.run_trial,
}  # fmt: skip
FUZZED = {**dict.fromkeys(TARGETS, fuzz.run_trial), **dict.fromkeys(fuzz_host.TARGETS, fuzz_host.run_trial)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*KINDS, "fuzz"])
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--trials", type=int, default=None, help="how many (default: 1, and its whole row is printed)")
    parser.add_argument("--target", choices=FUZZED, help="of fuzz (default: all)")
    parser.add_argument("--inputs", type=int, default=10_000, help="of each target of fuzz (default: %(default)s)")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    if options.kind == "fuzz":
        names = [options.target] if options.target else FUZZED
        trials = [partial(FUZZED[name], options.seed, name, options.inputs) for name in names]
    else:
        seeds = range(options.seed, options.seed + (options.trials or 1))
        trials = [partial(KINDS[options.kind], seed) for seed in seeds]
    for trial in trials:
        rows.append(trial())
        if rows[-1]["wrong"] or options.trials is None:
            print(json.dumps(rows[-1], indent=1), flush=True)
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    wrong = [row["seed"] for row in rows if row["wrong"]]
    print(json.dumps({
        "kind": options.kind, "trials": len(rows), "wrong": wrong, "spent_s": round(time.monotonic() - began, 1),
        "median_s": round(statistics.median(seconds), 3) if seconds else None, "worst_s": max(seconds, default=None),
    }))  # fmt: skip
    return min(100, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
