"""Measure how near the zero-copy all-reduce of two ranks comes to what the machine's memory moves.

    python benchmarks/memory_limit.py        # starts its two ranks itself

An in-place all-reduce of N bytes by n ranks on shared memory reads each rank's N bytes once and
writes them once: 2nN bytes in all. Beside it, in turn, on arrays of that size with all ranks busy
at once: a copy (torch's copy_, read and written bytes counted) and a pass that reads and writes in
place (mul_), as the all-reduce does. Medians of the slowest rank; the sums are checked. Rows go to
benchmarks/results/memory_limit.jsonl.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "ddp"))
from launch import make_parser, run  # noqa: E402

import collectives  # noqa: E402

SIZES = [64 << 20, 256 << 20]
TURNS = 9


def timed(comm, call):
    """Seconds from a common start to the end on the slowest rank."""
    took = torch.zeros(1, dtype=torch.float64)
    comm.barrier()
    start = time.perf_counter()
    call()
    took[0] = time.perf_counter() - start
    comm.all_reduce(took, "max")
    return took.item()


def measure(comm, nbytes):
    count = nbytes // 4
    shared, plain, target = comm.empty(count), torch.empty(count), torch.empty(count)
    ways = {
        "zero_copy": (shared, lambda: comm.all_reduce(shared)),
        "staged": (plain, lambda: comm.all_reduce(plain)),
        "copy": (None, lambda: target.copy_(plain)),
        "in_place_pass": (None, lambda: plain.mul_(1.0)),
    }
    times = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, (array, call) in ways.items():
            if array is not None:
                array.fill_(comm.rank + 1)
            seconds = timed(comm, call)
            if array is not None and not array.eq(sum(range(1, comm.size + 1))).all():
                raise SystemExit(f"{name} of {nbytes} bytes gave a wrong sum")
            if turn:
                times[name].append(seconds)
    moved = 2 * comm.size * nbytes  # by each of the four, read and written
    rates = {name: moved / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    limit = max(rates["copy"], rates["in_place_pass"])
    return {
        "benchmark": "memory_limit",
        "ranks": comm.size,
        "bytes": nbytes,
        "bytes_moved": moved,
        **{f"{name}_gbs": round(rate, 2) for name, rate in rates.items()},
        "fraction_zero_copy": round(rates["zero_copy"] / limit, 3),
        "fraction_staged": round(rates["staged"] / limit, 3),
    }


def work(rank, arguments):
    """Yield a row for each size."""
    with collectives.init() as comm:
        for nbytes in arguments.sizes:
            yield measure(comm, nbytes)


def main():
    parser = make_parser(__doc__, "memory_limit.jsonl")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    run(work, parser.parse_args(), lambda row: print(json.dumps(row), flush=True))


if __name__ == "__main__":
    main()
