"""Rank processes over Gloo, rows and their provenance, for the benchmarks of DDP."""

import gc
import json
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

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
sys.path.insert(0, str(HERE.parent))
from provenance import where_and_when  # noqa: E402
from rank_processes import next_result, running  # noqa: E402

import collectives  # noqa: E402

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


def provenance():
    """Return the fields of every row.

    Call it before anything of ours runs: one is the machine's load.
    """
    return {
        "load": round(os.getloadavg()[0], 2), **where_and_when(), "torch": torch.__version__,
        "collectives": collectives.__version__,
    }  # fmt: skip


def add_options(parser, output):
    """Add the option that all these programs have."""
    parser.add_argument("--output", type=Path, default=RESULTS / output, help="file of rows (default: %(default)s)")


def write_rows(rows, arguments):
    """Append the rows to the file of results."""
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"rows: {arguments.output}")


def end_on_signals():
    """Leave on SIGTERM as on Ctrl-C, so that the ranks are ended, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def slowest(values):
    """Return the largest of each number over the ranks."""
    most = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()
