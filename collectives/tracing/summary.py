"""Numbers of a timeline: times of a step, their exposed part, and which ranks come last; the table
that shows them.

A rank's record is a dict: ``rank``, ``size`` (ranks of the job), ``host``, ``node`` (the kernel's
boot id), ``offset`` (by how much the wall clock is ahead), ``began`` and ``ended``, ``events`` and
``marks`` as `collectives.recorder.Recorder` has them, ``dropped``, ``about``. Times are in ns of the
rank's monotonic clock.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

__all__ = [
    "EXPOSED",
    "align_clocks",
    "describe_missing_ranks",
    "exposed_intervals",
    "format_report",
    "last_starts",
    "match_collectives",
]

EXPOSED = ("hook", "wait")  # rows of the time for which communication blocks the backward's thread
_COLLECTIVES = frozenset(
    "all_reduce reduce_scatter all_gather all_to_all broadcast reduce gather scatter send recv barrier".split()
)


@dataclass(frozen=True)
class _RankTimes:
    """Means over one rank's steps, in ns.

    ``communication``: some stream was in a collective. ``exposed``: communication blocked the
    backward's thread.
    """

    steps: int
    step: float
    communication: float
    exposed: float


def align_clocks(records: list[dict]) -> list[tuple[dict, int]]:
    """Return each rank's record with the shift, in ns, to be added to its times."""
    offsets: dict[str, int] = {}
    for record in records:  # one shift per node: its ranks share a clock
        offsets.setdefault(record["node"], record["offset"])
    base = records[0]["offset"]
    return [(record, offsets[record["node"]] - base) for record in records]


def exposed_intervals(record: dict) -> list[tuple[int, int]]:
    """Return the times for which communication blocks the backward's thread, as (start, end)."""
    return _merge_intervals(event for event in record["events"] if event[0] in EXPOSED)


def match_collectives(record: dict) -> dict[tuple, tuple]:
    """Return a rank's collectives by a key that is the same on all ranks.

    The key is the number of the backward, the row, the name, and how many of these came before.
    """
    found, count = {}, defaultdict(int)
    for event in sorted(filter(_is_collective, record["events"]), key=lambda event: (event[2], event[0])):
        step = event[4].get("step", bisect.bisect_left(record["marks"], event[2]))
        key = (step, event[0], event[1])
        found[(*key, count[key])] = event
        count[key] += 1
    return found


def last_starts(records: list[dict]) -> dict[tuple, int]:
    """Return when the last rank started each collective that all ranks recorded, by its key.

    Times are of the first record's clock. Empty for one record.
    """
    if len(records) < 2:
        return {}
    starts = [
        {key: event[2] + shift for key, event in match_collectives(record).items()}
        for record, shift in align_clocks(records)
    ]
    return {key: max(found[key] for found in starts) for key in set.intersection(*map(set, starts))}


def format_report(records: list[dict]) -> str:
    """Return the table of all ranks' records, a line per rank, the slowest first; then remarks."""
    last = last_starts(records)
    rows, elsewhere = [], set()
    for record, shift in align_clocks(records):
        starts = {key: event[2] + shift for key, event in match_collectives(record).items()}
        waits = [last[key] - starts[key] for key in last]
        rows.append((sum(waits) / len(last) if last else 0.0, waits.count(0), record["rank"], _times_of(record)))
        elsewhere.update(starts.keys() - last.keys())
    lines = [["rank", "steps", "step ms", "communication ms", "exposed ms", "exposed", "last to come", "waits ms"]]
    for waited, came_last, rank, each in sorted(rows, key=lambda row: (row[0], -row[3].step)):
        times = [f"{ns / 1e6:.3f}" for ns in (each.step, each.communication, each.exposed)]
        share = f"{each.exposed / each.step:.1%}" if each.step else "-"
        compared = [f"{came_last} of {len(last)}", f"{waited / 1e6:.3f}"] if last else ["-", "-"]
        lines.append([str(rank), str(each.steps), *times, share, *compared])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *_remarks(records, len(elsewhere))])


def describe_missing_ranks(records: list[dict]) -> str | None:
    """Return which of the job's ranks have no record here; None where all have one."""
    present, size = {record["rank"] for record in records}, records[0]["size"]
    missing = [str(rank) for rank in range(size) if rank not in present]
    if not missing:
        return None
    listed = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    return f"Ranks recorded here: {len(present)} of {size}. Missing: {listed}."


def _is_collective(event: tuple) -> bool:
    """Return whether an event is a collective on a communication stream."""
    return event[0].startswith("lane") and event[1].partition(" ")[0] in _COLLECTIVES


def _merge_intervals(events) -> list[tuple[int, int]]:
    """Return the times in which at least one event was running, as (start, end) in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((event[2], event[3]) for event in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _times_of(record: dict) -> _RankTimes:
    """Return a rank's means over the time between its first and its last mark."""
    first, last, marks = record["began"], record["ended"], record["marks"]
    if marks:
        first, last = (marks[0], marks[-1]) if len(marks) > 1 else (record["began"], marks[0])
    steps = max(len(marks) - 1, 1)

    def mean(intervals) -> float:
        return sum(max(min(end, last) - max(start, first), 0) for start, end in intervals) / steps

    communication = _merge_intervals(filter(_is_collective, record["events"]))
    return _RankTimes(len(marks), (last - first) / steps, mean(communication), mean(exposed_intervals(record)))


def _remarks(records: list[dict], elsewhere: int):
    if elsewhere and len(records) > 1:
        yield f"{elsewhere} collectives weren't recorded by all ranks, and don't count for who came last."
    for record in records:
        if record["dropped"]:
            yield f"Rank {record['rank']} dropped {record['dropped']} events after its first {len(record['events'])}."
    if len({record["node"] for record in records}) > 1:
        yield "Several machines: who came last is as right as their wall clocks are."
