"""Time a step of hvd.DistributedOptimizer, of DDP over Gloo, and of DDP with our hook, in turn.

    python benchmarks/horovod/step.py

A step is forward, backward and SGD's step on one thread a rank; gradients are set to None before,
untimed. Blocks of steps are made in turn, in one run; the first steps of a block aren't counted; a
time is the first decile over all blocks, of the slower rank, so that what else runs on the machine
counts little. The ways: the optimizer alone, which shows what the ranks' own work takes; torch's
DDP over Gloo; `collectives.DistributedDataParallel` with our hook; `hvd.DistributedOptimizer`, as
it is and with ``gradient_as_bucket_view=False``. Before anything is timed all but the first must
have made the same parameters, bit for bit on 2 ranks. ``added``: what a way adds to the step alone
by what Gloo's adds. One row a model goes to benchmarks/results/horovod_step.jsonl.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ddp"))
from launch import make_parser, run, slowest  # noqa: E402

import collectives  # noqa: E402
import collectives.horovod as hvd  # noqa: E402

SKIPPED = 2  # steps at the start of a block
TINY_LR = 1e-7  # learning rate: the model stays about what it is
WAYS = ("alone", "gloo", "hook", "hvd", "hvd_in_place")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


def build(name):
    torch.manual_seed(1)
    if name == "8xLinear1024":
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    return nn.Sequential(*(Block(16) for _ in range(53)), nn.Flatten(), nn.Linear(16 * 64, 10))  # 161 parameters


def data(name, rank):
    shape = (32, 1024) if name == "8xLinear1024" else (4, 16, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


class Way:
    """One way to make a step."""

    def __init__(self, way, name):
        self.model = self.module = build(name)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=TINY_LR)
        self.times = []
        if way == "gloo":
            self.module = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        elif way == "hook":
            self.module = collectives.DistributedDataParallel(self.model)
            self.module.register_comm_hook(collectives.fused_allreduce)
        elif way.startswith("hvd"):
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, self.model.named_parameters(), gradient_as_bucket_view=way == "hvd"
            )

    def step(self, batch):
        self.optimizer.zero_grad()
        start = time.perf_counter()
        self.module(batch).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start


def first_decile(times):
    return statistics.quantiles(times, n=10)[0]


def measure(name, rank, arguments):
    """Return the row of one model."""
    batch = data(name, rank)
    ways = {way: Way(way, name) for way in arguments.ways}
    for way in ways.values():
        way.optimizer.param_groups[0]["lr"] = 0.1
        for _ in range(3):
            way.step(batch)
        way.optimizer.param_groups[0]["lr"] = TINY_LR
    right = None
    for name_of_way, way in ways.items():
        found = [param.detach() for param in way.model.parameters()]
        if name_of_way != "alone":
            right = right or found
            if dist.get_world_size() == 2 and not all(map(torch.equal, found, right)):
                raise SystemExit(f"{name_of_way}: other parameters than the first way's")
    taken = sum(statistics.median(way.step(batch) for _ in range(3)) for way in ways.values()) / len(ways)
    steps = max(3, min(200, int(arguments.block_seconds / slowest([taken])[0])))
    for _ in range(arguments.rounds):
        for way in ways.values():
            dist.barrier()
            way.times += [way.step(batch) for _ in range(SKIPPED + steps)][SKIPPED:]
    ms = dict(zip(ways, slowest([first_decile(way.times) * 1e3 for way in ways.values()]), strict=True))
    base, gloo = ms.get("alone"), ms.get("gloo")
    params = list(ways[arguments.ways[0]].model.parameters())
    return {
        "benchmark": "horovod/step", "model": name, "parameters": len(params),
        "gradient_bytes": 4 * sum(param.numel() for param in params), "ranks": dist.get_world_size(),
        "steps": steps * arguments.rounds, **{f"{way}_ms": round(value, 4) for way, value in ms.items()},
        "added": {
            way: round((value - base) / (gloo - base), 4)
            for way, value in ms.items() if base and gloo and way != "alone"
        },
    }  # fmt: skip


def work(rank, arguments):
    hvd.init()
    for name in arguments.models:
        yield measure(name, rank, arguments)
    hvd.shutdown()


def main():
    parser = make_parser(__doc__, "horovod_step.jsonl")
    models = ["8xLinear1024", "161 tensors"]
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="default: both")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every way (default: %(default)s)")
    parser.add_argument("--block-seconds", type=float, default=0.5, help="one turn (default: %(default)s)")
    arguments = parser.parse_args()

    def show(row):
        print(row["model"])
        for way in arguments.ways:
            print(
                f"  {way:14s} {row[f'{way}_ms']:9.3f} ms   adds {row['added'].get(way, 0):6.3f} of what Gloo adds",
                flush=True,
            )

    run(work, arguments, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
