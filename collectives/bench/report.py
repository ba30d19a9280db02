"""Report of the bench: nccl-tests' columns, ratios to the peers, and the file of rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .. import __version__
from .cases import Case
from .options import Options, UsageError
from .provenance import where_and_when

__all__ = ["Report", "check_writable", "describe_case", "print_ratios"]


class Report:
    """Output of rank 0 during the measurement. ``rows``: all rows so far."""

    def __init__(self, options: Options, ranks: int, engine: str, stream=None):
        self.options, self.stream = options, stream or sys.stdout
        self.rows: list[dict] = []
        self._notes: set[str] = set()
        self._heading = None
        self._names_width = 0
        where = where_and_when()
        many = f"{ranks} rank{'s' * (ranks > 1)}"
        self._print(f"# collectives {__version__}, engine {engine}, {many}, {where['machine']}, {where['cores']} cores")

    def note(self, text: str) -> None:
        """Print a remark once."""
        if text not in self._notes:
            self._notes.add(text)
            self._print(f"# {text}")

    def begin(self, names: list[str], bound: bool) -> None:
        """Print how the implementations of these names are measured."""
        options = self.options
        calls = f"{options.calls} calls" if options.calls else "16 calls (up to 16K), 4 (up to 256K) or 1"
        self._print(
            f"# {options.turns} turn{'s' * (options.turns > 1)} of {options.warmup} calls to warm up and "
            f"{options.iters} timed iterations of {calls}; time: median of the slowest rank's; "
            f"ranks {'bound to cores, but for Gloo' if bound else 'not bound to cores'}"
        )
        if options.fresh:
            self._print("# fresh: the rank writes the next array's input before each call, not timed, and a barrier")
            self._print("# follows; each call is timed alone")
        self._names_width = max(map(len, names)) + 2 if len(names) > 1 else 0

    def add(self, case: Case, rows: dict[str, dict[bool, dict]]) -> None:
        """Add the rows of a case, by implementation and ``in_place``, print a line for each
        implementation, and append the rows to the file.
        """
        if self._heading != case.op.name:
            self._heading = case.op.name
            self._print_heading(case.op.name)
        for name, places in rows.items():
            line = f"{name:<{self._names_width}}" if self._names_width else ""
            line += f"{case.nbytes:>14}{case.count:>14}{case.kind.short:>10}{case.redop or 'none':>8}{case.root:>8}"
            self._print(line + _format_place(places.get(False)) + _format_place(places.get(True)))
        added = [places[in_place] for places in rows.values() for in_place in (False, True) if in_place in places]
        self.rows += added
        if self.options.json:
            with self.options.json.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in added)

    def end(self) -> bool:
        """Print the totals and the ratios; return whether all results were right."""
        wrong = [row for row in self.rows if row["wrong"]]
        total = sum(row["wrong"] for row in wrong)
        self._print(f"# Out of bounds values : {total} {'FAILED' if total else 'OK'}")
        for name in dict.fromkeys(row["name"] for row in wrong):
            self._print(f"# wrong: {name}")
        ours = [row["busbw_gbs"] for row in self.rows if row["ours"]]
        if ours:
            self._print(f"# Avg bus bandwidth    : {sum(ours) / len(ours):.4f}")
        self._print("#")
        print_ratios(self.rows, self._print)
        return not total

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _print_heading(self, name: str) -> None:
        pad = " " * self._names_width
        columns = "".join(f"{title:>8}" for title in ("time", "algbw", "busbw", "#wrong"))
        units = "".join(f"{unit:>8}" for unit in ("(us)", "(GB/s)", "(GB/s)", ""))
        left = f"{'size':>13}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}"
        under = f"{'(B)':>13}{'(elements)':>14}{'':>26}"
        self._print(f"#\n# {name}\n#{pad}{'':>53}{'out-of-place':^33}{'in-place':^33}")
        self._print(f"#{pad}{left}{columns}{columns}\n#{pad}{under}{units}{units}")


def _format_place(row: dict | None) -> str:
    """Return the columns of the form in place, or out of place."""
    if row is None:
        return f"{'-':>8}" * 4
    wrong = "N/A" if row["wrong"] is None else str(row["wrong"])
    words = (_format_time(row["time_us"]), f"{row['algbw_gbs']:.2f}", f"{row['busbw_gbs']:.2f}", wrong)
    return "".join(f" {word:>7}" for word in words)  # a space even where a number is too wide for its column


def _format_time(time: float) -> str:
    return f"{time:.2f}" if time < 1000 else f"{time:.1f}" if time < 100_000 else f"{time:.0f}"


def describe_case(row: dict) -> str:
    """Return in words what the rows of one table of sizes share."""
    about = [row["dtype"], row["redop"] or "", f"root {row['root']}" if row["root"] >= 0 else ""]
    about += [f"{row['ranks']} ranks", "fresh data" if row["fresh"] else ""]
    return f"{row['op']} ({', '.join(filter(None, about))})"


def print_ratios(rows: list[dict], show=print) -> None:
    """Print for each case and size our time, and all others' as multiples of it.

    The times are those in place where an implementation has that form. Nothing without a peer.
    """
    cases: dict[str, dict[int, dict[str, dict]]] = {}
    for row in rows:
        size = cases.setdefault(describe_case(row), {}).setdefault(row["bytes"], {})
        if row["in_place"] or row["name"] not in size:
            size[row["name"]] = row
    for case, sizes in cases.items():
        names = {name: row["ours"] for size in sizes.values() for name, row in size.items()}
        base = next((name for name, ours in names.items() if ours), None)
        if base is None or all(names.values()):
            continue
        widths = {name: max(12, len(name) + 2) for name in names if name != base}
        heading = f"{base} (us)"
        show(f"# {case}: time of {base}, and the others' times as multiples of it")
        show(f"#{'size':>13}  {heading:>12}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
        for nbytes, size in sizes.items():
            if base in size:
                time = size[base]["time_us"]
                ratios = {name: f"{size[name]['time_us'] / time:.2f}x" if name in size else "-" for name in widths}
                cells = "".join(f"{ratio:>{widths[name]}}" for name, ratio in ratios.items())
                show(f"#{nbytes:>13}  {_format_time(time):>{max(12, len(heading))}}{cells}")
        show("#")


def check_writable(path: Path, option: str) -> None:
    """Raise `UsageError` before the measurement where a file can't be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        there = path.exists()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} can't be written: {error.strerror or error}") from None
