"""The table of fault trials in docs/reliability.md, from benchmarks/results/faults.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["make_table", "write"]

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, ROWS = ROOT / "docs" / "reliability.md", ROOT / "benchmarks" / "results" / "faults.jsonl"
MARKS = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
WHAT = {
    "kills": "ranks die or stop at random",
    "deviations": "one rank's program deviates",
    "trainings": "elastic trainings in which ranks die and join",
    "soak": "1,000 operations against an oracle",
}


def make_table(rows: list[dict]) -> str:
    """Return the table: a line for each run of trials, newest of each kind and first seed last."""
    lines = ["| trials | seeds | how many | wrong | error after, median and worst | machine |", "|---" * 6 + "|"]
    for row in rows:
        last = row["first_seed"] + row["trials"] - 1
        wrong = f"{row['wrong']} ({', '.join(map(str, row['wrong_seeds'][:8]))})" if row["wrong"] else "0"
        times = "" if row["median_s"] is None else f"{row['median_s']:.2f} s, {row['worst_s']:.2f} s"
        lines.append(
            f"| {WHAT[row['what']]} (`{row['what']}`) | {row['first_seed']} to {last} | {row['trials']:,} | {wrong} | "
            f"{times} | {row['machine']}, {row['cores']} cores |"
        )
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the table into the page."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    PAGE.write_text(MARKS.sub(lambda found: found[1] + make_table(rows) + found[2], PAGE.read_text()))
