"""Report of a timeline: times of a step, their exposed part, and the ranks that come last."""

from __future__ import annotations

import bisect
from collections import defaultdict

__all__ = ["EXPOSED", "align_clocks", "format_report"]

EXPOSED = ("hook", "wait")  # rows of the time for which communication blocks the backward's thread
_COLLECTIVES = frozenset(
    "all_reduce reduce_scatter all_gather all_to_all broadcast reduce gather scatter send recv barrier".split()
)


def align_clocks(records: list[dict]) -> list[tuple[dict, int]]:
    """Return each rank's record with the shift, in ns, to be added to its times."""
    offsets: dict[str, int] = {}
    for record in records:  # one shift per node: its ranks share a clock
        offsets.setdefault(record["node"], record["offset"])
    base = records[0]["offset"]
    return [(record, offsets[record["node"]] - base) for record in records]


def _is_communication(event: tuple) -> bool:
    return event[0].startswith("lane") and event[1].partition(" ")[0] in _COLLECTIVES


def _covered_ns(events, first: int, last: int) -> int:
    """Return the time between `first` and `last` in which at least one event was running, in ns."""
    total, done = 0, first
    for start, end in sorted((event[2], event[3]) for event in events):
        start, end = max(start, done), min(end, last)
        if end > start:
            total += end - start
            done = end
    return total


def _arrival_times(record: dict, shift: int) -> dict[tuple, int]:
    """Return the time at which a rank started each of its collectives, by a key that is the same on
    all ranks.
    """
    found, count = {}, defaultdict(int)
    for event in sorted(filter(_is_communication, record["events"]), key=lambda event: event[2]):
        key = (bisect.bisect_left(record["marks"], event[2]), event[0], event[1])
        found[(*key, count[key])] = event[2] + shift
        count[key] += 1
    return found


def format_report(records: list[dict]) -> str:
    """Return the report of all ranks' records: one line per rank, the slowest first, then
    remarks.
    """
    arrivals = [_arrival_times(record, shift) for record, shift in align_clocks(records)]
    everywhere = set.intersection(*map(set, arrivals)) if len(records) > 1 else set()
    elsewhere = len(set.union(*map(set, arrivals))) - len(everywhere) if len(records) > 1 else 0
    came_last, waited = [0] * len(records), [0] * len(records)
    for key in everywhere:
        times = [found[key] for found in arrivals]
        came_last[times.index(max(times))] += 1
        for place, when in enumerate(times):
            waited[place] += max(times) - when
    rows = []
    for place, record in enumerate(records):
        ends, marks = [record["began"], record["ended"]], record["marks"]
        if marks:
            ends = [marks[0], marks[-1]] if len(marks) > 1 else [record["began"], marks[0]]
        steps = max(len(marks) - 1, 1)
        step = (ends[1] - ends[0]) / steps
        busy = _covered_ns(filter(_is_communication, record["events"]), *ends) / steps
        exposed = _covered_ns((event for event in record["events"] if event[0] in EXPOSED), *ends) / steps
        wait = waited[place] / len(everywhere) if everywhere else 0.0
        cells = [str(record["rank"]), str(len(marks)), *(f"{ns / 1e6:.3f}" for ns in (step, busy, exposed))]
        cells.append(f"{exposed / step:.1%}" if step else "-")
        cells += [f"{came_last[place]} of {len(everywhere)}", f"{wait / 1e6:.3f}"] if everywhere else ["-", "-"]
        rows.append(((wait, -step), cells))
    heads = ["rank", "steps", "step ms", "communication ms", "exposed ms", "exposed", "last to come", "waits ms"]
    lines = [heads, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    if elsewhere:
        text.append(f"{elsewhere} collectives weren't recorded by all ranks, and don't count for who came last.")
    for record in records:
        if record["dropped"]:
            text.append(
                f"Rank {record['rank']} dropped {record['dropped']} events after its first {len(record['events'])}."
            )
    if len({record["node"] for record in records}) > 1:
        text.append("Several machines: who came last is as right as their wall clocks are.")
    return "\n".join(text)
