"""Records of ranks as a timeline hands them over, made by hand."""

from __future__ import annotations

__all__ = ["MS", "record", "training"]

MS = 1_000_000  # ns


def record(rank, events=(), marks=(), *, size=2, began=0, ended=100, node="m", offset=0, dropped=0, **about):
    """One rank's record. Times are ms; an event is (row, name, start, end) or that and its arguments."""
    events = [
        (row, name, round(first * MS), round(last * MS), *(args or [{}])) for row, name, first, last, *args in events
    ]
    return {
        "rank": rank, "size": size, "host": "here", "node": node, "offset": offset, "began": round(began * MS),
        "ended": round(ended * MS), "events": events, "marks": [round(mark * MS) for mark in marks],
        "dropped": dropped, "about": {"program": "train.py", "engine": "host", **about},
    }  # fmt: skip


def training(ranks=3, steps=4, buckets=3, parameters="layer{}.weight"):
    """Steps of 10 ms. Rank r comes to bucket b at 2 + 2 b + r / 2 ms of a step, and all have it 1.5 ms after the last
    rank has come; its program is blocked for the last 0.5 ms of that.
    """
    made = []
    for rank in range(ranks):
        events = []
        for step in range(steps):
            for bucket in range(buckets):
                begin = 10 * step + 2 + 2 * bucket
                end = begin + (ranks - 1) / 2 + 1.5
                details = {"bucket": bucket, "bytes": 3000, "dtype": "bfloat16"}
                details["parameters"] = parameters.format(bucket)
                events.append((f"lane {bucket % 2}", "all_reduce 3000000 B", begin + rank / 2, end, details))
                events.append(("hook", f"bucket {bucket}", end - 0.5, end))
            events.append(("wait", "wait", 10 * step + 9, 10 * step + 9.5))
        marks = [10 * step + 9.75 for step in range(steps)]
        made.append(record(rank, events, marks, size=ranks, ended=10 * steps))
    return made
