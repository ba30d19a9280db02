"""Words and JSON for what flight recorder files show."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

from .analysis import Finding
from .reading import RingFile

__all__ = ["describe_rings", "format_findings"]


def describe_rings(rings: list[RingFile]) -> list[dict]:
    """Return a dict for each ring: where the rank is, and what it did last."""
    rows = []
    for ring in rings:
        last = ring.operations[-1] if ring.operations else None
        rows.append(
            {
                "communicator": ring.name, "rank": ring.rank, "size": ring.size, "pid": ring.pid, "host": ring.host,
                "state": ring.state, "process_ended": ring.ended_process, "operations": ring.issued,
                "collectives": ring.last_collective.sequence if ring.last_collective else 0, "error": ring.error,
                "last": None if last is None else {
                    "number": last.number, "call": last.describe(), "pending": last.pending,
                    "submitted": last.submitted + ring.clock, "ended": last.ended and last.ended + ring.clock,
                },
            }
        )  # fmt: skip
    return rows


def format_findings(findings: list[Finding], rings: list[RingFile]) -> str:
    """Return the report that is printed: the findings, then a line for each rank."""
    lines = ["What went wrong:" if findings else "Nothing went wrong that these files show."]
    several = len({ring.name for ring in rings}) > 1
    for found in findings:
        when = "" if found.at is None else f"{_time(found.at)}  "
        where = f" [communicator {found.communicator}]" if several else ""
        lines.append(f"  {when}{found.text}{where}")
    groups = defaultdict(list)
    for ring in rings:
        groups[ring.name].append(ring)
    for name, some in sorted(groups.items()):
        lines += ["", f"Communicator {name} of {some[0].size} ranks, engine {some[0].engine}:"]
        for ring in some:
            last = ring.operations[-1] if ring.operations else None
            doing = "no operation" if last is None else f"{'in' if last.pending else 'after'} {last.describe()}"
            ended = ", process ended" if ring.ended_process else ""
            where = f"{ring.host}, {ring.pid}{ended}"
            lines.append(f"  rank {ring.rank} ({where}): {ring.state}; {ring.issued} operations, {doing}")
    return "\n".join(lines)


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
