"""Host time per bucket of DDP, per unit of `fully_shard`, per fused batch of Horovod's, beside torch's.

    python -m benchmarks.host_time [--ways hook ...] [--profile] [--results FILE]

Rank 0 of 8 runs alone on a simulated GPU whose functions do nothing (`benchmarks/echo`), with an
NCCL of no-ops, and torch with its process group "fake". Time is the process's CPU time; the backward
runs on the calling thread. Subtracted is the same step without synchronisation: of a DDP bucket with
a hook that returns the bucket, of a unit with the bare module. What is left is Python, torch's own
operations, and streams and events, which cost here about what the driver's cost (the last rows). Not
counted: ``cuLaunchKernel`` of our kernels. All ways are timed in turn, in the same rounds; a figure
is the median of the rounds, and `ratio` the median of ours by torch's in each round.

``--profile`` prints where the time of each way goes, by lines, from samples.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import signal
import statistics
import sys
import time
from pathlib import Path

RANKS = 8
PARTS = 16  # buckets, units
TENSORS = 16  # of a fused batch
ELEMENTS = 256
GOALS = {"bucket": 20.0, "gather": 60.0, "reduce": 60.0, "batch": 30.0}  # microseconds

# (way, what is counted, subtracted, torch's way to compare with, phase)
COUNTED = (
    ("ddp, allreduce_hook", "bucket", "ddp, empty hook", None, "backward"),
    ("hook", "bucket", "ddp, empty hook", "ddp, allreduce_hook", "backward"),
    ("hook, 2 streams", "bucket", "ddp, empty hook", "ddp, allreduce_hook", "backward"),
    ("hook, bf16", "bucket", "ddp, empty hook", "ddp, allreduce_hook", "backward"),
    ("hook, max_norm", "bucket", "ddp, empty hook", "ddp, allreduce_hook", "backward"),
    ("hook, int8 with error feedback", "bucket", "ddp, empty hook", "ddp, allreduce_hook", "backward"),
    ("hook, optimizer", "bucket", "ddp, empty hook", "ddp, allreduce_hook", "backward"),
    ("buckets, overlap", "bucket", "alone", "ddp, allreduce_hook", "backward"),
    ("fsdp2", "gather", "alone", None, "forward"),
    ("sharded", "gather", "alone", "fsdp2", "forward"),
    ("fsdp2, kept", "reduce", "alone", None, "backward"),
    ("sharded, kept", "reduce", "alone", "fsdp2, kept", "backward"),
)  # fmt: skip


class Timed:
    """A way to train, and its times in each round: microseconds of a forward and of a backward."""

    def __init__(self, name: str, model, device):
        from benchmarks.front_ends import Way

        self.name = name
        self.way = Way(name, model, device, 0, bucket_cap_mb=0.002)
        self.rounds: list[dict[str, float]] = []

    def phases(self) -> tuple[float, float, float]:
        """Make a step; return CPU time at its begin, after its forward, after its backward."""
        way, clock = self.way, time.process_time_ns
        way.optimizer.zero_grad(set_to_none=True)
        begin = clock()
        loss = way.module(way.batch).square().mean()
        middle = clock()
        loss.backward()
        way.after()
        end = clock()
        way.optimizer.step()
        return begin, middle, end

    def round(self, steps: int) -> None:
        gc.collect()
        found = [self.phases() for _ in range(steps)]
        self.rounds.append({
            "forward": statistics.median(middle - begin for begin, middle, _ in found) * 1e-3,
            "backward": statistics.median(end - middle for _, middle, end in found) * 1e-3,
        })  # fmt: skip

    def check(self) -> None:
        """Raise unless DDP has as many buckets as there are blocks."""
        if hasattr(self.way.module, "_get_ddp_logging_data"):
            sizes = self.way.module._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
            if len(sizes.split(",")) != PARTS:
                raise AssertionError(f"{self.name}: buckets of {sizes} bytes, which should be {PARTS}")


def per_part(timed: dict, way: str, base: str, phase: str) -> list[float]:
    """Return microseconds a part, of each round."""
    return [
        (own[phase] - other[phase]) / PARTS for own, other in zip(timed[way].rounds, timed[base].rounds, strict=True)
    ]


def training_rows(names, rounds: int, steps: int) -> list[dict]:
    import torch

    from benchmarks import echo
    from benchmarks.front_ends import Model

    counted = [row for row in COUNTED if not names or row[0] in names]
    needed = dict.fromkeys(name for row in counted for name in (row[2], row[3], row[0]) if name)
    model, device = Model(PARTS, 16, 16, 8), torch.device("cuda", 0)  # a block has 2.1 KiB of gradients
    timed = {}
    for name in needed:
        echo.carry_out(True)
        made = timed[name] = Timed(name, model, device)
        for _ in range(5):  # buckets are made again, schedules recorded
            made.phases()
        made.check()
    echo.carry_out(False)
    for number in range(rounds):
        for made in list(timed.values())[:: -1 if number % 2 else 1]:
            made.round(steps)
    rows = []
    for way, what, base, peer, phase in counted:
        own = per_part(timed, way, base, phase)
        row = {
            "case": way,
            "per": what,
            "us": round(statistics.median(own), 1),
            "without": base,
            "goal_us": GOALS[what],
        }
        if peer is not None:
            theirs = next(each[2] for each in COUNTED if each[0] == peer)
            pairs = zip(own, per_part(timed, peer, theirs, phase), strict=True)
            row |= {"torch": peer, "ratio": round(statistics.median(a / b for a, b in pairs), 2)}
        rows.append(row)
    return rows


# ---- Horovod's interface.
def batch_calls():
    """Return calls of one fused batch: ours from submission to the wait, and torch's."""
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    import collectives.horovod as hvd

    hvd.init()
    tensors = [torch.ones(ELEMENTS + number, device="cuda") for number in range(TENSORS)]

    def ours():
        hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="batch")

    def torchs():
        flat = _flatten_dense_tensors(tensors)
        dist.all_reduce(flat)
        torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))

    return ours, torchs


