"""Measure and plot the host engine's cost by bytes, by ranks and by number of buckets.

    python benchmarks/growth.py                       # 2 to 16 ranks, each a process; starts them itself
    python benchmarks/growth.py --plot-only           # draw docs/growth_*.png from the rows that are there

A batch is a few calls in a row on one array; its last result is checked against the sums that they
must give, so every call of every batch is checked. A time is the median over batches, of the
slowest rank. Rows of one run replace those of the last one in benchmarks/results/growth.jsonl; the
first ones have the fields of ``python -m collectives.bench``, so ``python -m benchmarks.scaling
--measured benchmarks/results/growth.jsonl`` fits the cost model to them.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
import uuid
from pathlib import Path

import torch
from rank_processes import next_result, running
from rows import RESULTS, provenance

import collectives
from collectives.bench.plot import short_size as size

HERE = Path(__file__).resolve().parent
OPS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = [1 << bits for bits in (10, 12, 14, 16, 18, 20, 22, 24, 26)]  # bytes
RANKS = [2, 3, 4, 6, 8, 12, 16]
BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
BUCKET_BYTES = 32 << 20  # all buckets together
BATCH = 8  # calls in a row
LARGE = 4 << 20  # bytes from which on two calls are enough
WARM_SECONDS = 2.0
RUN_SECONDS = 600.0  # a run of one number of ranks, at most


PERIOD = 251  # of every rank's array, so that expected sums are made from few numbers


def repeated(pattern, count):
    return pattern.repeat(-(-count // PERIOD))[:count]


def pattern(rank):
    return (torch.arange(PERIOD, dtype=torch.int64) * (rank + 1) % PERIOD).to(torch.float32)


def contribution(rank, count):
    """Return a rank's array: small whole numbers, so that every sum over ranks is exact in
    float32.
    """
    return repeated(pattern(rank), count)


def summed(ranks, count, calls):
    """Return what `calls` all-reduces in a row on one array give: equal arrays from the second one
    on.
    """
    total = sum(pattern(rank) for rank in range(ranks))
    for _ in range(calls - 1):
        once, total = total, total.clone()
        for _ in range(ranks - 1):  # as rounded as a sum one after the other is, where ranks is no power of two
            total += once
    return repeated(total, count)


def measure(comm, prepare, call, check, calls, seconds_each):
    """Return the medians in us of the slowest rank, one call of a batch: median and 95th percentile
    over batches.
    """
    seconds = []

    def batch():
        prepare()
        comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent = (time.perf_counter() - start) / calls
        if not check():
            raise SystemExit(f"rank {comm.rank} of {comm.size}: wrong result")
        return spent

    batch()
    began = time.perf_counter()
    batch()
    whole = torch.tensor([time.perf_counter() - began], dtype=torch.float64)  # what is not timed takes time, too
    comm.all_reduce(whole, "max")
    for _ in range(max(3, min(200, int(seconds_each / whole.item())))):
        seconds.append(batch())
    p95 = sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]
    found = torch.tensor([statistics.median(seconds), p95], dtype=torch.float64)
    comm.all_reduce(found, "max")
    return [value * 1e6 for value in found.tolist()], len(seconds)


def empty(comm, count, zero_copy):
    return comm.empty(count, torch.float32) if zero_copy else torch.empty(count)


def warm_up(comm):
    """Make calls for a while: ranks just forked may share a core, until the scheduler moves one."""
    began, array = time.monotonic(), torch.zeros(1 << 16)
    while True:
        for _ in range(20):
            comm.all_reduce(array)
        spent = torch.tensor([time.monotonic() - began])
        comm.all_reduce(spent, "max")
        if spent.item() > WARM_SECONDS:
            return


def grid_point(comm, op, algorithm, nbytes, zero_copy, seconds):
    """Measure one operation of `nbytes` bytes, rounded up to equal parts of whole elements."""
    n = comm.size
    count = -(-nbytes // 4 // n) * n
    part = count // n
    mine = slice(comm.rank * part, (comm.rank + 1) * part)
    calls = BATCH if nbytes < LARGE else 2
    how = {} if algorithm == "native" else {"algorithm": algorithm}
    whole = empty(comm, count, zero_copy)
    if op == "all_reduce":
        source, expected = contribution(comm.rank, count), summed(n, count, calls)
        steps = (
            lambda: whole.copy_(source), lambda: comm.all_reduce(whole, **how), lambda: torch.equal(whole, expected),
        )  # fmt: skip
    else:
        shard = empty(comm, part, zero_copy)
        if op == "reduce_scatter":
            whole.copy_(contribution(comm.rank, count))
            out, expected = shard, summed(n, count, 1)[mine].clone()
            call = lambda: comm.reduce_scatter(shard, whole, **how)  # noqa: E731
        else:
            shard.copy_(contribution(comm.rank, part))
            out, expected = whole, torch.cat([contribution(rank, part) for rank in range(n)])
            call = lambda: comm.all_gather(whole, shard, **how)  # noqa: E731
        steps = (lambda: out.fill_(-1), call, lambda: torch.equal(out, expected))
    (median, p95), batches = measure(comm, *steps, calls, seconds)
    rate = count * 4 / median / 1e3
    return {
        "sweep": "grid", "op": op, "engine": comm.engine.name, "algorithm": algorithm, "dtype": "float32", "ranks": n,
        "bytes": count * 4, "count": count, "in_place": op == "all_reduce", "zero_copy": zero_copy,
        "time_us": round(median, 3), "p95_us": round(p95, 3), "algbw_gbs": round(rate, 4),
        "busbw_gbs": round(rate * (n - 1) / n * (2 if op == "all_reduce" else 1), 4), "wrong": 0,
        "batches": batches, "calls": calls,
    }  # fmt: skip


def bucket_point(comm, buckets, queued, zero_copy, seconds):
    """Measure all-reduces of `buckets` equal parts of one array: queued and waited for together, or
    one by one.
    """
    count = BUCKET_BYTES // 4
    whole, source = empty(comm, count, zero_copy), contribution(comm.rank, count)
    expected = summed(comm.size, count, 1)
    parts = whole.chunk(buckets)

    def call():
        if queued:
            for work in [comm.all_reduce(part, async_op=True) for part in parts]:
                work.wait()
        else:
            for part in parts:
                comm.all_reduce(part)

    (median, p95), batches = measure(
        comm, lambda: whole.copy_(source), call, lambda: torch.equal(whole, expected), 1, seconds
    )
    return {
        "sweep": "buckets", "op": "all_reduce of buckets", "engine": comm.engine.name, "algorithm": "native",
        "dtype": "float32", "ranks": comm.size, "bytes": BUCKET_BYTES, "buckets": buckets, "queued": queued,
        "zero_copy": zero_copy, "time_us": round(median, 3), "p95_us": round(p95, 3), "wrong": 0, "batches": batches,
    }  # fmt: skip


def rank_process(rank, ranks, job, arguments, results):
    """Be one rank: measure, and let rank 0 hand the rows over."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), COLLECTIVES_JOB_ID=job)
    torch.set_num_threads(1)
    rows = []
    with collectives.init(engine="host") as comm:
        warm_up(comm)
        sizes = [size for size in arguments.sizes if size * ranks <= arguments.memory << 20]
        for algorithm, op, nbytes in itertools.product(arguments.algorithms, OPS, sizes):
            rows.append(grid_point(comm, op, algorithm, nbytes, arguments.zero_copy, arguments.point_seconds))
        if ranks in arguments.bucket_ranks:
            for buckets, queued in itertools.product(BUCKETS, (True, False)):
                rows.append(bucket_point(comm, buckets, queued, arguments.zero_copy, arguments.point_seconds))
    if rank == 0:
        results.put(rows)


