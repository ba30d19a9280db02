"""Time of each kernel, in CUDA graphs, on buffers that rotate past the L2 cache, beside a copy.

`us`: of one call, by events around replays of a graph that holds one call for each set of buffers;
`by` says where a graph could not be captured and launches in a row were timed. `host_us`: of one
call from Python, launched alone. `of_copy`: our rate by that of a copy on the device of the same
bytes, in turn, in the same run. Results are checked.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from .program import Program, events_seconds, is_gpu, open_device, synchronize

SIZES = (1 << 20, 25 << 20, 128 << 20)
L2_TIMES = 3  # the buffers of one case together, by the size of the L2 cache
MAX_SETS = 48
MAX_BYTES = 6 << 30
ROUNDS = 5
ROUND_SECONDS = 0.01
# Sizes past the first are for the calls that training makes.
LARGE = (
    "pack", "unpack", "reduce bfloat16", "reduce float32", "quantize int8", "quantize fp8_e4m3",
    "quantize with residual int8", "dequantize int8", "reduce wires int8", "requantize int8", "SGD", "AdamW",
)  # fmt: skip


def sets_for(moved: int, device, dry: bool) -> int:
    """Return how many sets of buffers rotate."""
    if dry or not is_gpu(device):
        return 2
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    wanted = -(-L2_TIMES * cache // max(moved, 1)) + 1
    return int(max(2, min(wanted, MAX_SETS, MAX_BYTES // max(moved, 1))))


def one_graph(calls, device):
    """Return a call that replays all of them, and how that is done; launches where they can't be
    captured.
    """

    def launches():
        for call in calls:
            call()

    if not is_gpu(device):
        return launches, "launches"
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        launches()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launches()
    except Exception as error:
        torch.cuda.synchronize(device)
        return launches, f"launches, since a capture failed: {type(error).__name__}: {str(error)[:150]}"
    return graph.replay, "graph"


def seconds_of(replay, device, calls: int, dry: bool) -> float:
    """Return seconds of one call: the least mean over a part of a round."""
    (once, _) = events_seconds(replay, device, 1)
    times = 1 if dry else max(1, min(200, int(ROUND_SECONDS / max(once, 1e-6))))
    return events_seconds(replay, device, times)[0] / calls


def measure(program, name, build, nbytes, device, dry) -> None:
    first = build(nbytes, device)
    first.call()
    first.check()  # after one call: the optimizers are compared with torch's there
    cases = [first] + [build(nbytes, device) for _ in range(sets_for(first.nbytes, device, dry) - 1)]
    sources = [torch.zeros(max(1, case.nbytes // 2), dtype=torch.uint8, device=device) for case in cases]
    targets = [torch.zeros_like(each) for each in sources]
    copies = [lambda to=to, of=of: to.copy_(of) for to, of in zip(targets, sources, strict=True)]
    for case in cases[1:]:
        case.call()
    ours, by = one_graph([case.call for case in cases], device)
    theirs, _ = one_graph(copies, device)
    times, peers = [], []
    for _ in range(1 if dry else ROUNDS):
        times.append(seconds_of(ours, device, len(cases), dry))
        peers.append(seconds_of(theirs, device, len(cases), dry))
    synchronize(device)
    start = time.perf_counter()
    for case in cases:
        case.call()
    host = (time.perf_counter() - start) / len(cases)
    synchronize(device)
    for case in cases[:2]:
        case.check()
    middle = statistics.median(times)
    program.row(
        case=name, nbytes=nbytes, moved=first.nbytes, us=round(middle * 1e6, 2), host_us=round(host * 1e6, 2),
        gb_per_s=round(first.nbytes / middle / 1e9, 1),
        of_copy=round(statistics.median(peer / own for peer, own in zip(peers, times, strict=True)), 3),
        sets=len(cases), by=by,
    )  # fmt: skip


def main() -> int:
    program = Program(__doc__, "kernel_times")
    program.parser.add_argument("--cases", nargs="+", default=None)
    arguments = program.parse()
    device = open_device(arguments.device)
    from .kernel_cases import CASES

    for nbytes in (4096,) if arguments.dry else SIZES[::-1]:
        for name, build in CASES.items():
            if nbytes == SIZES[0] or arguments.dry or name.startswith(LARGE):
                if arguments.cases is None or name in arguments.cases:
                    fields = {"nbytes": nbytes}
                    program.attempt(name, measure, program, name, build, nbytes, device, arguments.dry, **fields)
                    if is_gpu(device) and not arguments.dry:
                        torch.cuda.empty_cache()
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
