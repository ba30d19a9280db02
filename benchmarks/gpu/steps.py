"""Training steps by plain DDP, our hook, FSDP2, our shards and Horovod's API, in turn, by ranks that share one GPU.

`ms`: of one step on the device, by events around a block of steps; the median of all blocks, of the slower rank.
`host_ms`: how long the host takes to submit it. `of_ddp`: a block's time by plain DDP's of the same round, the median.
"replayed": the step is a CUDA graph. Before anything is timed each way has made the same steps, and its parameters are
compared with those of plain DDP.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.front_ends import EXACT, LARGE, SMALL, Way, process_group

CHECKED = 3  # steps before the comparison
ROUNDS = 6
BLOCK_SECONDS = 0.15
TIMED = (
    "alone", "ddp", "hook", "hook, max_norm", "hook, int8 with error feedback", "hook, optimizer", "buckets, overlap",
    "fsdp2", "sharded", "sharded, kept", "horovod", "hook, replayed", "sharded, replayed",
)  # fmt: skip
CLOSE = 1e-3  # of the longest way that a parameter has gone


def block_seconds(step, device: torch.device, steps: int) -> tuple[float, float]:
    """Return the seconds of one of so many steps in a row, on the device and on the host."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        spent = (time.perf_counter() - start) / steps
        return spent, spent
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    on_host = (time.perf_counter() - start) / steps
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) * 1e-3 / steps, on_host


def slowest(values) -> list[float]:
    """Return the largest of each value over the ranks."""
    most = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def verify(ways: dict[str, Way], first: list[torch.Tensor]) -> None:
    """Compare the parameters of exact ways with those of plain DDP, by the largest change since the start."""
    right = ways["ddp"].parameters()
    moved = max((a - b).abs().max().item() for a, b in zip(right, first, strict=True))
    for name, way in ways.items():
        if name in EXACT:
            found = way.parameters()
            apart = max((a - b).abs().max().item() for a, b in zip(found, right, strict=True)) / moved
            if not slowest([apart])[0] <= CLOSE:
                raise AssertionError(f"{name}: the parameters are {apart:.2e} apart from plain DDP's")


def measure(arguments, device: torch.device) -> None:
    model = SMALL if arguments.small else LARGE
    first = [param.detach().clone() for param in model.build(device).parameters()]
    ways = {name: Way(name, model, device, dist.get_rank()) for name in TIMED}
    for way in ways.values():
        for _ in range(CHECKED):
            way.step()
    verify(ways, first)
    (mean,) = slowest([statistics.mean(block_seconds(way.step, device, 2)[0] for way in ways.values())])
    steps = 2 if arguments.small else max(3, min(100, int(BLOCK_SECONDS / mean)))
    rounds: dict[str, list] = {name: [] for name in ways}
    for number in range(2 if arguments.small else ROUNDS):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            dist.barrier()
            ways[name].step()
            rounds[name].append(slowest(block_seconds(ways[name].step, device, steps)))
    for name, times in rounds.items():
        ms, host_ms = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        of_ddp = statistics.median(own[0] / peer[0] for own, peer in zip(times, rounds["ddp"], strict=True))
        if dist.get_rank() == 0:
            print(f"{name:32s} ms={ms:.4f} host_ms={host_ms:.4f} of_ddp={of_ddp:.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="few steps of a small model: is the program right?")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # all ranks share it
    with process_group(device):
        measure(arguments, device)
        import collectives.horovod as hvd

        hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
