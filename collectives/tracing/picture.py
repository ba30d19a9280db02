"""Picture of a timeline: time to the right, ranks as rows, a bar for each bucket, exposed time in red."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ..errors import InvalidArgument, InvalidUsage
from .summary import (
    EXPOSED,
    align_clocks,
    describe_missing_ranks,
    exposed_intervals,
    last_starts,
    match_collectives,
)
from .trace import row_order

__all__ = ["draw_picture", "save_picture"]

_MOST_RANKS = 64
_GAP = 0.4  # between two ranks, in rows
_BUCKETS = ("#0072b2", "#009e73", "#8c510a", "#6a51a3", "#35708a", "#5f6b00")  # in turn
_OTHER = "#777777"
_PROGRAM, _EXPOSED = "#d5dbe3", "#d7301f"
_WAITS = {"facecolor": "#ffffffb0", "edgecolor": "#222222", "hatch": "/////", "linewidth": 0}
_LEGEND = {
    "the program runs": {"facecolor": _PROGRAM},
    "exposed: communication blocks the program": {"facecolor": _EXPOSED},
    "a bucket with its number, in a collective": {"facecolor": _BUCKETS[0]},
    "the rank waits for the last rank to come": _WAITS,
}


def save_picture(path: Path, records: list[dict], steps: int = 2) -> None:
    """Write the picture as PNG, SVG or PDF, as the path's suffix says; see `draw_picture`."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidArgument(f"{path}: the picture's name must end in .png, .svg or .pdf")
    draw_picture(records, steps).savefig(path, dpi=130)


def draw_picture(records: list[dict], steps: int = 2):
    """Return the last steps of all ranks' records as a ``matplotlib.figure.Figure``.

    Each rank has a row for its program, red where communication blocks it, and one for each other
    row of its trace. The bars of a row are one collection, whose ``get_gid()`` is "rank 0, lane 1".
    Of more than 64 ranks the first 64 are drawn. Raises `InvalidUsage` where matplotlib is not
    installed.
    """
    if steps < 1:
        raise InvalidArgument(f"a picture has 1 step or more, not {steps}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InvalidUsage(f"the picture needs matplotlib ({error}): pip install matplotlib") from error
    first, last = _last_steps(records, steps)
    arrivals = {key: when - first for key, when in last_starts(records).items()}
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, (last - first) / 1e6)
    top, ticks = 0.0, []
    for record, shift in align_clocks(records)[:_MOST_RANKS]:
        labels = _draw_rank(axes, record, shift - first, last - first, arrivals, top)
        ticks += [(top + row + 0.5, label) for row, label in enumerate(labels)]
        top += len(labels) + _GAP
    figure.set_size_inches(9, 1.7 + 0.27 * top)  # as wide as a page, where the text can be read
    axes.set_ylim(top, -_GAP)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_xlabel("ms")
    axes.set_title(_describe(records, steps), loc="left", fontsize=10, parse_math=False)
    figure.legend(
        handles=[Patch(label=label, **style) for label, style in _LEGEND.items()], loc="outside lower center",
        ncols=2, fontsize=9, frameon=False,
    )  # fmt: skip
    return figure


def _last_steps(records: list[dict], steps: int) -> tuple[int, int]:
    """Return when the last steps start and end, on the first record's clock."""
    starts, ends = [], []
    for record, shift in align_clocks(records):
        marks = record["marks"]
        starts.append(shift + (marks[-steps - 1] if len(marks) > steps else record["began"]))
        ends.append(shift + (marks[-1] if marks else record["ended"]))
    return min(starts), max(*ends, min(starts) + 1)


def _draw_rank(axes, record: dict, shift: int, length: int, arrivals: dict, top: float) -> list[str]:
    """Draw one rank from row `top` on; return the labels of its rows.

    ``shift``: to be added to the record's times, so that the picture goes from 0 to `length`, in ns.
    ``arrivals``: when the last rank started each collective, in ns of the picture.
    """

    def clip(intervals) -> list[tuple[float, float]]:
        """Return intervals, in ns of the picture, as (start, length) in ms without what is outside."""
        cut = [(max(start, 0), min(end, length)) for start, end in intervals]
        return [(start / 1e6, (end - start) / 1e6) for start, end in cut if start <= end]

    rank, keys = record["rank"], {id(event): key for key, event in match_collectives(record).items()}
    exposed = clip((start + shift, end + shift) for start, end in exposed_intervals(record))
    axes.broken_barh([(0, length / 1e6)], (top + 0.15, 0.7), facecolor=_PROGRAM)
    axes.broken_barh(exposed, (top + 0.15, 0.7), facecolor=_EXPOSED, gid=f"rank {rank}, exposed")
    share = sum(width for _, width in exposed) / (length / 1e6)
    axes.text(1.01, top + 0.5, f"{share:.0%} exposed", transform=axes.get_yaxis_transform(), va="center", fontsize=9)

    rows = defaultdict(list)
    for event in record["events"]:
        if event[0] not in EXPOSED and event[3] + shift >= 0 and event[2] + shift <= length:
            rows[event[0]].append(event)
    labels = [f"rank {rank}   program"]
    for row in sorted(rows, key=row_order):
        y = top + len(labels)
        bars = clip((event[2] + shift, event[3] + shift) for event in rows[row])
        buckets = [event[4].get("bucket") for event in rows[row]]
        colors = [_OTHER if bucket is None else _BUCKETS[bucket % len(_BUCKETS)] for bucket in buckets]
        axes.broken_barh(bars, (y + 0.1, 0.8), facecolors=colors, edgecolor="white", gid=f"rank {rank}, {row}")
        waits = [
            (event[2] + shift, min(arrivals[keys[id(event)]], event[3] + shift))
            for event in rows[row] if keys.get(id(event)) in arrivals
        ]  # fmt: skip
        axes.broken_barh(clip(waits), (y + 0.1, 0.8), gid=f"rank {rank}, {row}, waits", **_WAITS)
        for bucket, color, (start, width) in zip(buckets, colors, bars, strict=True):
            if bucket is not None and width * 1e6 > 0.012 * length:
                axes.text(
                    start + width / 2, y + 0.47, str(bucket), color="white", ha="center", va="center", fontsize=8,
                    bbox={"facecolor": color, "edgecolor": "none", "pad": 1},
                )  # fmt: skip
        labels.append(row.replace("lane", "stream", 1))
    ends = [(mark + shift) / 1e6 for mark in record["marks"] if 0 <= mark + shift <= length]
    axes.vlines(ends, top, top + len(labels), color="black", linewidth=1)
    return labels


def _describe(records: list[dict], steps: int) -> str:
    """Return the title: the program, which steps, and what is missing."""
    about, marks = records[0]["about"], len(records[0]["marks"])
    shown = f"steps {max(marks - steps, 0) + 1} to {marks} of {marks}" if marks else "no step"
    title = f"{about.get('program', 'a program')}, {records[0]['size']} ranks, engine {about.get('engine', 'unknown')}"
    parts = [f"{title}: {shown}; a black line is the end of a backward."]
    if len(records) > _MOST_RANKS:
        parts.append(f"The first {_MOST_RANKS} of {len(records)} ranks are drawn.")
    if missing := describe_missing_ranks(records):
        parts.append(missing)
    return "\n".join(parts)
