"""``python -m benchmarks.faults KIND``: run fault trials, and write what came of them."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rows import RESULTS, append_rows, provenance

from benchmarks.faults import deviations, fuzz, fuzz_host, kills, resources, soak, table, trainings
from benchmarks.faults.fuzz_targets import TARGETS

KINDS = {
    "kills": kills.run_trial, "deviations": deviations.run_trial, "soak": soak.run_trial,
    "trainings": trainings.run_trial, "resources": resources.run_trial,
}  # fmt: skip
TARGET_NAMES = [*TARGETS, *fuzz_host.TARGETS]


def main() -> int:
    """Run the trials; return the number of those that went wrong, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument(
        "kind", choices=[*KINDS, "fuzz", "table"], help="of trials; table: write those of docs/reliability.md"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the first trial; alone: that trial, in full")
    parser.add_argument("--trials", type=int, default=None, help="how many (default 1)")
    parser.add_argument("--out", type=Path, default=None, help="a file for a row of JSON for each trial")
    parser.add_argument("--keep", action="store_true", help="append a summary to benchmarks/results/faults.jsonl")
    parser.add_argument("--target", choices=TARGET_NAMES, help="of fuzz (default: all)")
    parser.add_argument("--inputs", type=int, default=10_000, help="of each target of fuzz (default 10,000)")
    options = parser.parse_args()
    if options.kind == "table":
        table.write()
        return 0
    if options.kind == "fuzz":
        return run_fuzz(options)
    facts, began = provenance(), time.monotonic()
    rows, first = [], options.seed or 0
    for seed in range(first, first + (options.trials or 1)):
        row = KINDS[options.kind](seed)
        rows.append(row)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if options.trials is None:
            print(json.dumps(row, indent=1))
        elif row["wrong"]:
            print(f"seed {seed}: {row['wrong'][0][:400]}", flush=True)
    summary = summarise(options.kind, rows, first, time.monotonic() - began)
    print(json.dumps(summary))
    if options.keep:
        append_rows([{**facts, **summary}], RESULTS / "faults.jsonl")
    return min(100, summary["wrong"])


def run_fuzz(options) -> int:
    """Run the fuzzing of some targets; return the number of things that went wrong, at most 100."""
    wrong = 0
    for target in [options.target] if options.target else TARGET_NAMES:
        facts, run = provenance(), (fuzz_host if target in fuzz_host.TARGETS else fuzz).run_trial
        row = run(options.seed or 0, target, options.inputs)
        wrong += len(row["wrong"])
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        for text in row["wrong"]:
            print(f"{target}, seed {row['seed']}: {text[:400]}", flush=True)
        summary = {
            "what": "fuzz", "target": target, "first_seed": row["seed"], "trials": row["inputs"],
            "wrong": len(row["wrong"]), "wrong_seeds": [], "spent_s": row["seconds"],
            **{name: row.get(name) for name in ("read", "refused", "lines", "reached", "slowest_s")},
        }  # fmt: skip
        print(json.dumps(summary), flush=True)
        if options.keep:
            append_rows([{**facts, **summary}], RESULTS / "faults.jsonl")
    return min(100, wrong)


def summarise(kind: str, rows: list[dict], first: int, spent: float) -> dict:
    """Return the figures of some trials."""
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    return {
        "what": kind, "first_seed": first, "trials": len(rows), "wrong": sum(bool(row["wrong"]) for row in rows),
        "wrong_seeds": [row["seed"] for row in rows if row["wrong"]][:50],
        "median_s": round(statistics.median(seconds), 3) if seconds else None,
        "worst_s": round(max(seconds), 3) if seconds else None, "spent_s": round(spent, 1),
        "operations": sum(row.get("operations", 0) for row in rows),
        "deaths": sum(row["deaths"] if "deaths" in row else len(row.get("victims", ())) for row in rows),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
