"""Report of the bench: nccl-tests' columns, ratios to the peers, JSON and CSV files."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from pathlib import Path

from .. import __version__
from .cases import TYPES
from .options import Options, UsageError
from .provenance import where_and_when
from .rotation import last_level_cache

__all__ = [
    "Report", "case_key", "check_writable", "describe", "is_ours", "label", "print_ratios", "read_rows", "short_time",
    "write_csv", "write_json",
]  # fmt: skip

_OURS = ("host", "nccl")
_BANDWIDTH_FIELDS = ("algbw_gbs", "busbw_gbs")


class Report:
    """Output of rank 0 during the measurement. ``rows``: all rows so far."""

    def __init__(self, options: Options, ranks: int, engine: str, stream=None):
        self.options, self.stream = options, stream or sys.stdout
        self.rows: list[dict] = []
        self.progress = None
        self._notes: set[str] = set()
        self._heading = None
        self._names_width = 0
        where = where_and_when()
        many = f"{ranks} rank{'s' * (ranks > 1)}"
        self.print(f"# collectives {__version__}, engine {engine}, {many}, {where['machine']}, {where['cores']} cores")

    def print(self, text: str = "") -> None:
        if self.progress is not None:
            self.progress.clear()
        print(text, file=self.stream, flush=True)
        if self.progress is not None:
            self.progress.refresh()

    def note(self, text: str) -> None:
        """Print a remark once."""
        if text not in self._notes:
            self._notes.add(text)
            self.print(f"# {text}")

    def begin(self, implementations, cases, bound: bool) -> None:
        options = self.options
        calls = f"{options.calls} calls" if options.calls else "16 calls (up to 16K), 4 (up to 256K) or 1"
        self.print(
            f"# {options.turns} turn{'s' * (options.turns > 1)} of {options.warmup} calls to warm up and "
            f"{options.iters} timed iterations of {calls}; time: median of the slowest rank's; "
            f"ranks {'bound to cores, but for Gloo' if bound else 'not bound to cores'}"
        )
        if options.fresh is not None:
            cache, most = (f"{nbytes / (1 << 20):.3g} MiB" if nbytes else "unknown: 64 MiB"
                           for nbytes in (last_level_cache(), options.fresh))  # fmt: skip
            self.print("# fresh: before each call, not timed, the rank writes the input of the next of several arrays,")
            self.print("# and a barrier follows; each call is timed alone; as many arrays as calls in a turn, fewer")
            self.print(f"# where these pass the last-level cache ({cache}) or the limit ({most})")
        self._names_width = max(len(c.name) for c in implementations) + 2 if len(implementations) > 1 else 0
        self.progress = _bar(sum(self._turns(implementations, case) for case in cases) * options.turns)

    def _turns(self, implementations, case) -> int:
        return sum(c.unsupported_reason(case, in_place) is None for c in implementations for in_place in (False, True))

    def add(self, case, rows: dict[str, dict[bool, dict]]) -> None:
        """Add the rows of a case, by implementation and ``in_place``, and print a line for each
        implementation.
        """
        if self._heading != case.op.name:
            self._heading = case.op.name
            self._print_heading(case.op.name)
        kind = TYPES[case.kind.name].short
        for name, places in rows.items():
            line = f"{name:<{self._names_width}}" if self._names_width else ""
            line += f"{case.nbytes:>14}{case.count:>14}{kind:>10}{case.redop or 'none':>8}{case.root:>8}"
            for in_place in (False, True):
                line += self._place(places.get(in_place))
            self.print(line)
            self.rows += [places[in_place] for in_place in (False, True) if in_place in places]
        path = self.options.json
        if path and rows and path.suffix != ".jsonl" and (path.is_file() or not path.exists()):
            write_json(path, self.rows)  # a long run that is interrupted keeps its rows

    def _print_heading(self, name: str) -> None:
        pad = " " * self._names_width
        wide = 16 if self.options.percentiles else 0
        self.print(f"#\n# {name}")
        columns = "".join(f"{t:>8}" for t in ["time", *(["p95", "p99"] if wide else []), "algbw", "busbw", "#wrong"])
        units = "".join(f"{t:>8}" for t in ["(us)", *(["(us)", "(us)"] if wide else []), "(GB/s)", "(GB/s)", ""])
        left = f"{'size':>13}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}"
        under = f"{'(B)':>13}{'(elements)':>14}{'':>26}"
        self.print(f"#{pad}{'':>53}{'out-of-place':^{33 + wide}}{'in-place':^{33 + wide}}")
        self.print(f"#{pad}{left}{columns}{columns}\n#{pad}{under}{units}{units}")

    def _place(self, row: dict | None) -> str:
        names = ["time_us", *(["p95_us", "p99_us"] if self.options.percentiles else [])]
        if row is None:
            return f"{'-':>8}" * (len(names) + 3)
        words = [short_time(row[name]) for name in names]
        words += [f"{row[name]:.2f}" for name in _BANDWIDTH_FIELDS]
        words.append("N/A" if row["wrong"] is None else str(row["wrong"]))
        return "".join(f" {word:>7}" for word in words)  # a space even where a number is too wide for its column

    def end(self) -> bool:
        """Print the totals; return whether all results were right."""
        if self.progress is not None:
            self.progress.close()
            self.progress = None
        wrong = [row for row in self.rows if row["wrong"]]
        total = sum(row["wrong"] for row in wrong)
        self.print(f"# Out of bounds values : {total} {'FAILED' if total else 'OK'}")
        for name in dict.fromkeys(label(row) for row in wrong):
            self.print(f"# wrong: {name}")
        ours = [row["busbw_gbs"] for row in self.rows if is_ours(row)]
        if ours:
            self.print(f"# Avg bus bandwidth    : {sum(ours) / len(ours):.4f}")
        self.print("#")
        return not total


def _bar(total: int):
    """A progress bar on a terminal; None in a pipe, and where tqdm is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, unit="turn", leave=False, dynamic_ncols=True, file=sys.stderr)


