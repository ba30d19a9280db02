"""Time a training step under DDP: without sync, synchronised by Gloo, and by `collectives.fused_allreduce`.

    python benchmarks/ddp_step.py                          # 2 ranks, three models; starts the ranks itself
    python benchmarks/ddp_step.py --state zero_copy=True   # arguments of HookState

A step is forward and backward on one thread a rank (gradients are set to None before, untimed). Blocks of steps are
made in turn, in one run: under DDP with Gloo, with our hook, with a hook that does nothing, under `no_sync()`, and by
the plain module. The first steps of a block aren't counted; a time is the median over all blocks, of the slower rank.
What the sync adds is the difference to `no_sync()`: `added` is ours by Gloo's. The hook that does nothing shows what of
it DDP takes itself, to copy gradients into buckets and back. Before anything is timed, gradients are compared: ours
must be the rank-ordered sum of the ranks' own gradients by the number of ranks, bit for bit, and Gloo's close to it.
One row a model goes to benchmarks/results/ddp_step.jsonl.
"""

import argparse
import ast
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from answers import next_answer, running
from provenance import where_and_when
from torch.nn.parallel import DistributedDataParallel

import collectives

HERE = Path(__file__).resolve().parent
MODELS = {  # name: Linears, width, batch
    "8xLinear1024": (8, 1024, 32),
    "8xLinear2048": (8, 2048, 8),
    "3xLinear128": (3, 128, 32),
}
SHOWN = ("plain", "no_sync", "nothing", "gloo", "collectives")
SKIPPED = 2  # steps at the start of a block
BLOCK_SECONDS = 0.5  # one block, about
RUN_SECONDS = 900.0


def build(name):
    linears, width, _ = MODELS[name]
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(linears)))


class Way:
    """One way to make a step: a module, and the context in which it runs."""

    def __init__(self, module, context=contextlib.nullcontext):
        self.module = module
        self.context = context
        self.times = []

    def step(self, batch):
        """Make one step; return its seconds."""
        self.module.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with self.context():
            self.module(batch).square().mean().backward()
        return time.perf_counter() - start

    def gradients(self):
        return [parameter.grad.clone() for parameter in self.module.parameters()]


def nothing(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave the bucket as it is: a hook that costs what DDP itself does around hooks."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check(ways, batch):
    """Compare the gradients of two steps: ours with the rank-ordered sum of the ranks' own, Gloo's with both."""
    for number in range(2):  # DDP makes its buckets anew after the first one
        for way in ways.values():
            way.step(batch + number)
        own = ways["plain"].gradients()
        for index, mine in enumerate(own):
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            expected = parts[0]
            for part in parts[1:]:
                expected = expected + part
            expected /= len(parts)
            found = {name: list(way.module.parameters())[index].grad for name, way in ways.items()}
            if not torch.equal(found["collectives"], expected):
                raise SystemExit(f"parameter {index}: our gradient isn't the rank-ordered mean")
            if not torch.allclose(found["gloo"], expected, rtol=1e-5, atol=1e-8):
                raise SystemExit(f"parameter {index}: Gloo's gradient isn't the mean")
            if not (torch.equal(found["no_sync"], mine) and torch.equal(found["nothing"], mine)):
                raise SystemExit(f"parameter {index}: a gradient without sync isn't the rank's own")


def measure(name, rank, arguments):
    """Return the row of one model."""
    _, width, rows = MODELS[name]
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))
    options = {"gradient_as_bucket_view": arguments.bucket_view}
    ours = DistributedDataParallel(build(name), **options)
    ours.register_comm_hook(collectives.HookState(**dict(arguments.state)), collectives.fused_allreduce)
    idle = DistributedDataParallel(build(name), **options)
    idle.register_comm_hook(None, nothing)
    unsynced = DistributedDataParallel(build(name), **options)
    ways = {
        "gloo": Way(DistributedDataParallel(build(name), **options)),
        "collectives": Way(ours),
        "nothing": Way(idle),
        "no_sync": Way(unsynced, unsynced.no_sync),
        "plain": Way(build(name)),
    }
    check(ways, batch)
    taken = torch.tensor(
        [sum(statistics.median(way.step(batch) for _ in range(3)) for way in ways.values()) / len(ways)]
    )
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)  # one number of steps for all ranks
    steps = max(3, min(200, int(arguments.block_seconds / taken.item())))
    for _ in range(arguments.rounds):
        for way in ways.values():
            dist.barrier()
            way.times += [way.step(batch) for _ in range(SKIPPED + steps)][SKIPPED:]
    medians = torch.tensor([statistics.median(way.times) * 1e3 for way in ways.values()], dtype=torch.float64)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    ms = dict(zip(ways, medians.tolist(), strict=True))
    count = sum(parameter.numel() for parameter in ours.parameters())
    ways.clear()
    return {
        "benchmark": "ddp_step", "model": name, "gradient_bytes": 4 * count, "batch": rows,
        "ranks": dist.get_world_size(), "threads": torch.get_num_threads(), "bucket_view": arguments.bucket_view,
        "state": dict(arguments.state), "steps": steps * arguments.rounds,
        **{f"{way}_ms": round(value, 4) for way, value in ms.items()},
        "added": round((ms["collectives"] - ms["no_sync"]) / (ms["gloo"] - ms["no_sync"]), 4),
        "added_to_plain": round((ms["collectives"] - ms["plain"]) / (ms["gloo"] - ms["plain"]), 4),
    }  # fmt: skip


def rank_process(rank, arguments, store, results):
    """Be one rank; rank 0 hands the rows over."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    for name in arguments.models:
        row = measure(name, rank, arguments)
        gc.collect()  # Gloo may abort at the end where a DDP object is left
        if rank == 0:
            results.put(row)
    dist.barrier()
    dist.destroy_process_group()


def run(arguments):
    """Start the ranks, yield rank 0's rows. They are forked: importing torch anew takes a second in each."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=rank_process, args=(r, arguments, store, results)) for r in range(arguments.ranks)
        ]
        limit = time.monotonic() + RUN_SECONDS
        with running(ranks):
            for _ in arguments.models:
                yield next_answer(results, ranks, limit, f"{len(ranks)} ranks")


def pair(text):
    """Parse KEY=VALUE; a value that is no Python literal is a string."""
    key, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def end(number, frame):
    """Leave on a signal as on Ctrl-C, so that the ranks are ended, too."""
    sys.exit(128 + number)


def main():
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all three")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every way (default: %(default)s)")
    parser.add_argument("--block-seconds", type=float, default=BLOCK_SECONDS, help="one turn (default: %(default)s)")
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view=True")
    parser.add_argument("--state", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="of our HookState")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "ddp_step.jsonl")
    arguments = parser.parse_args()
    where = {**where_and_when(), "torch": torch.__version__, "collectives": collectives.__version__}
    where["load"] = round(os.getloadavg()[0], 2)  # before anything of ours ran
    rows = []
    for row in run(arguments):
        rows.append({**row, **where})
        times = ", ".join(f"{way} {row[f'{way}_ms']:.2f}" for way in SHOWN)
        print(f"{row['model']}: {times} ms; the sync adds {row['added']:.2f} of what Gloo adds", flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"rows: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