class Stopwatch:
    """Adds up the CPU time of the calls of a method."""

    def __init__(self, owner, name: str):
        self.ns = self.calls = 0
        method = getattr(owner, name)

        def timed(*arguments):
            begin = time.process_time_ns()
            try:
                return method(*arguments)
            finally:
                self.ns += time.process_time_ns() - begin
                self.calls += 1

        setattr(owner, name, timed)

    def take(self) -> float:
        """Return microseconds a call since the last time."""
        found, self.ns, self.calls = self.ns * 1e-3 / max(1, self.calls), 0, 0
        return found


def cpu_us(call, times: int) -> float:
    gc.collect()
    found = []
    for _ in range(times):
        begin = time.process_time_ns()
        call()
        found.append(time.process_time_ns() - begin)
    return statistics.median(found) * 1e-3


def horovod_rows(rounds: int, steps: int) -> list[dict]:
    import collectives.horovod as hvd
    from benchmarks import echo
    from collectives.horovod.basics import current

    echo.carry_out(True)
    ours, torchs = batch_calls()
    for _ in range(5):
        ours()
        torchs()
    echo.carry_out(False)
    watch = Stopwatch(current().controller(hvd.global_process_set)._executor, "run")
    found = []
    for _ in range(rounds):
        watch.take()
        whole = cpu_us(ours, steps)
        found.append((whole, watch.take(), cpu_us(torchs, steps)))
    medians = [round(statistics.median(column), 1) for column in zip(*found, strict=True)]
    ratios = [[row[at] / row[2] for row in found] for at in (0, 1)]
    names = (f"grouped_allreduce_ of {TENSORS} tensors", f"of it, the batch of {TENSORS} tensors")
    return [
        *(
            {"case": f"horovod: {name}", "per": "batch", "us": us, "goal_us": GOALS["batch"],
             "torch": "flatten, all_reduce, copy", "ratio": round(statistics.median(ratio), 2)}
            for name, us, ratio in zip(names, medians, ratios, strict=False)
        ),
        {"case": "torch: flatten, all_reduce, copy", "per": "batch", "us": medians[2]},
    ]  # fmt: skip


def primitive_rows(rounds: int) -> list[dict]:
    """Return what the simulation's own functions cost, which stand for the driver's."""
    import torch
    import torch.distributed as dist

    from collectives.rendezvous import init

    side, event, tensor = torch.cuda.Stream(), torch.cuda.Event(), torch.ones(1024, device="cuda")
    comm = init()

    def enters():
        with torch.cuda.stream(side):
            pass

    def empty(value):
        return value

    calls = {
        "a Python function": lambda: empty(1),
        "torch.cuda.current_stream()": lambda: torch.cuda.current_stream(0),
        "event.record(stream)": lambda: event.record(side),
        "stream.wait_stream(stream)": lambda: side.wait_stream(side),
        "with torch.cuda.stream()": enters,
        "tensor.add_(1)": lambda: tensor.add_(1),
        "comm.all_reduce": lambda: comm.all_reduce(tensor),
        "dist.all_reduce": lambda: dist.all_reduce(tensor),
    }

    def many(call):
        for _ in range(50):
            call()

    return [
        {"case": name, "per": "call",
         "us": round(statistics.median(cpu_us(lambda call=call: many(call), 20) / 50 for _ in range(rounds)), 2)}
        for name, call in calls.items()
    ]  # fmt: skip


