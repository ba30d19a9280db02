"""Time our all-reduce against Gloo's, in turn in one run, on the same float32 arrays in host memory.

    python benchmarks/allreduce_vs_gloo.py            # 2 ranks: starts them itself
    torchrun --nproc-per-node 4 benchmarks/allreduce_vs_gloo.py

The last result of every turn is checked against the exact sum. One row a size goes to
benchmarks/results/allreduce_vs_gloo.jsonl.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from provenance import commit, machine

import collectives

HERE = Path(__file__).resolve().parent
SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20]  # bytes
ROUNDS = 5  # ours and Gloo's turns
TURN_SECONDS = 0.15  # one turn, about


def contribution(rank, count):
    """Return this rank's array: small whole numbers, so that every sum is exact in float32."""
    return (torch.arange(count, dtype=torch.int64) * (rank + 1) % 251).to(torch.float32)


def turn(call, buffer, source, expected, calls):
    """Make ``calls`` all-reduces; return the time in us of each. The last result is checked."""
    times = []
    dist.barrier()
    for _ in range(calls):
        buffer.copy_(source)
        start = time.perf_counter()
        call(buffer)
        times.append((time.perf_counter() - start) * 1e6)
    if not torch.equal(buffer, expected):
        raise SystemExit("wrong sum")
    return times


def measure(nbytes, comm):
    """Return the times in us of every call, ours and Gloo's."""
    count = nbytes // 4
    source = contribution(comm.rank, count)
    expected = sum(contribution(rank, count) for rank in range(comm.size))
    buffer = torch.empty(count)
    peers = {"collectives": comm.all_reduce, "gloo": dist.all_reduce}
    calls = {}
    for name, call in peers.items():  # warm up; see how many calls make a turn: one number for all ranks
        turn(call, buffer, source, expected, 3)
        seconds = torch.tensor([statistics.median(turn(call, buffer, source, expected, 5)) / 1e6])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        calls[name] = max(5, min(2000, int(TURN_SECONDS / (seconds.item() + nbytes / 8e9))))
    times = {name: [] for name in peers}
    for _ in range(ROUNDS):
        for name, call in peers.items():
            times[name] += turn(call, buffer, source, expected, calls[name])
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, alone (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "allreduce_vs_gloo.jsonl")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks), *sys.argv]
        return subprocess.run([sys.executable, *words], env={"OMP_NUM_THREADS": "1", **os.environ}).returncode

    dist.init_process_group("gloo")
    rows = []
    with collectives.init(engine="host") as comm:
        for nbytes in SIZES:
            median = {name: round(statistics.median(times), 2) for name, times in measure(nbytes, comm).items()}
            rows.append(
                {
                    "benchmark": "allreduce_vs_gloo",
                    "ranks": comm.size,
                    "nbytes": nbytes,
                    "dtype": "float32",
                    **{f"{name}_us": value for name, value in median.items()},
                    "ratio": round(median["gloo"] / median["collectives"], 2),
                    "machine": machine(),
                    "cores": len(os.sched_getaffinity(0)),
                    "commit": commit(),
                    "torch": torch.__version__,
                    "collectives": collectives.__version__,
                    "python": platform.python_version(),
                    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                }
            )
            if comm.rank == 0:
                print(" ".join(f"{key}={rows[-1][key]}" for key in list(rows[-1])[1:7] if key != "dtype"), flush=True)
        if comm.rank == 0:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            print(f"rows: {arguments.output}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
