"""Rank processes over Gloo, options, and rows, for the benchmarks of front ends."""

import argparse
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # DDP's constructor does, which takes seconds: once here, not in each rank
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_processes import next_result, running  # noqa: E402
from rows import RESULTS, append_rows, provenance  # noqa: E402

RUN_SECONDS = 900.0


def rows_of(work, ranks, arguments, seconds=RUN_SECONDS):
    """Start ranks; yield the rows that rank 0's ``work(rank, arguments)`` yields.

    They are forked, since importing torch anew takes a second in each.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_rank, args=(rank, ranks, work, arguments, store, results)) for rank in range(ranks)
        ]
        limit = time.monotonic() + seconds
        with running(processes):
            while (row := next_result(results, processes, limit, f"{ranks} ranks")) is not None:
                yield row
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{ranks} ranks: they ended with {[process.exitcode for process in processes]}")


def _rank(rank, ranks, work, arguments, store, results):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for row in work(rank, arguments):
        if rank == 0:
            results.put(row)
    gc.collect()  # Gloo may abort at the end where a DDP object is left
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        results.put(None)


def run(work, arguments, show):
    """Call `rows_of`, ``show`` each row, and append all to the file of results; return them."""
    where = provenance()
    rows = []
    for row in rows_of(work, arguments.ranks, arguments):
        rows.append({**row, **where})
        show(row)
    append_rows(rows, arguments.output)
    return rows


def make_parser(text, output, *, ranks=True):
    """Return the parser of a program, by its docstring, with the options that all of them have.

    ``ranks``: whether --ranks is one of them. From here on SIGTERM ends the program as Ctrl-C does,
    so that the ranks are ended, too.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    if ranks:
        parser.add_argument("--ranks", type=int, default=2, help="ranks to start (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / output, help="file of rows (default: %(default)s)")
    return parser


def slowest(values):
    """Return the largest of each number over the ranks."""
    most = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()
