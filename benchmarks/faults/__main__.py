"""``python -m benchmarks.faults KIND``: run fault trials, and write what came of them."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
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
    parser.add_argument("--jobs", type=int, default=1, help="how many trials run at a time (default 1)")
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
    first = options.seed or 0
    if options.jobs > 1:
        rows = run_jobs(options.kind, first, options.trials or 1, options.jobs)
        write_rows(rows, options.out)
    else:
        rows = run_trials(options, first)
    summary = summarise(options.kind, rows, first, time.monotonic() - began)
    print(json.dumps(summary))
    if options.keep:
        append_rows([{**facts, **summary}], RESULTS / "faults.jsonl")
    return min(100, summary["wrong"])


def run_trials(options, first: int) -> list[dict]:
    """Run trials one after the other; return their rows."""
    rows = []
    for seed in range(first, first + (options.trials or 1)):
        row = KINDS[options.kind](seed)
        rows.append(row)
        write_rows([row], options.out)
        if options.trials is None:
            print(json.dumps(row, indent=1))
        elif row["wrong"]:
            print(f"seed {seed}: {row['wrong'][0][:400]}", flush=True)
    return rows


def run_jobs(kind: str, first: int, trials: int, jobs: int) -> list[dict]:
    """Run trials in several processes, each with a part of the seeds; return their rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for job in range(jobs):
            begin, end = first + trials * job // jobs, first + trials * (job + 1) // jobs
            out = Path(folder) / f"{job}.jsonl"
            out.touch()
            args = [kind, "--seed", str(begin), "--trials", str(end - begin), "--out", str(out)]
            if end > begin:
                started.append((subprocess.Popen([sys.executable, "-m", "benchmarks.faults", *args]), out, end - begin))
        for process, out, count in started:
            process.wait()
            found = [json.loads(line) for line in out.read_text().splitlines()]
            if len(found) < count:
                sys.exit(f"a job ended after {len(found)} of {count} trials, with exit code {process.returncode}")
            rows += found
    return rows


def write_rows(rows: list[dict], path: Path | None) -> None:
    """Append rows to a file, if one is named."""
    if path:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def run_fuzz(options) -> int:
    """Run the fuzzing of some targets; return the number of things that went wrong, at most 100."""
    wrong = 0
    for target in [options.target] if options.target else TARGET_NAMES:
        facts, run = provenance(), (fuzz_host if target in fuzz_host.TARGETS else fuzz).run_trial
        row = run(options.seed or 0, target, options.inputs)
        wrong += len(row["wrong"])
        write_rows([row], options.out)
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
