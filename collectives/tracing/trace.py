"""The file of a timeline: Chrome's trace events, one process a rank, one thread a row."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict

from .report import EXPOSED, aligned

__all__ = ["lines"]


def lines(everyone: list[dict]):
    """Give the file's lines: an event each, times in microseconds from the first of all."""
    moved = aligned(everyone)
    zero = min(min([taken["began"], *(e[2] for e in taken["events"])]) + shift for taken, shift in moved)
    dropped = {str(taken["rank"]): taken["dropped"] for taken in everyone}
    about = {"dropped events": dropped, "clock": "monotonic, of one machine"}
    if any(shift for _, shift in moved):
        about["clock"] = "monotonic; several machines, brought together by their wall clocks"
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
    comma = ""
    for taken, shift in moved:
        for event in _rank_events(taken, zero - shift):
            yield comma + json.dumps(event, default=str)
            comma = ",\n"
    yield "\n]}\n"


def _rank_events(taken: dict, zero: int):
    rank = taken["rank"]

    def about(what: str, tid: int, **args) -> dict:
        return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": args}

    yield about("process_name", 0, name=f"rank {rank} ({taken['host']})")
    yield about("process_sort_index", 0, sort_index=rank)
    rows = defaultdict(list)
    for event in taken["events"]:
        rows[event[0]].append(event)
    ends = taken["marks"]
    rows["steps"] = [
        ("steps", f"step {number}", first, last, {})
        for number, (first, last) in enumerate(itertools.pairwise([taken["began"], *ends]), 1)
    ] + rows.pop("steps", [])
    tid = 0
    for row in sorted(rows, key=_row_order):
        for number, events in enumerate(_nested(rows[row]), 1):
            tid += 1
            yield about("thread_name", tid, name=row if number == 1 else f"{row} ({number})")
            yield about("thread_sort_index", tid, sort_index=tid)
            for _, name, start, end, args in events:
                times = {"ts": (start - zero) / 1000, "dur": (end - start) / 1000}
                yield {"name": name, "ph": "X", "pid": rank, "tid": tid, **times, "args": _plain(args)}


def _row_order(row: str):
    known = ("steps", "backward", *EXPOSED)
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", row)]
    return (known.index(row) if row in known else len(known), numbers)


def _nested(events: list[tuple]) -> list[list[tuple]]:
    """Divide a row's events where two of them overlap and neither holds the other, which a viewer can't show."""
    tracks: list[tuple[list, list]] = []  # (events, ends of those that are open)
    for event in sorted(events, key=lambda event: (event[2], -event[3])):
        for track in tracks:
            open_ends = track[1]
            while open_ends and open_ends[-1] <= event[2]:
                open_ends.pop()
            if not open_ends or event[3] <= open_ends[-1]:
                break
        else:
            track = ([], [])
            tracks.append(track)
        track[0].append(event)
        track[1].append(event[3])
    return [placed for placed, _ in tracks]


def _plain(args: dict) -> dict:
    """Give arguments in which no number is one that JSON doesn't have."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in args.items()}
