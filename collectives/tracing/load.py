"""Records of ranks, read back from trace files."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import InvalidArgument
from ..json_records import parse_json, parse_numbers, parse_text
from .summary import align_clocks

__all__ = ["load_traces"]

_MOST = 1 << 62  # ns, bytes, or a step


def load_traces(paths) -> tuple[list[dict], list[str]]:
    """Return the records of all ranks in some trace files, by rank, and remarks on what is missing.

    A file that ends in the middle gives what it has. Raises `InvalidArgument` for a file that is no
    trace of `collectives.timeline`, and for a rank that is in two files; the ``OSError`` of one
    that can't be read.
    """
    records, remarks, origin = [], [], {}
    for path in map(Path, paths):
        trace, complete = _read(path)
        if not complete:
            remarks.append(f"{path.name} ends in the middle: what comes after its last whole line is missing.")
        try:
            found = _records_of(trace, path)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:  # of another tool
            if isinstance(error, InvalidArgument):
                raise
            raise _no_trace(path) from error
        for record in found:
            rank = record["rank"]
            if rank in origin:
                raise InvalidArgument(f"{origin[rank]} and {path} both have rank {rank}: give each rank once")
            origin[rank] = path
            records.append(record)
    sizes = {record["size"] for record in records}
    if len(sizes) > 1:
        raise InvalidArgument(f"the files are of jobs of {sorted(sizes)} ranks: give those of one run")
    return sorted(records, key=lambda record: record["rank"]), remarks


def _read(path: Path) -> tuple[dict, bool]:
    """Return a file's trace, and whether it is all there: it has one event a line."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        trace, complete = parse_json(text), True
    except ValueError:
        head, *lines = text.split("\n")
        trace, complete = _parsed(head + "]}") or {}, False
        if isinstance(trace, dict):
            trace["traceEvents"] = [event for line in lines if (event := _parsed(line.rstrip(","))) is not None]
    if (
        not isinstance(trace, dict)
        or not isinstance(trace.get("traceEvents"), list)
        or not isinstance(trace.get("otherData"), dict)
    ):
        raise _no_trace(path)
    return trace, complete


def _no_trace(path: Path) -> InvalidArgument:
    return InvalidArgument(f"{path} is no trace of collectives.timeline: it must be the JSON file that it wrote")


def _parsed(text: str):
    try:
        return parse_json(text)
    except ValueError:
        return None


def _records_of(trace: dict, path: Path) -> list[dict]:
    other = trace["otherData"]
    if "ranks" not in other:
        raise InvalidArgument(f"{path} was written by a version of collectives whose traces make no page: record again")
    records = [{**_checked(record), "events": []} for record in other["ranks"]]
    by_rank = {record["rank"]: (record, other["zero"] - shift) for record, shift in align_clocks(records)}
    rows: dict[tuple, str] = {}
    for event in trace["traceEvents"]:
        place = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            rows[place] = re.sub(r" \(\d+\)$", "", event["args"]["name"])  # "lane 2 (2)": a row's second track
        elif event["ph"] == "X" and rows[place] != "steps":  # steps are the marks
            record, zero = by_rank[event["pid"]]
            start, length = _as_ns(event["ts"]) + zero, _as_ns(event["dur"])
            args = event["args"]
            for name in ("bytes", "step"):
                if type(args.get(name, 0)) is not int or abs(args.get(name, 0)) >= _MOST:
                    raise ValueError(f"{name}: no number")
            record["events"].append((rows[place], parse_text(event["name"]), start, start + length, args))
    return records


def _checked(record: dict) -> dict:
    """Return a rank's record. Raises what a value of another type leads to."""
    for name in ("host", "node"):
        parse_text(record[name])
    parse_numbers([record["rank"], record["size"]])
    if not isinstance(record["about"], dict) or not isinstance(record["marks"], list):
        raise ValueError("not what it is about, or no marks")
    times = [record["offset"], record["began"], record["ended"], record["dropped"], *record["marks"]]
    if not all(type(each) is int and abs(each) < _MOST for each in times):
        raise ValueError("times are no numbers")
    return record


def _as_ns(us: float) -> int:
    ns = round(us * 1000)
    if abs(ns) >= _MOST:
        raise ValueError("no time")
    return ns
