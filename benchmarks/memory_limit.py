"""Measure how near the zero-copy all-reduce of two ranks comes to what the machine's memory moves.

    python benchmarks/memory_limit.py        # starts its two ranks itself

An in-place all-reduce of N bytes by n ranks on shared memory reads each rank's N bytes once and
writes them once: 2nN bytes in all. Beside it, in turn, on arrays of that size with all ranks busy
at once: a copy (torch's copy_, read and written bytes counted) and a pass that reads and writes in
place (mul_), as the all-reduce does. Medians of the slowest rank; the sums are checked. Rows go to
benchmarks/results/memory_limit.jsonl.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path

import torch
from provenance import where_and_when

import collectives

SIZES = [64 << 20, 256 << 20]
TURNS = 9
RUN_SECONDS = 300


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
        **where_and_when(),
    }


def rank_process(rank, ranks, port, sizes, rows):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with collectives.init() as comm:
        for nbytes in sizes:
            row = measure(comm, nbytes)
            if rank == 0:
                rows.put(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--results", default=str(Path(__file__).parent / "results" / "memory_limit.jsonl"))
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (given.ranks, port, given.sizes, rows)
    ranks = [context.Process(target=rank_process, args=(r, *arguments), daemon=True) for r in range(given.ranks)]
    for process in ranks:
        process.start()
    until = time.monotonic() + RUN_SECONDS
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    if any(process.exitcode != 0 for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
    for _ in given.sizes:
        line = json.dumps(rows.get(timeout=10))
        print(line)
        if given.results:
            with open(given.results, "a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
