"""Who is first: for each operation and size the fastest peer beside ours, at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

from .report import case_key, describe, is_ours, label, short_time

__all__ = ["print_ranking", "rank_rows"]

_OUR_FRONT_END = "backend"  # our communicator as torch.distributed calls it: no other library
_HEADINGS = ("size", "ours", "zero-copy", "best peer", "its time", "by ours", "by z.-c.", "first")
_WIDTHS = (11, 10, 10, 17, 10, 9, 9, 18)


def rank_rows(rows: list[dict]) -> list[dict]:
    """Return for each case and size that a peer was measured for who is first.

    An entry has ``case`` (of `case_key`), ``bytes``, ``ours`` and ``zero_copy`` (our rows, or None),
    ``peer`` (the fastest peer's row), ``ratio`` and ``zero_copy_ratio`` (that peer's time by ours,
    or None), and ``first`` (a `label`). Of our rows those of the library's own choice of algorithm
    count, where there are any, else the fastest; none with a wire format. Rows in place count
    where an implementation has them.
    """
    groups: dict[tuple, dict[str, dict]] = {}
    for row in sorted(rows, key=lambda row: row["in_place"]):
        if row["engine"] != _OUR_FRONT_END and not row.get("wire"):
            groups.setdefault((case_key(row), row["bytes"]), {})[label(row)] = row
    found = []
    for (case, nbytes), named in groups.items():
        peer = min((row for row in named.values() if not is_ours(row)), key=_time, default=None)
        ours, zero_copy = (_our_row(named.values(), shared) for shared in (False, True))
        if peer is None or ours is None and zero_copy is None:
            continue
        first = min((row for row in (ours, zero_copy, peer) if row is not None), key=_time)
        found.append({
            "case": case, "bytes": nbytes, "ours": ours, "zero_copy": zero_copy, "peer": peer, "first": label(first),
            "ratio": ours and _time(peer) / _time(ours),
            "zero_copy_ratio": zero_copy and _time(peer) / _time(zero_copy),
        })  # fmt: skip
    return found


def _time(row: dict) -> float:
    return row["time_us"]


def _our_row(rows, zero_copy: bool) -> dict | None:
    found = [row for row in rows if is_ours(row) and bool(row.get("zero_copy")) == zero_copy]
    return min([row for row in found if row["algorithm"] == "auto"] or found, key=_time, default=None)


def print_ranking(rows: list[dict], show: Callable[[str], None] = print) -> None:
    """Print who is first, beside all peers; and beside those that are called from Python, as ours
    are, where some peers are not. Nothing without peers.
    """
    ours = [row for row in rows if is_ours(row)]
    peers = [row for row in rows if not is_ours(row)]
    called = [row for row in peers if row.get("caller") == "python"]
    _print_table(rank_rows(rows), "beside all peers", show)
    if called and len(called) < len(peers):
        _print_table(rank_rows(ours + called), "beside the peers that are called from Python, as ours", show)


def _print_table(entries: list[dict], beside: str, show: Callable[[str], None]) -> None:
    if not entries:
        return
    show(f"# who is first, {beside}")
    show('# times in us; "by ours", "by z.-c.": the best peer\'s time by ours, ordinary and zero-copy')
    show("#" + _line(_HEADINGS))
    case = None
    for entry in entries:
        if entry["case"] != case:
            case = entry["case"]
            show(f"# {describe(case)}")
        times = [short_time(_time(row)) if row else "-" for row in (entry["ours"], entry["zero_copy"])]
        ratios = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (entry["ratio"], entry["zero_copy_ratio"])]
        peer = entry["peer"]
        cells = [str(entry["bytes"]), *times, label(peer), short_time(_time(peer)), *ratios, entry["first"]]
        show("#" + _line(cells))
    counts = []
    for name, what in (("ratio", "ours"), ("zero_copy_ratio", "zero-copy")):
        found = [entry[name] for entry in entries if entry[name] is not None]
        counts += [f"{what} in {sum(ratio > 1 for ratio in found)} of {len(found)}"] if found else []
    show(f"# faster than the best peer: {', '.join(counts)}")
    show("#")


def _line(cells) -> str:
    return "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, _WIDTHS, strict=True))
