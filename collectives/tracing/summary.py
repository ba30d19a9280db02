"""Numbers of a timeline: times of a step, their exposed part, and who waited for whom.

The report and the page both take them from here.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections import defaultdict
from dataclasses import dataclass

__all__ = [
    "BUS_FACTORS",
    "EXPOSED",
    "RankSummary",
    "Summary",
    "align_clocks",
    "exposed_intervals",
    "is_communication",
    "match_collectives",
    "overlap_ns",
    "payload_of",
    "summarize",
]

EXPOSED = ("hook", "wait")  # rows of the time for which communication blocks the backward's thread
_COLLECTIVES = frozenset(
    "all_reduce reduce_scatter all_gather all_to_all broadcast reduce gather scatter send recv barrier".split()
)
# From size / time to the bandwidth of the links, for n ranks: nccl-tests' factors.
BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv"), lambda n: 1.0),
}


@dataclass(frozen=True)
class RankSummary:
    """What one rank did. Times are means over its steps, in ns; None: there is nothing to tell.

    ``communication``: some stream was in a collective. ``exposed``: communication blocked the
    backward's thread. ``overlapped``: the share of ``communication`` in which it did not.
    ``came_last``: of the collectives that all ranks recorded, those to which this rank came last.
    ``waited``: mean time of such a collective for which this rank waited for the last one.
    ``sent``: bytes a step. ``busbw``: bytes/s while in a collective, waits for other ranks included.
    """

    rank: int
    host: str
    steps: int
    step: float
    communication: float
    exposed: float
    overlapped: float | None
    came_last: int | None
    waited: float | None
    sent: float
    busbw: float | None


@dataclass(frozen=True)
class Summary:
    """``ranks``: in the records' order. ``everywhere``: the number of collectives that all ranks
    recorded; ``elsewhere``: of those that only some did. ``remarks``: sentences on what is missing
    or inexact.
    """

    ranks: list[RankSummary]
    everywhere: int
    elsewhere: int
    remarks: list[str]

    def slowest_first(self) -> list[RankSummary]:
        """Return the ranks, those that waited least for others first."""
        return sorted(self.ranks, key=lambda each: (each.waited or 0.0, -each.step))


def align_clocks(records: list[dict]) -> list[tuple[dict, int]]:
    """Return each rank's record with the shift, in ns, to be added to its times."""
    offsets: dict[str, int] = {}
    for record in records:  # one shift per node: its ranks share a clock
        offsets.setdefault(record["node"], record["offset"])
    base = records[0]["offset"]
    return [(record, offsets[record["node"]] - base) for record in records]


def is_communication(event: tuple) -> bool:
    """Whether an event is a collective on a communication stream."""
    return event[0].startswith("lane") and event[1].partition(" ")[0] in _COLLECTIVES


@functools.lru_cache(maxsize=4096)
def payload_of(name: str, ranks: int) -> tuple[str, int | None, float | None]:
    """Return the collective of an event's name, its size in bytes, and the factor to busbw.

    "reduce_scatter 64 B, step, all_gather" is two collectives of 64 bytes each.
    """
    op, _, rest = name.partition(" ")
    size = re.match(r"(\d+) B\b", rest)
    if op not in BUS_FACTORS or size is None:
        return op, None, None
    ops = [op, *(word for word in re.findall(r"\w+", rest) if word in BUS_FACTORS)]
    return op, int(size[1]), sum(BUS_FACTORS[each](ranks) for each in ops)


def merge_intervals(events) -> list[tuple[int, int]]:
    """Return the times in which at least one event was running, as (start, end) in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((event[2], event[3]) for event in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def exposed_intervals(record: dict) -> list[tuple[int, int]]:
    """Return the times for which communication blocks the backward's thread."""
    return merge_intervals(event for event in record["events"] if event[0] in EXPOSED)


def overlap_ns(merged: list[tuple[int, int]], first: int, last: int) -> int:
    """Return how much of the time from `first` to `last` is in `merged`, in ns."""
    total, place = 0, max(bisect.bisect_left(merged, (first,)) - 1, 0)
    while place < len(merged) and merged[place][0] < last:
        start, end = merged[place]
        total += max(min(end, last) - max(start, first), 0)
        place += 1
    return total


def match_collectives(record: dict) -> dict[tuple, tuple]:
    """Return a rank's collectives by a key that is the same on all ranks, in the order of their
    starts: the number of the backward, the row, the name, and how many of these came before.
    """
    found, count = {}, defaultdict(int)
    for event in sorted(filter(is_communication, record["events"]), key=lambda event: (event[2], event[0])):
        step = event[4].get("step", bisect.bisect_left(record["marks"], event[2]))
        key = (step, event[0], event[1])
        found[(*key, count[key])] = event
        count[key] += 1
    return found


def summarize(records: list[dict]) -> Summary:
    """Return the numbers of all ranks' records."""
    arrivals = [
        {key: event[2] + shift for key, event in match_collectives(record).items()}
        for record, shift in align_clocks(records)
    ]
    everywhere = set.intersection(*map(set, arrivals)) if len(records) > 1 else set()
    elsewhere = len(set.union(*map(set, arrivals))) - len(everywhere) if len(records) > 1 else 0
    came_last, waited = [0] * len(records), [0] * len(records)
    for key in everywhere:
        times = [found[key] for found in arrivals]
        came_last[times.index(max(times))] += 1
        for place, when in enumerate(times):
            waited[place] += max(times) - when
    ranks = []
    for place, record in enumerate(records):
        compared = {"came_last": None, "waited": None}
        if everywhere:
            compared = {"came_last": came_last[place], "waited": waited[place] / len(everywhere)}
        ranks.append(RankSummary(**_times_of(record), **compared))
    return Summary(ranks, len(everywhere), elsewhere, list(_remarks(records, elsewhere)))


def _times_of(record: dict) -> dict:
    """Return what a rank's record alone tells, over the time between its first and last mark."""
    first, last, marks = record["began"], record["ended"], record["marks"]
    if marks:
        first, last = (marks[0], marks[-1]) if len(marks) > 1 else (record["began"], marks[0])
    steps = max(len(marks) - 1, 1)
    sending = [event for event in record["events"] if is_communication(event)]
    communication, exposed = merge_intervals(sending), exposed_intervals(record)
    busy, blocked = overlap_ns(communication, first, last), overlap_ns(exposed, first, last)
    both = sum(overlap_ns(exposed, max(start, first), min(end, last)) for start, end in communication)
    sent, on_bus, lasted = 0, 0.0, 0
    for _, name, start, end, details in sending:
        if first <= start < last:
            sent += details.get("bytes", 0)
            _, size, factor = payload_of(name, record["size"])
            if size is not None:
                on_bus, lasted = on_bus + size * factor, lasted + end - start
    return {
        "rank": record["rank"], "host": record["host"], "steps": len(marks), "step": (last - first) / steps,
        "communication": busy / steps, "exposed": blocked / steps, "overlapped": 1 - both / busy if busy else None,
        "sent": sent / steps, "busbw": on_bus / lasted * 1e9 if lasted else None,
    }  # fmt: skip


def _remarks(records: list[dict], elsewhere: int):
    if elsewhere:
        yield f"{elsewhere} collectives weren't recorded by all ranks, and don't count for who came last."
    for record in records:
        if record["dropped"]:
            yield f"Rank {record['rank']} dropped {record['dropped']} events after its first {len(record['events'])}."
    if len({record["node"] for record in records}) > 1:
        yield "Several machines: who came last is as right as their wall clocks are."
