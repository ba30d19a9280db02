"""Chrome trace of a timeline: one process per rank, one thread per row."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import defaultdict
from pathlib import Path

from .summary import EXPOSED, align_clocks

__all__ = ["chrome_trace_lines", "row_order", "write_trace"]


def write_trace(path: Path, records: list[dict]) -> None:
    """Write the trace of all ranks' records: the file is there as a whole or not at all.

    Raises the ``OSError`` of a file that can't be written.
    """
    # A name of this process in the same folder, so that the rename replaces the file atomically.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(chrome_trace_lines(records))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def chrome_trace_lines(records: list[dict]):
    """Yield the file's lines, one per event, with times in microseconds from the first event of all
    ranks.
    """
    shifted = align_clocks(records)
    zero = min(min([record["began"], *(e[2] for e in record["events"])]) + shift for record, shift in shifted)
    dropped = {str(record["rank"]): record["dropped"] for record in records}
    # All of a record but its events, from which `load` makes the record again.
    ranks = [{key: value for key, value in record.items() if key != "events"} for record in records]
    about = {"dropped events": dropped, "clock": "monotonic, of one machine", "zero": zero, "ranks": ranks}
    if any(shift for _, shift in shifted):
        about["clock"] = "monotonic; several machines, brought together by their wall clocks"
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
    comma = ""
    for record, shift in shifted:
        for event in _rank_events(record, zero - shift):
            yield comma + json.dumps(event, default=str)
            comma = ",\n"
    yield "\n]}\n"


def _rank_events(record: dict, zero: int):
    rank = record["rank"]

    def about(what: str, tid: int, **args) -> dict:
        return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": args}

    yield about("process_name", 0, name=f"rank {rank} ({record['host']})")
    yield about("process_sort_index", 0, sort_index=rank)
    rows = defaultdict(list)
    for event in record["events"]:
        rows[event[0]].append(event)
    ends = record["marks"]
    rows["steps"] = [
        ("steps", f"step {number}", first, last, {})
        for number, (first, last) in enumerate(itertools.pairwise([record["began"], *ends]), 1)
    ] + rows.pop("steps", [])
    tid = 0
    for row in sorted(rows, key=row_order):
        for number, events in enumerate(_split_tracks(rows[row]), 1):
            tid += 1
            yield about("thread_name", tid, name=row if number == 1 else f"{row} ({number})")
            yield about("thread_sort_index", tid, sort_index=tid)
            for _, name, start, end, args in events:
                times = {"ts": (start - zero) / 1000, "dur": (end - start) / 1000}
                yield {"name": name, "cat": row, "ph": "X", "pid": rank, "tid": tid, **times, "args": _json_args(args)}


def row_order(row: str):
    """Return the sort key of a row: the program's rows first, then by name and number."""
    known = ("steps", "backward", *EXPOSED)
    numbers = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", row)]
    return (known.index(row) if row in known else len(known), numbers)


def _split_tracks(events: list[tuple]) -> list[list[tuple]]:
    """Split a row's events into tracks in which events nest: a viewer can't show a partial overlap
    in one track.
    """
    tracks: list[tuple[list, list]] = []  # (events, ends of the open ones)
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


def _json_args(args: dict) -> dict:
    """Return the arguments with infinities and NaN as strings, because JSON has no such numbers."""
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in args.items()}
