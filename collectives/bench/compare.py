"""Comparison of this run with an earlier one."""

from __future__ import annotations

from .report import is_ours, label

__all__ = ["compare"]

_KEY = ("op", "engine", "algorithm", "dtype", "redop", "root", "ranks", "bytes", "in_place", "zero_copy", "wire")


def compare(old: list[dict], new: list[dict], tolerance: float, show=print) -> tuple[int, int]:
    """Print old and new times and their ratio.

    Return the number of rows in both, and of our own that got slower. ``tolerance``: with 0.2 a row
    may take 1.2 times as long. A peer's rows are printed, because they show how much the node
    itself differs, and are never a regression.
    """
    before = {_key(row): row for row in old}  # of several rows with one key the last
    pairs = [(before[_key(row)], row) for row in new if _key(row) in before]
    if not pairs:
        return 0, 0
    machines = {row.get("machine") for pair in pairs for row in pair}
    if len(machines) > 1:
        show(f"# compared across machines: {', '.join(map(str, sorted(machines, key=str)))}")
    width = max(len(label(row)) for _, row in pairs) + 2
    show(f"# {'old/new':>8}{'old (us)':>12}{'new (us)':>12}{'size':>14}  {'':<{width}}")
    slower = 0
    for was, now in pairs:
        ratio = was["time_us"] / now["time_us"]
        worse = is_ours(now) and now["time_us"] > was["time_us"] * (1 + tolerance)
        slower += worse
        place = "in place" if now["in_place"] else "out of place"
        about = f"{label(now):<{width}}{now['op']} {now['dtype']} {now['redop'] or ''} {place}".rstrip()
        times = f"{was['time_us']:>12.2f}{now['time_us']:>12.2f}"
        show(f"# {ratio:>8.2f}{times}{now['bytes']:>14}  {about}{'  REGRESSION' * worse}")
    new_keys = {_key(row) for row in new}
    only_old = sum(_key(row) not in new_keys for row in old)
    show(f"# {len(pairs)} rows in both, {only_old} only in the old file, {len(new) - len(pairs)} only in this run")
    show(f"# {slower} regression{'s' * (slower != 1)} past {tolerance:.0%}")
    return len(pairs), slower


def _key(row: dict) -> tuple:
    return *(row.get(name) for name in _KEY), bool(row.get("fresh"))
