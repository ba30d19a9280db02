"""Predictions beside what this run has measured: kernels' rates, steps of one rank, host times.

`ratio`: measured by predicted. A kernel's prediction is its bytes at `kernel_bytes_per_s` of
benchmarks/results/predictions.json, which is that of an H200; `ratio_by_copy`: its time by that of
the same bytes at the rate of this GPU's own copies. A step's is the time that it takes more than the
model alone. Rows without `measured` are of stages that did not run before this one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .program import ROOT, Program

PREDICTIONS = ROOT / "benchmarks" / "results" / "predictions.json"
LEAST_BYTES = 25 << 20  # of a kernel whose rate is compared: smaller ones don't fill the GPU


def rows_by_stage(report: Path) -> dict[str, list[dict]]:
    """Return the rows of each stage of a report."""
    if not report.exists():
        return {}
    parts = json.loads(report.read_text())["parts"].values()
    return {stage["stage"]: stage["rows"] for part in parts for stage in part["stages"]}


def compared(predicted: float, measured: float | None, unit: str) -> dict:
    found = {f"predicted_{unit}": round(predicted, 4)}
    if measured is not None:
        found[f"measured_{unit}"] = round(measured, 4)
        found["ratio"] = round(measured / predicted, 3) if predicted else None
    return found


def kernels(program, rate: float, rows: list[dict], copies: list[dict]) -> None:
    """Compare the largest case of each kernel."""
    found = [row["gb_per_s"] for row in copies if row.get("case") == "copy_device" and "gb_per_s" in row]
    copy = max(found, default=None)
    largest: dict[str, dict] = {}
    for row in rows:
        if "moved" in row and row["moved"] >= largest.get(row["case"], {"moved": 0})["moved"]:
            largest[row["case"]] = row
    for case, row in largest.items():
        found = compared(row["moved"] / rate * 1e6, row["us"], "us")
        if copy:
            found["ratio_by_copy"] = round(row["us"] / (row["moved"] / copy * 1e-3), 3)
        program.row(case=f"kernel: {case}", moved=row["moved"], large=row["moved"] >= LEAST_BYTES, **found)


def main() -> int:
    program = Program(__doc__, "predicted")
    program.parser.add_argument("--report", type=Path, default=ROOT / "out" / "gpu" / "report.json")
    arguments = program.parse()
    predictions = json.loads(PREDICTIONS.read_text())["one_gpu"]
    stages = rows_by_stage(arguments.report)
    kernels(program, predictions["kernel_bytes_per_s"], stages.get("kernel times", []), stages.get("copy", []))
    ms = {row["case"]: row["ms"] for row in stages.get("steps, 1 rank", []) if "ms" in row}
    for way, more in predictions["step_more_than_alone_ms"].items():
        measured = ms[way] - ms["alone"] if way in ms and "alone" in ms else None
        program.row(case=f"step, 1 rank: {way}", **compared(more, measured, "ms"))
    host = {row["case"]: row.get("us_a_part", row.get("us")) for row in stages.get("host times", []) if "case" in row}
    for case, us in predictions["host_us"].items():
        program.row(case=f"host: {case}", **compared(us, host.get(case), "us"))
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
