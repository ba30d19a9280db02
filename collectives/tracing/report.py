"""Report of a timeline: a table of times of a step, their exposed part, and the ranks that come
last.
"""

from __future__ import annotations

from .summary import summarize

__all__ = ["format_report"]


def format_report(records: list[dict]) -> str:
    """Return the report of all ranks' records: one line per rank, the slowest first, then
    remarks.
    """
    summary = summarize(records)
    lines = [["rank", "steps", "step ms", "communication ms", "exposed ms", "exposed", "last to come", "waits ms"]]
    for each in summary.slowest_first():
        times = [f"{ns / 1e6:.3f}" for ns in (each.step, each.communication, each.exposed)]
        cells = [str(each.rank), str(each.steps), *times, f"{each.exposed / each.step:.1%}" if each.step else "-"]
        if each.waited is None:
            cells += ["-", "-"]
        else:
            cells += [f"{each.came_last} of {summary.everywhere}", f"{each.waited / 1e6:.3f}"]
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *summary.remarks])
