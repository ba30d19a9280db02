"""Training steps by plain DDP, our hook, FSDP2 and ours, in turn, by 1 or 2 ranks on one GPU.

`ms`: of one step on the device, by events around a block of steps; the median of all blocks, of the
slower rank. `host_ms`: how long the host takes to submit it. `of_ddp`: a block's time by plain
DDP's of the same round, the median. "replayed": the step is a CUDA graph. Before anything is timed
each way has made the same steps, and its parameters are compared with those of plain DDP.
"""

from __future__ import annotations

import statistics
import sys

import torch
import torch.distributed as dist

from .program import Program, events_seconds, open_device, run_ranks_of

CHECKED = 3
ROUNDS = 6
BLOCK_SECONDS = 0.15
TIMED = (
    "alone", "ddp", "hook", "hook, 2 streams", "hook, max_norm", "hook, int8 with error feedback", "hook, optimizer",
    "ours", "buckets, overlap", "fsdp2", "fsdp2 with ours", "sharded", "sharded, kept", "sharded, offloaded",
    "horovod", "hook, replayed", "buckets, overlap, replayed", "sharded, replayed",
)  # fmt: skip
CLOSE = 1e-3  # of the longest way that a parameter has gone


def slowest(values: list[float]) -> list[float]:
    most = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def max_difference(way, reference, first) -> float:
    """Return the largest difference of the parameters, by the largest change since the start."""
    found, right = way.parameters(), reference.parameters()
    moved = max((a - b).abs().max().item() for a, b in zip(right, first, strict=True))
    return max((a - b).abs().max().item() for a, b in zip(found, right, strict=True)) / moved


def make(program, arguments, device, rank) -> dict:
    """Return the ways that work, after their parameters have been compared."""
    from .front_ends import EXACT, LARGE, SMALL, Way

    model = SMALL if arguments.dry else LARGE
    first = [param.detach().clone() for param in model.build(device).parameters()]
    ways = {}
    for name in arguments.ways:
        way = program.attempt(name, lambda name=name: Way(name, model, device, rank), ranks=arguments.ranks)
        if way is None:
            continue
        for _ in range(CHECKED):
            if program.attempt(name, lambda way=way: way.step() or True, ranks=arguments.ranks) is None:
                break
        else:
            ways[name] = way
    for name, way in ways.items():
        if name in EXACT and "ddp" in ways:
            (apart,) = slowest([max_difference(way, ways["ddp"], first)])
            program.row(case=name, ranks=arguments.ranks, apart_from_ddp=float(f"{apart:.3g}"))
            if not apart <= CLOSE:
                raise AssertionError(f"{name}: the parameters aren't plain DDP's: {apart:.2e} apart")
    return ways


def measure(program, arguments, device, rank) -> None:
    ways = make(program, arguments, device, rank)
    once = [events_seconds(way.step, device, 2)[0] for way in ways.values()]
    (mean,) = slowest([statistics.mean(once)])
    steps = 2 if arguments.dry else max(3, min(100, int(BLOCK_SECONDS / max(1e-6, mean))))
    rounds = {name: [] for name in ways}
    for number in range(2 if arguments.dry else ROUNDS):
        for name in ways if number % 2 == 0 else reversed(ways):
            dist.barrier()
            ways[name].step()
            rounds[name].append(slowest(list(events_seconds(ways[name].step, device, steps))))
    for name, times in rounds.items():
        fields = {
            "ms": round(statistics.median(time[0] for time in times) * 1e3, 4),
            "host_ms": round(statistics.median(time[1] for time in times) * 1e3, 4),
        }
        if "ddp" in rounds:
            ratios = [own[0] / peer[0] for own, peer in zip(times, rounds["ddp"], strict=True)]
            fields["of_ddp"] = round(statistics.median(ratios), 3)
        if rank == 0:
            program.row(case=name, ranks=arguments.ranks, steps=steps * len(times), **fields)


def main() -> int:
    program = Program(__doc__, "steps", ranks=True)
    program.parser.add_argument("--ways", nargs="+", default=list(TIMED))
    arguments = program.parse()
    if arguments.rank is None:
        return run_ranks_of("benchmarks.gpu.steps", arguments)
    if arguments.rank:
        arguments.output = None  # rank 0 writes
    device = open_device(arguments.device, arguments.rank)
    from .front_ends import process_group

    with process_group(device):
        measure(program, arguments, device, arguments.rank)
        import collectives.horovod as hvd

        if hvd.is_initialized():
            hvd.shutdown()
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
