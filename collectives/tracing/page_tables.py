"""Tables of a timeline's page, which are there without JavaScript, too."""

from __future__ import annotations

import datetime
from html import escape

from .page_data import Drawn
from .summary import (
    Summary,
    align_clocks,
    exposed_intervals,
    is_communication,
    overlap_ns,
    payload_of,
)

__all__ = ["about_list", "format_bytes", "longest_table", "summary_table"]

_LONGEST = 20


def about_list(records: list[dict], summary: Summary) -> str:
    """Return the head's facts as items of a ``<dl>``."""
    shifted = align_clocks(records)
    began = min(record["began"] + shift for record, shift in shifted)
    ended = max(record["ended"] + shift for record, shift in shifted)
    when = datetime.datetime.fromtimestamp((records[0]["began"] + records[0]["offset"]) / 1e9, datetime.timezone.utc)
    about = records[0]["about"]
    hosts = sorted({record["host"] for record in records})
    steps = sorted({each.steps for each in summary.ranks})
    facts = {
        "program": about.get("program"),
        "ranks": f"{len(records)} recorded, world size {records[0]['size']}",
        "hosts": ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""),
        "steps": str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}",
        "recorded": f"{when:%Y-%m-%d %H:%M:%S} UTC, {(ended - began) / 1e9:.3f} s",
        "engine": ", ".join(sorted({engine for each in records if (engine := each["about"].get("engine"))})),
        "versions": ", ".join(f"{name} {about[name]}" for name in ("collectives", "torch", "python") if name in about),
    }
    return "".join(f"<div><dt>{name}</dt><dd>{escape(str(fact))}</dd></div>\n" for name, fact in facts.items() if fact)


def summary_table(summary: Summary, size: int) -> str:
    """Return the rows of the table of ranks, the slowest first."""
    rows, compared = [], bool(summary.everywhere) and len(summary.ranks) > 1
    for place, each in enumerate(summary.slowest_first()):
        last = "-" if each.came_last is None else f"{each.came_last} of {summary.everywhere}"
        slowest = ' <span class="tag">slowest</span>' if place == 0 and compared else ""
        cells = [
            _ms(each.step),
            _ms(each.communication),
            _ms(each.exposed),
            _share(each.exposed / each.step if each.step else None),
            _share(each.overlapped),
            "-" if each.waited is None else _ms(each.waited),
            last,
            format_bytes(each.sent),
            "-" if each.busbw is None or size < 2 else f"{each.busbw / 1e9:.2f} GB/s",
        ]
        head = f'<th scope="row">{each.rank}{slowest}</th>'
        rows.append(f"<tr>{head}<td>{each.steps}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n")
    return "".join(rows)


def longest_table(records: list[dict], drawn: Drawn) -> str:
    """Return the rows of the table of the collectives that blocked a rank's program longest.

    Of one collective the rank that it blocked longest is shown.
    """
    found: dict[int, tuple] = {}
    for record, shift in align_clocks(records):
        blocked = exposed_intervals(record)
        for event in filter(is_communication, record["events"]):
            exposed = overlap_ns(blocked, event[2], event[3])
            group = drawn.group[id(event)]
            if exposed and (group not in found or exposed > found[group][0]):
                found[group] = (exposed, record, shift, event)
    rows, longest = [], sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    for group, (exposed, record, shift, event) in longest[:_LONGEST]:
        _, name, start, end, details = event
        op, size, _ = payload_of(name, record["size"])
        late = drawn.last.get(group)
        waited = "-" if late is None else f"{_ms(max(late[0] - start - shift, 0))} for rank {late[1]}"
        place = drawn.places.get(id(event))
        number = f"{group}"
        if place is not None:
            number = f'<button type="button" data-event="{",".join(map(str, place))}">{group}</button>'
        cells = [
            sum(mark <= start for mark in record["marks"]) + 1, record["rank"], details.get("bucket", "-"), op,
            "-" if size is None else format_bytes(size), details.get("dtype", "-"), _ms(exposed), _ms(end - start),
            waited if late is None or late[1] != record["rank"] else "came last", details.get("parameters", "-"),
        ]  # fmt: skip
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{number}</th>{cells}</tr>\n')
    return "".join(rows) or '<tr><td colspan="11">No collective blocked a program.</td></tr>\n'


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def format_bytes(count: float) -> str:
    """Return a number of bytes in its unit: "26.2 MB" is 26.2 million."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
