"""Time reduce_n, memcpy and torch, in turn: n sources of one type into one output of it.

    python benchmarks/kernels/reduce.py                     # host memory, one thread
    python benchmarks/kernels/reduce.py --device cuda       # one GPU: a device-to-device copy

Every result is checked before it is timed. One row a case goes to
benchmarks/results/kernels_reduce.jsonl. `fraction_of_copy` is the time of a memcpy that reads and
writes as many bytes in all as reduce_n (n sources once, the output once) by reduce_n's: 1 is the
copy's rate. `..._ratio` is a peer's time by ours. Both are medians over rounds. On the host a
call's time is the thread's own processor time, so that programs that take turns with it don't
count.
"""

import argparse
import statistics
import time

import torch
from pack import memcpy
from timing import add_options, gpu_seconds, in_turn, prepare, print_row, ratio, write_rows

from collectives import kernels

TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
ROUND_SECONDS = 0.05  # one side's part of a round, about


def seconds_of(call, device):
    """Return the time of one call: on the host the least, on a GPU the mean, of as many as fill a
    part of a round. Where the thread's clock ticks more slowly than calls come, it is the mean on
    the host too.
    """
    if device.type != "cuda":
        least, spent, calls = float("inf"), 0.0, 0
        while spent < ROUND_SECONDS:
            start = time.thread_time()
            call()
            took = time.thread_time() - start
            least, spent, calls = min(least, took), spent + took, calls + 1
        return least or spent / calls
    return gpu_seconds(call, ROUND_SECONDS)


def sides(sources, out, statistics_too):
    """Return what is timed; each has been run and its result compared with the sum in float64."""
    dtype = out.dtype
    table = kernels.Sources(sources)
    found = kernels.Statistics(out.device) if statistics_too else None
    exact = sum(each.double() for each in sources)
    spare = torch.empty_like(out)

    def chain():
        torch.add(sources[0], sources[1], out=spare)
        for each in sources[2:]:
            spare.add_(each)
        return spare if found is None else (spare, spare.norm(), torch.isfinite(spare).all())

    def narrow():  # torch has no sums of fp8
        total = sources[0].float()
        for each in sources[1:]:
            total += each.float()
        return spare.copy_(total)

    nbytes = (len(sources) + 1) * out.nbytes // 2
    to, start = (torch.zeros(nbytes, dtype=torch.uint8, device=out.device) for _ in range(2))
    calls = {"ours": lambda: kernels.reduce_n(table, out, statistics=found), "copy": memcpy(to, start)}
    if dtype.itemsize == 1:
        calls["chain"] = narrow
    else:
        calls["chain"] = chain
        if not statistics_too:
            calls["stack_sum"] = lambda: torch.stack(sources).sum(0)
    calls["ours"]()
    assert torch.equal(out.double(), exact.to(dtype).double()), "wrong sum"  # of whole numbers: exact in every type
    if found is not None:
        assert abs(found.norm.item() / exact.norm().item() - 1) < 1e-6 and found.nonfinite.item() == 0
    calls["chain"]()
    assert torch.equal(spare.double(), exact.to(dtype).double()), "wrong chain"
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "kernels_reduce.jsonl", 15)
    about = "of each source (default: 25 MiB and 256 KiB; GPU: 256 MiB)"
    parser.add_argument("--nbytes", nargs="*", type=int, default=None, help=about)
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    arguments = parser.parse_args()
    device, common = prepare(arguments)
    sizes = arguments.nbytes or ([256 << 20] if device.type == "cuda" else [25 << 20, 256 << 10])
    rows = []
    for name in arguments.types:
        dtype = getattr(torch, name)
        for nbytes in sizes:
            count = nbytes // dtype.itemsize
            numbers = torch.arange(count, device=device)
            sources = [((numbers * (k + 3)) % 3 - 1).to(dtype) for k in range(8)]
            out = torch.empty(count, dtype=dtype, device=device)
            for n, statistics_too in ((2, False), (4, False), (8, False), (4, True)):
                if statistics_too and dtype.itemsize == 1:
                    continue
                calls = sides(sources[:n], out, statistics_too)
                times = in_turn(calls, device, arguments.rounds, seconds_of)
                ours = times.pop("ours")
                copies = times.pop("copy")
                case = "sum_norm" if statistics_too else "sum"
                row = {"benchmark": "kernels_reduce", "case": case, "dtype": name, "nbytes": nbytes, "n": n}
                row["ours_us"] = round(statistics.median(ours) * 1e6, 2)
                row["gb_per_s"] = round((n + 1) * nbytes / statistics.median(ours) / 1e9, 2)
                row["copy_gb_per_s"] = round((n + 1) * nbytes / statistics.median(copies) / 1e9, 2)
                row["fraction_of_copy"] = ratio(copies, ours)
                for peer, seconds in times.items():
                    row[f"{peer}_us"] = round(statistics.median(seconds) * 1e6, 2)
                    row[f"{peer}_ratio"] = ratio(seconds, ours)
                rows.append({**print_row(row), **common})
    write_rows(rows, arguments)


if __name__ == "__main__":
    main()
