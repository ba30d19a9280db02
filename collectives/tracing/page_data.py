"""Data of a timeline's page: columns of whole numbers, in which times are steps from the one before."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field

from .summary import EXPOSED, align_clocks, exposed_intervals, is_communication, match_collectives, payload_of
from .trace import json_args, row_order, split_tracks

__all__ = ["LIMIT_BYTES", "Drawn", "page_data"]

LIMIT_BYTES = 14_000_000
_ROLES = {"program": 0, "communication": 1, "other": 2}


@dataclass
class Drawn:
    """What the page draws. ``group``: of a collective, by the id of its event, its number, the same
    on all ranks. ``last``: of a group that all ranks recorded, when the last of them started it, and
    which. ``places``: by the id of an event, (place of the rank, lane, position in it).
    ``remarks``: what was left out.
    """

    group: dict[int, int]
    last: dict[int, tuple[int, int]]
    places: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def page_data(records: list[dict], limit: int) -> tuple[str, Drawn]:
    """Return the data as JSON of at most about `limit` bytes, and what is drawn."""
    shifted = align_clocks(records)
    starts = sorted(event[2] + shift for record, shift in shifted for event in record["events"])
    # An event takes 30 bytes or so; what distinct arguments take is seen when it is done.
    count = min(len(starts), limit // 36)
    drawn = _match(shifted)
    while True:
        until = None if count >= len(starts) else starts[count]
        text = _encode(shifted, until, drawn)
        if len(text) <= limit or count == 0:
            break
        count = int(count * 0.95 * limit / len(text))
    if until is not None:
        zero = min(record["began"] + shift for record, shift in shifted)
        drawn.remarks.append(
            f"The picture has the first {count} of {len(starts)} events, those of the first "
            f"{(until - zero) / 1e9:.3f} s, since all would make it too large. The tables and the trace have all."
        )
    return text, drawn


def _match(shifted: list[tuple[dict, int]]) -> Drawn:
    numbers: dict[tuple, int] = {}
    group, last, count = {}, {}, defaultdict(int)
    for record, shift in shifted:
        for key, event in match_collectives(record).items():
            number = group[id(event)] = numbers.setdefault(key, len(numbers))
            last[number] = max(last.get(number, (event[2] + shift, record["rank"])), (event[2] + shift, record["rank"]))
            count[number] += 1
    return Drawn(group, {number: found for number, found in last.items() if count[number] == len(shifted) > 1})


def _encode(shifted: list[tuple[dict, int]], until: int | None, drawn: Drawn) -> str:
    names: dict[tuple, int] = {}
    details: dict[str, int] = {}
    named, detailed = [], []
    zero = min(min([record["began"], *(e[2] for e in record["events"])]) + shift for record, shift in shifted)
    ranks, drawn.places = [], {}
    for place, (record, shift) in enumerate(shifted):
        origin, stop = zero - shift, math.inf if until is None else until - shift
        exposed = [interval for interval in exposed_intervals(record) if interval[0] < stop]
        lanes = []
        for number, (row, role, events) in enumerate(_lanes(record, stop)):
            columns = {name: [] for name in ("start", "length", "name", "details", "group")}
            before = origin
            for position, event in enumerate(events):
                _, name, start, end, args = event
                key, text = (event[0], name), repr(args)
                if key not in names:
                    names[key] = len(named)
                    named.append(_describe(record, event))
                if text not in details:
                    details[text] = len(detailed)
                    detailed.append(json_args(args))
                columns["start"].append(start - before)
                columns["length"].append(end - start)
                columns["name"].append(names[key])
                columns["details"].append(details[text])
                columns["group"].append(drawn.group.get(id(event), -1))
                drawn.places[id(event)] = (place, number, position)
                before = start
            lanes.append({"row": row, "role": _ROLES[role], **columns})
        ranks.append(
            {
                "rank": record["rank"], "host": record["host"], "began": record["began"] - origin,
                "ended": record["ended"] - origin, "marks": [mark - origin for mark in record["marks"]],
                "exposed": _deltas(exposed, origin), "lanes": lanes,
            }
        )  # fmt: skip
    groups = 1 + max(drawn.group.values(), default=-1)
    data = {"names": named, "details": detailed, "groups": groups, "ranks": ranks}
    return json.dumps(data, separators=(",", ":"), default=str)


def _describe(record: dict, event: tuple) -> list:
    """Return an event's name, its collective or None, its bytes, the factor to busbw, and its row."""
    op, size, factor = payload_of(event[1], record["size"]) if is_communication(event) else (None, None, None)
    return [event[1], op, size, factor, event[0]]


def _lanes(record: dict, until: float):
    """Yield the lanes of a rank as (label, role, events by their starts): the program's thread first."""
    rows = defaultdict(list)
    for event in record["events"]:
        if event[2] < until:
            rows["program" if event[0] in EXPOSED else event[0]].append(event)
    program = sorted(rows.pop("program", []), key=lambda event: (event[2], -event[3]))
    yield "program", "program", program
    for row in sorted(rows, key=row_order):
        role = "communication" if row.startswith("lane") else "other"
        label = row.replace("lane", "stream", 1) if role == "communication" else row
        for number, events in enumerate(split_tracks(rows[row]), 1):
            yield (label if number == 1 else f"{label} ({number})"), role, events


def _deltas(intervals: list[tuple[int, int]], origin: int) -> list[int]:
    """Return start, length, gap, length, gap, length, and so on."""
    times = [origin, *itertools.chain.from_iterable(intervals)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
