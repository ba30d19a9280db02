"""Records of ranks, read back from trace files."""

from __future__ import annotations

from pathlib import Path

from ..errors import InvalidArgument
from ..json_records import parse_json, parse_numbers, parse_text
from .summary import align_clocks

__all__ = ["load_traces"]

_MOST = 1 << 62  # ns, bytes, or a step


def load_traces(paths) -> list[dict]:
    """Return the records of all ranks in some trace files, by rank.

    Raises `InvalidArgument` for a file that is no trace of `collectives.timeline`, for files of
    different jobs, and for a rank that is in two files; the ``OSError`` of one that can't be read.
    """
    records, origin = [], {}
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            found = _read_records(parse_json(text))
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:  # of another tool
            raise InvalidArgument(
                f"{path} is no trace of collectives.timeline: it must be the whole JSON file that it wrote"
            ) from error
        for record in found:
            rank = record["rank"]
            if rank in origin:
                raise InvalidArgument(f"{origin[rank]} and {path} both have rank {rank}: give each rank once")
            origin[rank] = path
            records.append(record)
    sizes = {record["size"] for record in records}
    if len(sizes) > 1:
        raise InvalidArgument(f"the files are of jobs of {sorted(sizes)} ranks: give those of one run")
    return sorted(records, key=lambda record: record["rank"])


def _read_records(trace: dict) -> list[dict]:
    """Return the records that a trace was made of. Raises what a value of another type leads to."""
    other = trace["otherData"]
    records = [{**_check_record(record), "events": []} for record in other["ranks"]]
    by_rank = {record["rank"]: (record, other["zero"] - shift) for record, shift in align_clocks(records)}
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or event["cat"] == "steps":  # steps are the marks
            continue
        record, zero = by_rank[event["pid"]]
        start, length, args = _as_ns(event["ts"]) + zero, _as_ns(event["dur"]), event["args"]
        for name in ("bucket", "bytes", "step"):
            _check_int(args.get(name, 0))
        record["events"].append((parse_text(event["cat"]), parse_text(event["name"]), start, start + length, args))
    return records


def _check_record(record: dict) -> dict:
    for name in ("host", "node"):
        parse_text(record[name])
    parse_numbers([record["rank"], record["size"]])
    if not isinstance(record["about"], dict) or not isinstance(record["marks"], list):
        raise ValueError("not what it is about, or no marks")
    for each in (record["offset"], record["began"], record["ended"], record["dropped"], *record["marks"]):
        _check_int(each)
    return record


def _check_int(value) -> None:
    if type(value) is not int or abs(value) >= _MOST:
        raise ValueError(f"{value!r} is no number of ns, of bytes, or of a step")


def _as_ns(us: float) -> int:
    ns = round(us * 1000)
    _check_int(ns)
    return ns
