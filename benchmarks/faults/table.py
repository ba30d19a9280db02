"""The table of fault trials in docs/reliability.md, from benchmarks/results/faults.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["make_fuzz_table", "make_table", "write"]

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, ROWS = ROOT / "docs" / "reliability.md", ROOT / "benchmarks" / "results" / "faults.jsonl"
MARKS = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
FUZZ_MARKS = re.compile(r"(<!-- fuzz -->\n).*?(<!-- end -->)", re.DOTALL)
WHAT = {
    "kills": "ranks die or stop at random",
    "deviations": "one rank's program deviates",
    "trainings": "elastic trainings in which ranks die and join",
    "soak": "1,000 operations against an oracle",
    "resources": "a rank lacks something",
}
# What a target of fuzz is, in words.
READ = {
    "sealed": "records with a secret's HMAC", "rendezvous": "records of a rendezvous",
    "errors": "errors that ranks of several nodes post", "addresses": "addresses of nodes",
    "listeners": "where ranks of several nodes listen",
    "status": "status for the watchdog", "verdicts": "outcomes of `monitored_barrier` and `collectives.auto`",
    "processes": "identities of processes", "rounds": "memberships of an elastic job",
    "heads": "heads of messages between nodes", "requests": "requests of `collectives.horovod`",
    "board": "lines of the progress board", "flight": "flight recorder files", "manifest": "manifests of checkpoints",
    "checkpoint": "any file of a checkpoint, loaded", "trace": "traces",
    "message": "packets between processes of a node", "admit": "who connects to rank 0",
    "knock": "who listens where rank 0 should", "serve": "what a rank says to rank 0",
    "join": "what rank 0 says to a rank",
}


def make_table(rows: list[dict]) -> str:
    """Return the table: a line for each run of trials, newest last. Of some the defects are mended since."""
    lines = ["| trials | seeds | how many | wrong | error after, median and worst | machine |", "|---" * 6 + "|"]
    for row in rows:
        if row["what"] == "fuzz":
            continue
        last = row["first_seed"] + row["trials"] - 1
        seeds = "mended since" if row.get("mended") else ", ".join(map(str, row["wrong_seeds"][:8]))
        wrong = f"{row['wrong']} ({seeds})" if row["wrong"] else "0"
        times = "" if row["median_s"] is None else f"{row['median_s']:.2f} s, {row['worst_s']:.2f} s"
        lines.append(
            f"| {WHAT[row['what']]} (`{row['what']}`) | {row['first_seed']} to {last} | {row['trials']:,} | {wrong} | "
            f"{times} | {row['machine']}, {row['cores']} cores |"
        )
    return "\n".join(lines) + "\n"


def make_fuzz_table(rows: list[dict]) -> str:
    """Return the table of fuzzing: a line for each target, the newest run."""
    newest = {row["target"]: row for row in rows if row["what"] == "fuzz"}
    lines = ["| what is read | inputs | refused | wrong | lines of the parser that were run |", "|---" * 5 + "|"]
    for target in [name for name in READ if name in newest]:
        row = newest[target]
        reached = f"{row['reached']} of {row['lines']}" if row.get("lines") else ""
        lines.append(
            f"| {READ[target]} (`{target}`) | {row['trials']:,} | {row['refused']:,} | {row['wrong']} | {reached} |"
        )
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the table into the page."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    text = MARKS.sub(lambda found: found[1] + make_table(rows) + found[2], PAGE.read_text())
    PAGE.write_text(FUZZ_MARKS.sub(lambda found: found[1] + make_fuzz_table(rows) + found[2], text))
