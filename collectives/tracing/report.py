"""The report of a timeline: times of a step, what of them is exposed, and which ranks the others wait for."""

from __future__ import annotations

import bisect
from collections import defaultdict

__all__ = ["EXPOSED", "aligned", "table"]

EXPOSED = ("hook", "wait")  # the rows of time that the thread of the backward is kept by communication
_COLLECTIVES = frozenset(
    "all_reduce reduce_scatter all_gather all_to_all broadcast reduce gather scatter send recv barrier".split()
)


def aligned(everyone: list[dict]) -> list[tuple[dict, int]]:
    """Give each rank's record with what its times are to be moved by, in ns."""
    offsets: dict[str, int] = {}
    for taken in everyone:  # one a machine: its ranks must not be moved against each other
        offsets.setdefault(taken["machine"], taken["offset"])
    base = everyone[0]["offset"]
    return [(taken, offsets[taken["machine"]] - base) for taken in everyone]


def _is_communication(event: tuple) -> bool:
    return event[0].startswith("lane") and event[1].partition(" ")[0] in _COLLECTIVES


def _covered(events, first: int, last: int) -> int:
    """Add up the time between two moments in which at least one event was under way, in ns."""
    total, done = 0, first
    for start, end in sorted((event[2], event[3]) for event in events):
        start, end = max(start, done), min(end, last)
        if end > start:
            total += end - start
            done = end
    return total


def _arrivals(taken: dict, shift: int) -> dict[tuple, int]:
    """Tell when a rank came to its collectives; what names one is the same on all ranks."""
    found, count = {}, defaultdict(int)
    for event in sorted(filter(_is_communication, taken["events"]), key=lambda event: event[2]):
        key = (bisect.bisect_left(taken["marks"], event[2]), event[0], event[1])
        found[(*key, count[key])] = event[2] + shift
        count[key] += 1
    return found


def table(everyone: list[dict]) -> str:
    """Give the report of all ranks' records: a line a rank, the slowest first, and what is to be said of them."""
    arrivals = [_arrivals(taken, shift) for taken, shift in aligned(everyone)]
    everywhere = set.intersection(*map(set, arrivals)) if len(everyone) > 1 else set()
    elsewhere = len(set.union(*map(set, arrivals))) - len(everywhere) if len(everyone) > 1 else 0
    came_last, waited = [0] * len(everyone), [0] * len(everyone)
    for key in everywhere:
        times = [found[key] for found in arrivals]
        came_last[times.index(max(times))] += 1
        for place, when in enumerate(times):
            waited[place] += max(times) - when
    rows = []
    for place, taken in enumerate(everyone):
        ends, marks = [taken["began"], taken["ended"]], taken["marks"]
        if marks:
            ends = [marks[0], marks[-1]] if len(marks) > 1 else [taken["began"], marks[0]]
        steps = max(len(marks) - 1, 1)
        step = (ends[1] - ends[0]) / steps
        busy = _covered(filter(_is_communication, taken["events"]), *ends) / steps
        exposed = _covered((event for event in taken["events"] if event[0] in EXPOSED), *ends) / steps
        wait = waited[place] / len(everywhere) if everywhere else 0.0
        cells = [str(taken["rank"]), str(len(marks)), *(f"{ns / 1e6:.3f}" for ns in (step, busy, exposed))]
        cells.append(f"{exposed / step:.1%}" if step else "-")
        cells += [f"{came_last[place]} of {len(everywhere)}", f"{wait / 1e6:.3f}"] if everywhere else ["-", "-"]
        rows.append(((wait, -step), cells))
    heads = ["rank", "steps", "step ms", "communication ms", "exposed ms", "exposed", "last to come", "waits ms"]
    lines = [heads, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    if elsewhere:
        text.append(f"{elsewhere} collectives weren't recorded by all ranks, and don't count for who came last.")
    for taken in everyone:
        if taken["dropped"]:
            text.append(
                f"Rank {taken['rank']} dropped {taken['dropped']} events after its first {len(taken['events'])}."
            )
    if len({taken["machine"] for taken in everyone}) > 1:
        text.append("Several machines: who came last is as right as their wall clocks are.")
    return "\n".join(text)
