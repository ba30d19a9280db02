"""What the flight recorder adds to a call: the same communicator with its ring and without it, in turn.

Blocking `all_reduce` of 1 KiB on one rank, where nothing is waited for, and on two; the median of the
differences, ns. In plain memory and in a file. Rows go to
benchmarks/results/flight_cost.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time

import torch
from rows import RESULTS, append_rows, provenance

import collectives

CALLS, ROUNDS = 1000, 300


def time_calls(comm, tensor) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        comm.all_reduce(tensor)
    return (time.perf_counter() - start) / CALLS


def measure(folder: str) -> dict:
    """Return the median call in ns without and with the recorder, and the median difference."""
    os.environ.pop("COLLECTIVES_FLIGHT_DIR", None)
    if folder:
        os.environ["COLLECTIVES_FLIGHT_DIR"] = folder
    comm = collectives.init(engine="host", device="cpu")
    ring, tensor = comm._flight.ring, torch.ones(256)
    without, recorded = [], []
    for _ in range(ROUNDS):
        comm._native.attach_flight_ring(None)
        without.append(time_calls(comm, tensor))
        comm._native.attach_flight_ring(ring)
        recorded.append(time_calls(comm, tensor))
    rank, size = comm.rank, comm.size
    comm.close()
    differences = [after - before for before, after in zip(without, recorded, strict=True)]
    return {
        "ranks": size, "rank": rank, "file": bool(folder), "calls": CALLS * ROUNDS,
        "without_ns": round(1e9 * statistics.median(without), 1),
        "with_ns": round(1e9 * statistics.median(recorded), 1),
        "added_ns": round(1e9 * statistics.median(differences), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        row = measure(options.worker)
        if row["rank"] == 0:
            append_rows([{**provenance(), **row}], RESULTS / "flight_cost.jsonl")
            print(row)
        return
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            for place in ("", folder):
                command = [sys.executable, "-m", "collectives.run", "-n", str(ranks), __file__, "--worker", place]
                os.spawnv(os.P_WAIT, sys.executable, command)


if __name__ == "__main__":
    main()
