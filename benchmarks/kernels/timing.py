"""Timing in turn, the fields of every row, and the file of rows, for the benchmarks of kernels."""

import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from rows import RESULTS, append_rows, provenance  # noqa: E402

from collectives import kernels  # noqa: E402


def gpu_seconds(call, part):
    """Return seconds of one call on a GPU, by events round as many calls as fill ``part`` seconds."""
    calls = 0
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    while calls < 5 or time.perf_counter() - start < part:
        call()
        calls += 1
        if calls % 20 == 0:
            torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls


def one_call(call, device):
    """Return seconds of one call: on the host by the clock, on a GPU of many in a tenth of a
    second.
    """
    if device.type == "cuda":
        return gpu_seconds(call, 0.1)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls, device, rounds, seconds=one_call):
    """Time each call once a round, after a round that isn't counted; return the lists of seconds by
    name.
    """
    for call in calls.values():
        call()
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return times


def ratio(seconds, ours, digits=3):
    """Return the median of the rounds' ratios."""
    return round(statistics.median(s / o for s, o in zip(seconds, ours, strict=True)), digits)


def compared(times, nbytes):
    """Return a row's fields: our time and rate, each peer's time, and the median of each round's
    ratio to ours.
    """
    ours = times.pop("ours")
    row = {"nbytes_moved": nbytes, "ours_ms": round(statistics.median(ours) * 1e3, 4)}
    row["ours_gb_per_s"] = round(nbytes / statistics.median(ours) / 1e9, 2)
    for peer, seconds in times.items():
        row[f"{peer}_ms"] = round(statistics.median(seconds) * 1e3, 4)
        row[f"{peer}_ratio"] = ratio(seconds, ours)
    return row


def add_options(parser, output, rounds):
    """Add the options that all these benchmarks have."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--isa", default=None, help="baseline, avx2 or avx512 (default: the widest)")
    parser.add_argument("--output", type=Path, default=RESULTS / output)
    parser.add_argument("--no-output", action="store_true", help="print the rows only")


def prepare(arguments):
    """Keep torch and the kernels to one thread; return the device and the fields that stand in
    every row.
    """
    device = torch.device(arguments.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    return device, {
        "rounds": arguments.rounds,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "isa": kernels.use_isa(arguments.isa),
        "threads": 1,
        **provenance(),
    }


def print_row(row):
    """Print a row, and return it."""
    print(" ".join(f"{key}={value}" for key, value in row.items() if key != "benchmark"), flush=True)
    return row


def rows_of_lists(benchmark, cases, device, arguments):
    """Return the row of each case and list of tensors; a case is a function of a list's name."""
    rows = []
    for case in arguments.cases:
        for name in arguments.lists:
            calls, nbytes = cases[case](name, device)
            row = compared(in_turn(calls, device, arguments.rounds), nbytes)
            rows.append(print_row({"benchmark": benchmark, "case": case, "list": name, **row}))
            del calls
    return rows


def write_rows(rows, arguments):
    """Append the rows to the file of results."""
    if not arguments.no_output:
        append_rows(rows, arguments.output)
