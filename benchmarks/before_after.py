"""Compare two checkouts of this project in one run: a call, all-reduce, and training steps.

    python benchmarks/before_after.py ../collectives-before           # this checkout against that one
    python benchmarks/before_after.py ../collectives-before --only call_cost ddp --turns 7

Both checkouts must be built in place (``python setup.py build_ext --inplace``); both run under this
Python. A turn runs one benchmark of the one checkout and then of the other, the next turn the other
way round. Each benchmark checks its own results. Steps are compared as multiples of their peer's in
the same run. For every time a line says the medians of all turns before and after, their ratio
(below 1: faster now), and the ratios of the single turns: where 1 lies among these, the difference
is noise. One row goes to benchmarks/results/before_after.jsonl. The exit status is 1 where all
turns of a time are slower than ``--limit`` (1.1).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import RESULTS, append_rows, provenance

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900.0  # of one run of a benchmark
# Benchmark: its command, whose last argument is followed by the file that its rows go to.
COMMANDS = {
    "call_cost": "benchmarks/call_cost.py --rounds 20000 --repeats 5 --results",
    "all_reduce": "-m collectives.bench --sizes 1K,16K,256K,1M,4M,25M --zero-copy both --json",
    "ddp": "benchmarks/ddp/step.py --ways no_sync gloo hook ours --rounds 3 --output",
    "ddp_adamw": "benchmarks/ddp/step.py --ways no_sync gloo gloo_adamw ours_adamw ours_clip_adamw --rounds 3 --output",
    "sharded": "benchmarks/sharded/step.py --ways alone ddp ours ours_keep --models gpt6x384 --rounds 3 --output",
    "horovod": "benchmarks/horovod/step.py --ways alone gloo hvd --rounds 3 --output",
    "horovod_ops": "benchmarks/horovod/ops.py --rounds 30 --output",
}
UNITS = ("_ns", "_us", "_ms")
PEERS = ("gloo_ms", "alone_ms")  # a row with one of them is compared by its times as multiples of that one
OTHERS = ("gloo_ms", "alone_ms", "no_sync_ms")  # not ours


def times_of(row):
    """Return label -> time of all times in a row."""
    names = [row[key] for key in ("op", "model", "optimizer", "way", "tensors", "bytes", "nbytes") if key in row]
    names += ["zero-copy"] * bool(row.get("zero_copy")) + ["in place"] * bool(row.get("in_place"))
    if "time_us" in row:
        return {" ".join(map(str, [*names, "us"])): row["time_us"]}
    found = {key: value for key, value in row.items() if key.endswith(UNITS) or key == "us"}
    found = {key: value for key, value in found.items() if isinstance(value, int | float)}
    peer = next((key for key in PEERS if key in found), None)
    if peer is not None:  # what else runs on the machine slows both
        found = {f"{key} / {peer}": value / found[peer] for key, value in found.items() if key not in OTHERS}
    return {" ".join(map(str, [*names, key])): value for key, value in found.items()}


def run(name, checkout, folder):
    """Run a benchmark of a checkout; return its times."""
    output = Path(folder, f"{name}.jsonl")
    output.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, *COMMANDS[name].split(), str(output)]
    done = subprocess.run(command, cwd=checkout, env=env, timeout=SECONDS, capture_output=True, text=True)
    if not output.exists():
        raise SystemExit(f"{name} of {checkout} wrote no rows:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    times = {}
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row in rows:
        times.update(times_of(row))
    return times


def version_of(checkout):
    """Return a checkout's commit, with a plus where tracked files differ.

    Exits where it isn't built in place.
    """
    code = "import collectives, pathlib; print(pathlib.Path(collectives.__file__).parent.parent)"
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    found = subprocess.run([sys.executable, "-c", code], cwd=checkout, env=env, capture_output=True, text=True)
    if found.returncode or Path(found.stdout.strip()) != checkout:
        raise SystemExit(f"{checkout} isn't built in place, or another is imported there: {found.stdout}{found.stderr}")
    git = ["git", "-C", str(checkout)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True).strip()
    return commit + "+" * bool(changed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--after", type=Path, default=ROOT, help="default: the one that this file is in")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="default: all")
    parser.add_argument("--turns", type=int, default=3, help="of each (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1.1, help="what is too slow (default: %(default)s)")
    default = RESULTS / "before_after.jsonl"
    parser.add_argument("--output", type=Path, default=default, help="file of rows (default: %(default)s)")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    commits = {which: version_of(checkout) for which, checkout in checkouts.items()}
    row = {"benchmark": "before_after", "commits": commits, "turns": options.turns, **provenance(), "times": {}}
    print(f"before: {commits['before']}   after: {commits['after']}   ratios: after / before")
    slower = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            taken = {"before": [], "after": []}
            for turn in range(options.turns):
                for which in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                    taken[which].append(run(name, checkouts[which], folder))
            for label in taken["after"][0]:
                if any(label not in times for times in taken["before"] + taken["after"]):
                    continue
                before, after = ([times[label] for times in taken[which]] for which in ("before", "after"))
                ratios = sorted(b / a for a, b in zip(before, after, strict=True))
                medians = statistics.median(before), statistics.median(after)
                figures = [round(each, 4) for each in (*medians, medians[1] / medians[0], *ratios)]
                row["times"][f"{name}: {label}"] = figures
                spread = " ".join(f"{each:.2f}" for each in ratios)
                print(f"{name:<12} {label:<44} {figures[0]:>12} {figures[1]:>12}  {figures[2]}  ({spread})", flush=True)
                if ratios[0] > options.limit:
                    slower.append(f"{name}: {label}")
    append_rows([row], options.output)
    if slower:
        print(f"slower than {options.limit} times in every turn:", *slower, sep="\n  ", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
