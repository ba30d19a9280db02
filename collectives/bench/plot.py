"""Plot of time and bandwidth against size, with a line for each implementation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .options import UsageError
from .report import describe_case

__all__ = ["check_plot", "draw_plot"]

_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^vPX*<>hp"
_UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"), (1, ""))


def check_plot(path: Path) -> None:
    """Raise `UsageError` where `draw_plot` can't draw."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name has to end in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def draw_plot(rows: list[dict], path: Path) -> None:
    """Draw two panels for each case: time, and bandwidth (algbw, size by time).

    Where an implementation was measured out of place and in place, the rows in place are drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases: dict[str, dict[str, dict[int, dict]]] = {}
    for row in sorted(rows, key=lambda row: row["in_place"]):
        if row["bytes"]:  # 0 isn't on a log axis
            cases.setdefault(describe_case(row), {}).setdefault(row["name"], {})[row["bytes"]] = row
    markers = {name: _MARKERS[at % len(_MARKERS)] for at, name in enumerate(dict.fromkeys(row["name"] for row in rows))}
    figure, axes = pyplot.subplots(len(cases), 2, figsize=(11, 3.9 * len(cases)), squeeze=False, layout="constrained")
    for (title, lines), panels in zip(cases.items(), axes, strict=True):
        ticks = sorted({size for points in lines.values() for size in points})
        ticks = ticks[:: -(-len(ticks) // 10)]
        quantities = (("time_us", "time (µs), median"), ("algbw_gbs", "bandwidth (GB/s), size / time"))
        for axis, (key, label) in zip(panels, quantities, strict=True):
            for name, points in lines.items():
                sizes = sorted(points)
                axis.plot(sizes, [points[size][key] for size in sizes], label=name, marker=markers[name])
            axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=label, title=title)
            axis.set_xticks(ticks, [_format_size(tick) for tick in ticks], minor=False)
            axis.minorticks_off()
            axis.grid(True, color="#d0d0d0", linewidth=0.5)
        panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _format_size(nbytes: int) -> str:
    """Return a number of bytes as a label: 65536 is 64K."""
    unit, letter = next(pair for pair in _UNITS if nbytes >= pair[0])
    return f"{nbytes / unit:.3g}{letter}"
