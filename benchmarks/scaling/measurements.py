"""Measured rows of ``collectives.bench`` or growth.py, and the cost model's fits to them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from collectives.errors import InvalidArgument

from .model import ALGORITHMS, OPS, Fit, Point, fit

__all__ = ["cores_of", "fits_of", "points_of", "read_rows"]


def points_of(rows: Iterable[dict]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of the bench's rows by engine and algorithm.

    Rows that the model doesn't have are left out. Raises `InvalidArgument` for a row without the
    bench's fields, or one whose results were wrong.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        try:
            op, engine, ranks, nbytes = row["op"], row["engine"], int(row["ranks"]), int(row["bytes"])
            algorithm, seconds, wrong = row.get("algorithm") or "native", float(row["time_us"]) * 1e-6, row["wrong"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"not a row of the bench ({error!r} is missing or no number): {row!r}") from error
        if wrong:
            raise InvalidArgument(f"this row's results were wrong, so its time means nothing: {row!r}")
        if op in OPS and algorithm in ALGORITHMS and ranks > 1 and nbytes > 0 and seconds > 0:
            name = f"{engine} zero-copy" if row.get("zero_copy") else engine
            found.setdefault((name, algorithm), []).append(Point(op, algorithm, ranks, nbytes, seconds))
    return found


def read_rows(path: Path) -> tuple[list[dict], dict]:
    """Read the bench's JSON (``{"machine": ..., "rows": [...]}``) or JSON lines.

    Return its rows and the object that contains them.
    """
    text = path.read_text()
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()], {}
    if isinstance(whole, list):
        return whole, {}
    return (whole["rows"], whole) if "rows" in whole else ([whole], {})


def cores_of(rows: Iterable[dict], container: dict) -> int:
    """Return how many cores the rows were measured on: their own field, the file's, or this
    process's.
    """
    machine = container.get("machine")
    places = [*rows, container, machine if isinstance(machine, dict) else {}]
    known = {int(place["cores"]) for place in places if place.get("cores")}
    if len(known) > 1:
        raise InvalidArgument(f"the rows come from machines with {sorted(known)} cores: fit each machine's alone")
    return known.pop() if known else len(os.sched_getaffinity(0))


def fits_of(rows: Iterable[dict], cores: int, cache: int = 0) -> dict[tuple[str, str, str], Fit]:
    """Fit each engine and algorithm to its rows: all of them, those in the cache of `cache` bytes,
    those past it.

    A call counts as in the cache where the arrays of all ranks fill at most half of it: staged ones
    are there twice.
    """
    found = {}
    for (engine, algorithm), points in points_of(rows).items():
        parts = {"all sizes": points}
        if cache:
            parts["in cache"] = [p for p in points if 2 * p.ranks * p.nbytes <= cache]
            parts["past cache"] = [p for p in points if 2 * p.ranks * p.nbytes > cache]
        for part, chosen in parts.items():
            if chosen:
                found[engine, algorithm, part] = fit(chosen, cores=cores, name=f"{engine} {algorithm}, {part}")
    return found