# ---- Profiles.
class Sampler:
    """Samples of the calling thread's Python stack by CPU time, each 4 ms or what the kernel's clock allows.

    ``lines``: of the innermost frame of this package's; what it calls of torch's counts. A signal
    that comes in torch's C++ is delivered in the first line of what that calls next: such samples of
    an entry into this package are not counted there. ``functions``: with all that they call.
    """

    def __init__(self, root: Path):
        self.root = f"{root}/collectives/"
        self.lines, self.functions, self.samples = collections.Counter(), collections.Counter(), 0

    def _sample(self, _, frame) -> None:
        self.samples += 1
        found = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self.root):
                found.append((code.co_filename[len(self.root) :], frame.f_lineno, code.co_firstlineno, code.co_name))
            frame = frame.f_back
        if not found or (len(found) == 1 and found[0][1] == found[0][2]):
            return
        name, line, _, function = found[0]
        self.lines[f"{name}:{line} ({function})"] += 1
        for key in {f"{name}:{first} ({function})" for name, _, first, function in found}:
            self.functions[key] += 1

    def __enter__(self):
        self._before = signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._before)

    def show(self, seconds: float, parts: int, most: int) -> None:
        """Print the lines and functions with most samples, as microseconds a part."""
        each = seconds * 1e6 / max(1, self.samples) / parts
        ours = sum(self.lines.values()) * each
        print(f"  {self.samples} samples, {seconds * 1e6 / parts:.1f} us a part in all, {ours:.1f} in this package")
        for what, counter in (("line, and what it calls of others", self.lines),
                              ("function, and all that it calls", self.functions)):  # fmt: skip
            print(f"  us      {what}")
            for name, count in counter.most_common(most):
                print(f"  {count * each:6.1f}  {name}")


def profile(names, seconds: float, most: int) -> None:
    import torch

    from benchmarks import echo
    from benchmarks.front_ends import Model

    model, device = Model(PARTS, 16, 16, 8), torch.device("cuda", 0)
    root = Path(__file__).resolve().parent.parent
    ways = [name for name in names or dict.fromkeys(row[0] for row in COUNTED) if name != "horovod"]
    for name in ways:
        echo.carry_out(True)
        made = Timed(name, model, device)
        for _ in range(5):
            made.phases()
        echo.carry_out(False)
        sampler, steps, begin = Sampler(root), 0, time.process_time()
        with sampler:
            while time.process_time() - begin < seconds:
                made.phases()
                steps += 1
        print(f"== {name}: forward, backward and optimizer of {PARTS} parts")
        sampler.show(time.process_time() - begin, steps * PARTS, most)
    if not names or "horovod" in names:
        ours, _ = batch_calls()
        for _ in range(5):
            ours()
        sampler, steps, begin = Sampler(root), 0, time.process_time()
        with sampler:
            while time.process_time() - begin < seconds:
                ours()
                steps += 1
        print(f"== horovod: grouped_allreduce_ of {TENSORS} tensors")
        sampler.show(time.process_time() - begin, steps, most)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ways", nargs="+", default=[], choices=[*(row[0] for row in COUNTED), "horovod"], metavar="WAY"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="steps of a round (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, and time nothing")
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU time of a profile (%(default)s)")
    parser.add_argument("--most", type=int, default=40, help="lines of a profile (%(default)s)")
    parser.add_argument("--results", type=Path, default=None, help="file of rows; '' for none")
    arguments = parser.parse_args()
    from benchmarks import echo

    echo.start(RANKS)
    import torch

    from benchmarks.rows import RESULTS, append_rows, provenance

    where = provenance()
    torch.set_num_threads(1)
    gc.disable()
    torch.autograd.set_multithreading_enabled(False)
    if arguments.profile:
        profile(arguments.ways, arguments.seconds, arguments.most)
        return 0
    rows = training_rows([name for name in arguments.ways if name != "horovod"], arguments.rounds, arguments.steps) \
        if arguments.ways != ["horovod"] else []  # fmt: skip
    if not arguments.ways or "horovod" in arguments.ways:
        rows += horovod_rows(arguments.rounds, arguments.steps)
    rows += primitive_rows(arguments.rounds)
    for row in rows:
        print(json.dumps(row), flush=True)
    path = RESULTS / "host_time.jsonl" if arguments.results is None else arguments.results
    if path.name:
        shared = {"benchmark": "host_time", "ranks": RANKS, "parts": PARTS, "rounds": arguments.rounds}
        append_rows([{**shared, **row, **where} for row in rows], path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
