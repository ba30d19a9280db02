"""Time optimizers, and the clipping of gradients, on our shards, on FSDP2's DTensors and on plain tensors.

    python benchmarks/sharded/optimizers.py                # 2 ranks; starts the ranks itself

The parameters are so small that nearly all of the time is the host's. `ours` are RaggedTensors,
`fsdp2` the parameters of a module of torch's `fully_shard`, `plain` tensors of the same local
elements. They take turns; a time is the median of the turns, of the slower rank. The ratio of a case
is ours by its peer: FSDP2, or for `collectives.optim` plain tensors. Muon steps matrices of the size
`--width`, by `collectives.sharded.Muon` and by torch's, both on our shards, and by torch's on
FSDP2's. Rows go to benchmarks/results/sharded_optimizers.jsonl; the exit status is 1 where a ratio is
above its limit.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collectives
from collectives.sharded.muon import Muon
from collectives.sharded.placement import RaggedShard
from collectives.sharded.ragged_tensor import RaggedTensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "ddp"))
from launch import make_parser, run, slowest  # noqa: E402

CASES = {  # (optimizer's step or clipping, its peer, the most that the ratio may be)
    "adamw_foreach": (lambda params: torch.optim.AdamW(params, foreach=True).step, "fsdp2", 1.1),
    "adamw_fused": (lambda params: torch.optim.AdamW(params, fused=True).step, "fsdp2", 1.0),
    "adamw_loop": (lambda params: torch.optim.AdamW(params, foreach=False).step, "fsdp2", 1.1),
    "sgd_foreach": (lambda params: torch.optim.SGD(params, momentum=0.9, foreach=True).step, "fsdp2", 1.1),
    "clip_grad_norm_": (lambda params: lambda: nn.utils.clip_grad_norm_(params, 1e9), "fsdp2", 1.2),
    "our_adamw": (lambda params: collectives.optim.AdamW(params).step, "plain", 1.1),
}
SHAPE = (16, 8)


def parameters(kind, count, shape, mesh):
    """Return parameters with gradients, of which each rank has the same elements in all kinds."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for _ in range(2 * count)]
    ranks, rank = mesh.size(), mesh.get_local_rank()
    if kind == "fsdp2":
        module = nn.ParameterList(map(nn.Parameter, values[:count]))
        params = list(fully_shard(module, mesh=mesh).parameters())
        for param, value in zip(params, values[count:], strict=True):
            param.grad = torch.distributed.tensor.distribute_tensor(value, mesh, param.placements)
        return params
    bounds = [shape[0] * each // ranks for each in range(ranks + 1)]
    if kind == "plain":
        made = [each[bounds[rank] : bounds[rank + 1]].clone() for each in values]
    else:
        made = [RaggedTensor.from_full(each, mesh, RaggedShard(bounds)) for each in values[:count]]
        made += [
            param.like(RaggedShard(bounds).cut(each, rank).clone())
            for param, each in zip(made, values[count:], strict=True)
        ]
    params = list(map(nn.Parameter, made[:count]))
    for param, grad in zip(params, made[count:], strict=True):
        param.grad = grad
    return params


def in_turn(calls, arguments):
    """Return the median time of each call in ms."""
    rounds = {name: [] for name in calls}
    for number in range(arguments.rounds + 1):
        for name in list(calls) if number % 2 else list(reversed(calls)):
            dist.barrier()
            times = []
            for _ in range(arguments.calls):
                start = time.perf_counter()
                calls[name]()
                times.append((time.perf_counter() - start) * 1e3)
            if number:  # the first one warms up
                rounds[name] += slowest([statistics.median(times)])
    return {name: statistics.median(times) for name, times in rounds.items()}


def work(rank, arguments):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    common = {"benchmark": "sharded/optimizers", "ranks": mesh.size(), "threads": torch.get_num_threads()}
    for name in arguments.cases:
        if name == "muon":
            yield common | measure_muon(arguments, mesh)
            continue
        make, peer, limit = CASES[name]
        calls = {kind: make(parameters(kind, arguments.count, SHAPE, mesh)) for kind in ("ours", peer)}
        yield common | row(name, peer, limit, in_turn(calls, arguments), count=arguments.count)


def row(name, peer, limit, times, **more):
    ratio = round(times["ours"] / times[peer], 4)
    times = {kind: round(each, 4) for kind, each in times.items()}
    return {"case": name, **more, "peer": peer, "limit": limit, "ratio": ratio, "ms": times}


def measure_muon(arguments, mesh):
    shape, count = (arguments.width, arguments.width), arguments.matrices
    calls = {"ours": Muon(parameters("ours", count, shape, mesh)).step}
    for kind, name in (("ours", "torch_on_ours"), ("fsdp2", "fsdp2")):
        calls[name] = torch.optim.Muon(parameters(kind, count, shape, mesh)).step
    times = in_turn(calls, arguments)
    return row("muon", "torch_on_ours", 1.0, times, count=count, width=arguments.width)


def show(row):
    times = "  ".join(f"{kind} {each:8.3f} ms" for kind, each in row["ms"].items())
    print(f"{row['case']:16s} {times}   {row['ratio']:5.2f} of {row['peer']}, at most {row['limit']}", flush=True)


def main():
    parser = make_parser(__doc__, "sharded_optimizers.jsonl")
    option, cases = parser.add_argument, [*CASES, "muon"]
    option("--cases", nargs="+", choices=cases, default=cases, help="(default: all)")
    option("--count", type=int, default=200, help="parameters (default: %(default)s)")
    option("--matrices", type=int, default=12, help="Muon's parameters (default: %(default)s)")
    option("--width", type=int, default=256, help="of Muon's matrices (default: %(default)s)")
    option("--rounds", type=int, default=20, help="turns of each (default: %(default)s)")
    option("--calls", type=int, default=10, help="calls in a turn (default: %(default)s)")
    arguments = parser.parse_args()
    rows = run(work, arguments, show)
    return 0 if all(row["ratio"] <= row["limit"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