def run(ranks, arguments):
    """Start the ranks and return their rows. They are forked, since importing torch anew takes a
    second in each.
    """
    context = multiprocessing.get_context("fork")
    results, job = context.Queue(), uuid.uuid4().hex
    processes = [context.Process(target=rank_process, args=(r, ranks, job, arguments, results)) for r in range(ranks)]
    limit = time.monotonic() + RUN_SECONDS
    with running(processes):
        return next_result(results, processes, limit, f"{ranks} ranks")


# ---- Plots.

STYLES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"), ("X", "-.")]
INKS = ["#000000", "#b2182b", "#2166ac", "#1b7837", "#762a83", "#8c510a", "#555555"]


def draw(rows, folder):
    """Draw the three plots from rows; black on white, distinguished by mark and line as well as by
    colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def one(name, title, xlabel, lines, note=""):
        figure, axes = pyplot.subplots(figsize=(7, 4.6))
        for number, (label, points) in enumerate(lines):
            mark, line = STYLES[number % len(STYLES)]
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker=mark, linestyle=line, color=INKS[number % len(INKS)], label=label, markersize=5)
        axes.set(title=title, xlabel=xlabel, ylabel="time (us)", xscale="log", yscale="log")
        ticks = sorted({x for _, points in lines for x, _ in points})
        axes.set_xticks(ticks, [size(x) if "bytes" in xlabel else str(x) for x in ticks], rotation=0, fontsize=8)
        axes.minorticks_off()
        axes.grid(True, color="#cccccc", linewidth=0.6)
        axes.legend(fontsize=8)
        figure.text(0.01, 0.01, note, fontsize=6, color="#444444")
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
        print(f"plot: {folder / name}.png")

    where = f"{rows[0]['machine']}, {rows[0]['cores']} cores, commit {rows[0]['commit']}, {rows[0]['time'][:10]}"
    where += f", load of other programs {rows[0]['load']}"
    grid = [r for r in rows if r["sweep"] == "grid" and r["op"] == "all_reduce" and r["algorithm"] == "native"]
    rounded = lambda row: 1 << round(math.log2(row["bytes"]))  # noqa: E731  # whole parts: not quite a power of two
    by_ranks = [
        (f"{n} ranks", [(rounded(r), r["time_us"]) for r in grid if r["ranks"] == n])
        for n in sorted({r["ranks"] for r in grid})
    ]
    one("growth_bytes", "All-reduce, host engine: time against bytes", "bytes", by_ranks, where)
    sizes = sorted({rounded(r) for r in grid})
    chosen = [s for s in sizes if s in (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)] or sizes
    by_size = [(size(s), [(r["ranks"], r["time_us"]) for r in grid if rounded(r) == s]) for s in chosen]
    one("growth_ranks", "All-reduce, host engine: time against ranks", "ranks", by_size, where)
    parts = [r for r in rows if r["sweep"] == "buckets"]
    by_way = [
        (
            f"{n} ranks, {'queued, then waited for' if queued else 'one by one'}",
            [(r["buckets"], r["time_us"]) for r in parts if (r["ranks"], r["queued"]) == (n, queued)],
        )
        for n, queued in sorted({(r["ranks"], r["queued"]) for r in parts})
    ]
    title = f"All-reduce of {size(BUCKET_BYTES)} in equal buckets: time against their number"
    one("growth_buckets", title, "buckets", by_way, where)


def numbers(text):
    return [int(word) for word in text.split(",")]


def end(number, frame):
    """Leave on a signal as on Ctrl-C, so that the ranks are ended, too."""
    sys.exit(128 + number)


def main():
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=RANKS, help="numbers of ranks (default: 2 to 16)")
    parser.add_argument("--sizes", type=numbers, default=SIZES, help="sizes in bytes (default: 1 KiB to 64 MiB)")
    parser.add_argument("--bucket-ranks", type=numbers, default=[2, 4], help="ranks of the buckets (default: 2,4)")
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=["native"], help="default: native")
    parser.add_argument("--point-seconds", type=float, default=0.12, help="one point, about (default: %(default)s)")
    parser.add_argument("--zero-copy", action="store_true", help="arrays from comm.empty")
    parser.add_argument("--memory", type=int, default=256, help="MiB of all ranks' arrays, at most (default: 256)")
    parser.add_argument("--output", type=Path, default=RESULTS / "growth.jsonl")
    parser.add_argument("--plots", type=Path, default=HERE.parent / "docs", help="folder of the plots")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.plot_only:
        where, rows = provenance(), []
        for ranks in arguments.ranks:
            began = time.monotonic()
            rows += [{"benchmark": "growth", **row, **where} for row in run(ranks, arguments)]
            print(f"{ranks} ranks: {time.monotonic() - began:.0f} s", flush=True)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"rows: {arguments.output}")
    draw([json.loads(line) for line in arguments.output.read_text().splitlines()], arguments.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
