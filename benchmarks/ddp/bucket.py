"""Time the reduction of one DDP bucket by torch's hooks over Gloo, and by ours on each wire.

    python benchmarks/ddp/bucket.py                         # 2 ranks; starts the ranks itself
    python benchmarks/ddp/bucket.py --ways gloo_bf16 bf16   # some of them

All hooks get the same bucket of the same DDP module, one after another, inside of its backward; a
time is from the hook's call to the value of its future, the median of all rounds, of the slower
rank; the gradient is copied into the bucket before each, untimed. That bucket has become memory
that the ranks share, which all are given; `fp32_staged`, with the bucket as DDP made it, is called
in another module's backward, once a round. Before a way is timed its first result is checked as
step.py does. `wire_bytes`: what this rank sends, as rings send it, 2(n-1)/n of an all-reduced
array: ours as HookState counts it, torch's from the arrays that its hook gives to Gloo.

`times`: the peer's time by ours; peers: Gloo's fp32 hook, torch's bf16 hook for all 16-bit and
8-bit wires (it has no 8-bit one that could be compared: `quantization_pertensor_hook` gathers from
all ranks and keeps no sum in 8 bits). One row a way goes to benchmarks/results/ddp_bucket.jsonl.
"""

import contextlib
import ctypes
import statistics
import sys
import time

import torch
import torch.distributed as dist
from expected import Expected, check
from launch import make_parser, run, slowest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from ways import to_bf16

import collectives

WIRES = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8")
FEEDBACK = {"ef": True, "": False}
PEERS = {"fp32": "gloo", "fp32_staged": "gloo"}


def _ours():
    states = {"fp32": {}}
    for wire in WIRES:
        states[wire] = {"wire": wire}
        states[f"{wire}_ef"] = {"wire": wire, "error_feedback": True}
    return states


OURS = _ours()
GLOO = {
    "gloo": (lambda: None, default_hooks.allreduce_hook),
    "gloo_bf16": (lambda: None, to_bf16),
}
ALL = (*GLOO, "fp32_staged", *OURS)
PEERS.update({name: "gloo_bf16" for name in OURS if name.startswith(WIRES)})


_LIBC = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@contextlib.contextmanager
def own_mappings():
    """Let malloc give what is allocated inside mappings of its own, as it does from 32 MiB up.

    Whether it does for less depends on all that was freed before. Afterwards the thresholds are
    those that it reaches by itself in the end, so that temporary arrays are cheap for all ways.
    """
    _LIBC.mallopt(_MMAP_THRESHOLD, 64 << 10)
    try:
        yield
    finally:
        _LIBC.mallopt(_MMAP_THRESHOLD, 32 << 20)
        _LIBC.mallopt(_TRIM_THRESHOLD, 64 << 20)


class Matrices(torch.nn.Module):
    """Parameters of so many MiB together, as matrices of 1024 columns."""

    def __init__(self, mib):
        super().__init__()
        rows = int(mib * 256)
        sizes = [1024] * (rows // 1024) + ([rows % 1024] if rows % 1024 else [])
        self.members = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size, 1024)) for size in sizes])

    def forward(self):
        return sum(member.sum() for member in self.members)


class Way:
    """A hook with its state."""

    def __init__(self, name):
        self.name = name
        self.times = []
        self.wire_bytes = 0
        if name in GLOO:
            make, self.hook = GLOO[name]
            self.state = make()
        else:
            staged = name == "fp32_staged"
            self.state = collectives.HookState(**OURS["fp32" if staged else name], zero_copy=not staged)
            self.hook = collectives.fused_allreduce

    def call(self, bucket):
        """Reduce the bucket; return the seconds."""
        start = time.perf_counter()
        self.hook(self.state, bucket).wait()
        return time.perf_counter() - start

    def counted(self, bucket):
        """Reduce the bucket, and count the bytes that this rank sends."""
        with _counting() as sent:
            self.call(bucket)
        self.wire_bytes = self.state.bytes_on_wire if self.name not in GLOO else sent[0]


