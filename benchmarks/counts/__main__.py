"""``python -m benchmarks.counts``: print the counts of a training step by every front end.

``--write`` puts them into docs/counts.md and benchmarks/results/counts.json, ``--check`` compares
them with what is there. Numbers are exact, and the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "counts.md"
RESULTS = ROOT / "benchmarks" / "results" / "counts.json"
SIZES = (2, 4)
SECONDS = 300
MARK = re.compile(r"(<!-- counts -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = (
    "step", "torch's operations", "our kernels", "NCCL", "passes", "wire", "compute stream waits", "host waits",
    "allocations",
)  # fmt: skip


def measure(sizes=SIZES, ways=()) -> dict[int, dict]:
    """Return the counts at each number of ranks, by processes that run side by side."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.counts.one_size", *(["--ways", *ways] if ways else [])]
    running = {
        ranks: subprocess.Popen(
            [*command, "--ranks", str(ranks)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for ranks in sizes
    }  # fmt: skip
    found = {}
    try:
        for ranks, process in running.items():
            output, errors = process.communicate(timeout=SECONDS)
            if process.returncode:
                raise RuntimeError(f"the counts at {ranks} ranks failed:\n{errors[-4000:]}")
            found[ranks] = json.loads(output.splitlines()[-1])
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return found


def launches(row: dict) -> tuple[int, int, int]:
    """Return a step's launches: torch's operations, our kernels, NCCL's."""
    return row["torch"], row["kernels"], row["nccl"]


def growing(found: dict[int, dict]) -> list[str]:
    """Return the ways whose launches grow with the ranks."""
    least, most = ({row["way"]: launches(row) for row in found[size]["rows"]} for size in (min(found), max(found)))
    return [way for way, counts in least.items() if most[way] != counts]


def table(found: dict[int, dict]) -> str:
    """Return the counts at most ranks as a table."""
    return "\n".join(["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|", *lines_of(found)])


def lines_of(found: dict[int, dict]) -> list[str]:
    """Return the table's lines, one a way."""
    grows, lines = growing(found), []
    for row in found[max(found)]["rows"]:
        numbers = list(map(str, launches(row)))
        if row["way"] in grows:
            numbers[1] += " (grows)"
        allocations = str(row["allocations"])
        if row["nccl_memory"]:
            allocations += ", " + ", ".join(f"{count} {name}" for name, count in row["nccl_memory"].items())
        name = row["way"] if row["ours"] else f"*{row['way']}*"
        cells = [name, *numbers, f"{row['passes']:.2f}", f"{row['wire']:.2f}", str(row["waits"]),
                 str(len(row["host_waits"])), allocations]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page(found: dict[int, dict], text: str) -> str:
    """Return the page with its table made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}{table(found)}\n{mark[2]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=[], help="of the table's; all without it")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.ways and (arguments.write or arguments.check):
        parser.error("--write and --check are of all ways")
    found = measure(ways=arguments.ways)
    print(table(found))
    for row in found[max(found)]["rows"]:
        for wait in dict.fromkeys(row["host_waits"]):
            print(f"{row['way']}: the host waits in {wait}")
    if arguments.write:
        PAGE.write_text(page(found, PAGE.read_text()))
        RESULTS.write_text(json.dumps(found[max(found)], indent=1) + "\n")
    if arguments.check and PAGE.read_text() != page(found, PAGE.read_text()):
        print(f"{PAGE} has other counts: python -m benchmarks.counts --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
