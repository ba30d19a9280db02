"""Time operations of `collectives.horovod` and torch.distributed's over Gloo, in turn.

    python benchmarks/horovod/ops.py                 # 2 ranks; starts the ranks itself

One tensor of each size: `allreduce` (a new tensor), `allreduce_` (in place), and all_reduce of Gloo
(in place). Many small tensors: one after another by `allreduce`, all submitted by `allreduce_async`
and then synchronized (in place: `allreduce_async_` with names), and one after another by Gloo. A
time is from the first call to the last result, the mean of a block of 5 behind one that isn't
timed; the median of all rounds, of the slower rank; `best`: the smallest. Every result is checked
before. `times`: the peer's median by ours; peers: Gloo, and for many tensors the synchronous calls
too (`of_sync`: our time by theirs). One row a way goes to benchmarks/results/horovod_ops.jsonl.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ddp"))
from launch import make_parser, run, slowest  # noqa: E402

import collectives.horovod as hvd  # noqa: E402

CALLS = 5  # in a block
SIZES = [1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20]


def _one(nbytes):
    """Return the ways to reduce one tensor, and a function that returns their expected results."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start = torch.arange(nbytes // 4, dtype=torch.float32) % 1000
    mine = start + rank
    work = mine.clone()

    def in_place(reduce):
        work.copy_(mine)
        begun = time.perf_counter()
        reduce(work)
        return time.perf_counter() - begun, [work]

    def apart():
        begun = time.perf_counter()
        out = hvd.allreduce(mine, op=hvd.Sum)
        return time.perf_counter() - begun, [out]

    ways = {
        "allreduce": apart,
        "allreduce_": lambda: in_place(lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum)),
        "gloo": lambda: in_place(dist.all_reduce),
    }
    return ways, lambda: [start * ranks + ranks * (ranks - 1) / 2]


def _many(count, nbytes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    starts = [torch.full((nbytes // 4,), float(i)) for i in range(count)]
    mine = [start + rank for start in starts]
    work = [tensor.clone() for tensor in mine]
    names = [f"tensor {i}" for i in range(count)]

    def fresh():
        for tensor, value in zip(work, mine, strict=True):
            tensor.copy_(value)

    def synchronous():
        begun = time.perf_counter()
        out = [hvd.allreduce(tensor, op=hvd.Sum) for tensor in mine]
        return time.perf_counter() - begun, out

    def asynchronous():
        begun = time.perf_counter()
        handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in mine]
        out = [hvd.synchronize(handle) for handle in handles]
        return time.perf_counter() - begun, out

    def named_in_place():
        fresh()
        begun = time.perf_counter()
        handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=name) for t, name in zip(work, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)
        return time.perf_counter() - begun, work

    def gloo():
        fresh()
        begun = time.perf_counter()
        for tensor in work:
            dist.all_reduce(tensor)
        return time.perf_counter() - begun, work

    ways = {"sync": synchronous, "async": asynchronous, "async_ named": named_in_place, "gloo": gloo}
    return ways, lambda: [start * ranks + ranks * (ranks - 1) / 2 for start in starts]


def _timed(made, rounds):
    """Return each way's median and best, in microseconds, of the slower rank."""
    ways, wanted = made
    times = {name: [] for name in ways}
    for name, way in ways.items():
        for _ in range(2):
            _, found = way()
            for got, right in zip(found, wanted(), strict=True):
                if not torch.equal(got, right):
                    raise SystemExit(f"{name}: a wrong sum")
    for _ in range(rounds):
        for name, way in ways.items():
            hvd.barrier()
            way()  # untimed: the caches hold what the way before has left
            times[name].append(sum(way()[0] for _ in range(CALLS)) / CALLS * 1e6)
    medians = slowest([statistics.median(each) for each in times.values()])
    best = slowest([min(each) for each in times.values()])
    return dict(zip(ways, medians, strict=True)), dict(zip(ways, best, strict=True))


def work(rank, arguments):
    """Yield a row for each way."""
    hvd.init()
    cases = [(nbytes, 1, _one(nbytes)) for nbytes in arguments.sizes]
    cases.append((arguments.small, arguments.count, _many(arguments.count, arguments.small)))
    for nbytes, count, made in cases:
        medians, best = _timed(made, arguments.rounds)
        for name, median in medians.items():
            row = {
                "benchmark": "horovod/ops", "way": name, "nbytes": nbytes, "tensors": count, "ranks": hvd.size(),
                "threads": torch.get_num_threads(), "rounds": arguments.rounds, "us": round(median, 2),
                "best_us": round(best[name], 2),
            }  # fmt: skip
            if name != "gloo":
                row |= {"peer": "gloo", "times": round(medians["gloo"] / median, 3)}
            if count > 1 and name.startswith("async"):
                row["of_sync"] = round(median / medians["sync"], 4)
            yield row
    hvd.shutdown()


def show(row):
    line = f"  {row['times']:6.2f} times as fast as {row['peer']}" if "times" in row else ""
    line += f"  {row['of_sync']:.3f} of the synchronous calls" if "of_sync" in row else ""
    print(f"{row['tensors']:4d} x {row['nbytes']:9d} B  {row['way']:14s} {row['us']:10.1f} us{line}", flush=True)


def main():
    parser = make_parser(__doc__, "horovod_ops.jsonl")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes of one tensor (default: 1K to 25M)")
    parser.add_argument("--count", type=int, default=100, help="of small tensors (default: %(default)s)")
    parser.add_argument("--small", type=int, default=1024, help="bytes of a small tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="turns of every way (default: %(default)s)")
    arguments = parser.parse_args()
    run(work, arguments, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