@contextlib.contextmanager
def _counting():
    """Count what is given to torch's all_reduce, as a ring sends it."""
    sent, right, size = [0], dist.all_reduce, dist.get_world_size()

    def counted(tensor, *args, **options):
        sent[0] += 2 * (size - 1) * tensor.nbytes // size
        return right(tensor, *args, **options)

    dist.all_reduce = counted
    try:
        yield sent
    finally:
        dist.all_reduce = right


class Turns:
    """A DDP module whose hook lets each way reduce its bucket."""

    def __init__(self, names, mib, gradient):
        self.ways = [Way(name) for name in names]
        self.gradient = gradient
        self.checks = True
        self.module = DistributedDataParallel(Matrices(mib), bucket_cap_mb=4 * mib, gradient_as_bucket_view=True)
        self.module.register_comm_hook(self, _in_turn)

    def round(self):
        self.module().backward()

    def reduce(self, bucket):
        flat = bucket.buffer()
        if flat.numel() != self.gradient.numel():
            raise SystemExit(f"DDP made a bucket of {flat.numel()} elements in place of {self.gradient.numel()}")
        shapes = [parameter.shape for parameter in bucket.parameters()]
        expected = Expected(_split(self.gradient, shapes)) if self.checks else None
        for way in self.ways:
            if expected is not None:
                self._check(way, bucket, flat, shapes, expected)
            else:
                flat.copy_(self.gradient)
                dist.barrier()
                way.times.append(way.call(bucket))

    def _check(self, way, bucket, flat, shapes, expected):
        flat.copy_(self.gradient)
        way.counted(bucket)
        check(way.name, _kind(way.name), _split(flat, shapes), expected)


def _in_turn(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.reduce(bucket)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _kind(name):
    if name == "gloo":
        return "close"
    name = name.removeprefix("gloo_").removesuffix("_ef").removesuffix("_staged")
    return "mean" if name == "fp32" else name


def _split(flat, shapes):
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def work(rank, arguments):
    """Yield a row for each way."""
    with own_mappings():
        gradient = torch.randn(int(arguments.mib * 2**18), generator=torch.Generator().manual_seed(rank))
        both = [
            Turns([name for name in arguments.ways if (name == "fp32_staged") == staged], arguments.mib, gradient)
            for staged in (False, True)
        ]
        both = [turns for turns in both if turns.ways]
        for turns in both:
            turns.round()  # with its checks
            turns.checks = False
            turns.round()  # DDP's buckets are the final ones from here on
            for way in turns.ways:
                way.times.clear()
    for _ in range(arguments.rounds):
        for turns in both:
            turns.round()
    ways = {way.name: way for turns in both for way in turns.ways}
    ways = {name: ways[name] for name in arguments.ways}
    medians = slowest([statistics.median(way.times) * 1e3 for way in ways.values()])
    ms = dict(zip(ways, medians, strict=True))
    as_fp32 = 2 * (dist.get_world_size() - 1) * gradient.nbytes // dist.get_world_size()
    for name, way in ways.items():
        peer = PEERS.get(name)
        row = {
            "benchmark": "ddp/bucket", "way": name, "nbytes": gradient.nbytes, "ranks": dist.get_world_size(),
            "threads": torch.get_num_threads(), "rounds": arguments.rounds, "ms": round(ms[name], 4),
            "wire_bytes": way.wire_bytes, "of_fp32": round(way.wire_bytes / as_fp32, 4),
        }  # fmt: skip
        if isinstance(way.state, collectives.HookState):
            row["shared"] = way.state._registrations.describe()
        if peer in ms:
            row |= {"peer": peer, "times": round(ms[peer] / ms[name], 3)}
        yield row


def show(row):
    line = f"  {row['times']:5.2f} times as fast as {row['peer']}" if "times" in row else ""
    print(f"{row['way']:16s} {row['ms']:9.3f} ms  {row['of_fp32']:6.3f} of fp32's bytes{line}", flush=True)


def main():
    parser = make_parser(__doc__, "ddp_bucket.jsonl")
    parser.add_argument("--mib", type=float, default=25, help="size of the bucket (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=ALL, default=list(ALL), help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every way (default: %(default)s)")
    arguments = parser.parse_args()
    run(work, arguments, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
