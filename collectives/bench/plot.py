"""Plots of time and bandwidth against size, with a line for each implementation."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path

from .options import UsageError
from .report import label

__all__ = ["check", "draw", "short_size"]

_SUFFIXES = (".png", ".svg", ".pdf")
_MAX_PANELS = 12
_MARKERS = "osD^vPX*<>hp"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5c00", "#56b4e9", "#666666")
_UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"), (1, ""))


def check(path: Path) -> None:
    """Raise `UsageError` where `draw` can't draw."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name has to end in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or collectives[bench]")


def draw(rows: list[dict], path: Path) -> None:
    """Draw one line of panels for each operation, dtype, reduction, root and number of ranks: time,
    and bandwidth.

    Where an implementation was measured out of place and in place, the rows in place are drawn.
    Bandwidth is algbw, size by time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = _groups(rows)
    styles = _styles({name for lines in groups.values() for name in lines})
    shown = list(groups.items())[:_MAX_PANELS]
    figure, axes = pyplot.subplots(len(shown), 2, figsize=(11, 3.9 * len(shown)), squeeze=False, layout="constrained")
    for (title, lines), (left, right) in zip(shown, axes, strict=True):
        for name, points in lines.items():
            sizes = sorted(points)
            style = styles[name]
            left.plot(sizes, [points[size]["time_us"] for size in sizes], label=name, **style)
            right.plot(sizes, [points[size]["algbw_gbs"] for size in sizes], label=name, **style)
        for axis, quantity in ((left, "time (µs), median"), (right, "bandwidth (GB/s), size / time")):
            axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=quantity, title=title)
            ticks = sorted({size for points in lines.values() for size in points})
            ticks = ticks[:: -(-len(ticks) // 10)]
            axis.set_xticks(ticks, [short_size(tick) for tick in ticks], minor=False)
            axis.minorticks_off()
            axis.grid(True, which="both", color="#d0d0d0", linewidth=0.5)
        left.legend(fontsize=8)
    if len(groups) > len(shown):
        figure.suptitle(f"the first {len(shown)} of {len(groups)} operations; draw the others by --from and fewer rows")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _groups(rows: list[dict]) -> dict[str, dict[str, dict[int, dict]]]:
    """Sort rows by panel, implementation and size."""
    groups: dict = {}
    for row in sorted(rows, key=lambda row: row["in_place"]):
        if not row["bytes"]:
            continue  # 0 isn't on a log axis
        words = [row["op"], row["dtype"], row["redop"] or "", f"root {row['root']}" if row["root"] >= 0 else ""]
        words += [f"{row['ranks']} ranks", "fresh data" if row.get("fresh") else ""]
        title = ", ".join(filter(None, words))
        groups.setdefault(title, {}).setdefault(label(row), {})[row["bytes"]] = row
    return groups


def _styles(names: set[str]) -> dict[str, dict]:
    """Return marker, dashes and colour of each implementation, the same in every panel."""
    count = len(_MARKERS) * len(_DASHES)
    pairs = [(_MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)]) for i in range(count)]
    pairs = list(dict.fromkeys([*pairs, *product(_MARKERS, _DASHES)]))
    return {
        name: {
            "marker": pairs[i % len(pairs)][0], "linestyle": pairs[i % len(pairs)][1],
            "color": _COLOURS[i % len(_COLOURS)], "markersize": 5, "linewidth": 1.4,
        }
        for i, name in enumerate(sorted(names, key=lambda name: (not name.startswith(("host", "nccl")), name)))
    }  # fmt: skip


def short_size(nbytes: int) -> str:
    """Return a number of bytes as a label: 65536 is 64K."""
    unit, letter = next(pair for pair in _UNITS if nbytes >= pair[0])
    return f"{nbytes / unit:.3g}{letter}"