def short_time(time: float) -> str:
    return f"{time:.2f}" if time < 1000 else f"{time:.1f}" if time < 100_000 else f"{time:.0f}"


def label(row: dict) -> str:
    """Return the name of a row's implementation, as in the table's first column."""
    if row["engine"] == "nccl" and not is_ours(row):
        return "torch nccl"
    words = [row["engine"]]
    if row.get("algorithm") not in (None, "auto"):
        words.append(row["algorithm"])
    if row.get("wire"):
        words.append(TYPES[row["wire"]].short)
    if row.get("zero_copy"):
        words.append("zero-copy")
    return " ".join(words)


def is_ours(row: dict) -> bool:
    """Return whether a row is this project's.

    torch's own NCCL has the engine's name, too, but no algorithm.
    """
    return row["engine"].split()[0] in _OURS and row.get("algorithm") is not None


def case_key(row: dict) -> tuple:
    """Return what the rows of one table of sizes share."""
    return row["op"], row["dtype"], row["redop"], row["root"], row["ranks"], bool(row.get("fresh"))


def describe(key: tuple) -> str:
    """Return a `case_key` in words."""
    op, dtype, redop, root, ranks, fresh = key
    about = [dtype, *([redop] if redop else []), *([f"root {root}"] if root >= 0 else []), f"{ranks} ranks"]
    return f"{op} ({', '.join([*about, *(['fresh data'] if fresh else [])])})"


def print_ratios(rows: list[dict], show=print) -> None:
    """Print for each size our time, and each peer's as a multiple of it.

    The times are those in place where the operation has an in-place form.
    """
    groups: dict[tuple, dict[int, dict[str, dict]]] = {}
    for row in sorted(rows, key=lambda row: row["in_place"]):
        groups.setdefault(case_key(row), {}).setdefault(row["bytes"], {})[label(row)] = row
    for key, sizes in groups.items():
        names = dict.fromkeys(name for size in sizes.values() for name in size)
        ours = [name for name in names if any(is_ours(size[name]) for size in sizes.values() if name in size)]
        peers = [name for name in names if name not in ours]
        if not peers:
            continue
        for own in ours:
            show(f"# {describe(key)}: times of the peers as multiples of that of {own}")
            widths = {name: max(12, len(name) + 2) for name in peers}
            columns = "".join(f"{name:>{width}}" for name, width in widths.items())
            show("#" + f"{'size':>13}{own + ' (us)':>{len(own) + 8}}{columns}")
            for nbytes, size in sizes.items():
                if own in size:
                    time = size[own]["time_us"]
                    line = f"#{nbytes:>13}{short_time(time):>{len(own) + 8}}"
                    for name in peers:
                        ratio = f"{size[name]['time_us'] / time:.2f}x" if name in size else "-"
                        line += f"{ratio:>{widths[name]}}"
                    show(line)
            show("#")


# ---- Files.


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


def write_json(path: Path, rows: list[dict]) -> None:
    """Write the rows: a JSON object with a list of them, or appended as lines where the name ends
    in .jsonl.
    """
    if path.suffix == ".jsonl":
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    where = {name: rows[0].get(name) for name in ("machine", "cores", "commit", "python", "time")} if rows else {}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = json.dumps({"benchmark": "collectives.bench", "version": __version__, **where})[:-1]
    text = f'{text},\n "rows": [\n  {lines}\n ]}}\n'
    if path.exists() and not path.is_file():  # /dev/null, /dev/stdout, a pipe: never replaced
        path.write_text(text)
        return
    path = path.resolve()  # a symbolic link is kept
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def read_rows(path: Path, option: str) -> list[dict]:
    """Read the rows of a file that `write_json` wrote. Raises `UsageError`."""
    try:
        text = path.read_text()
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = json.loads(text)["rows"]
        wanted = ("op", "engine", "dtype", "ranks", "bytes", "in_place", "time_us")
        for row in rows:
            missing = [name for name in wanted if name not in row]
            if missing:
                raise UsageError(f"{option} {path}: a row has no {', '.join(missing)}")
            for name in ("ranks", "bytes", "time_us"):
                number = row[name]
                known = isinstance(number, int | float) and math.isfinite(number)
                if not known or name == "time_us" and number <= 0:
                    raise UsageError(f"{option} {path}: a row's {name} is {number!r}")
            row.update({name: row.get(name) for name in ("algorithm", "redop", "wire")})
            row.setdefault("root", -1)
            row.setdefault("zero_copy", False)
            row.setdefault("fresh", False)
    except OSError as error:
        raise UsageError(f"{option} {path} can't be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{option} {path} is no file of this program's --json: {error!r}") from None
    if not rows:
        raise UsageError(f"{option} {path} has no rows")
    return rows


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write the rows as CSV; versions in one column, as JSON."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))  # rows of several runs
        writer.writeheader()
        for row in rows:
            writer.writerow({name: json.dumps(v) if isinstance(v, dict) else v for name, v in row.items()})
