"""Host time of a DDP bucket, a sharded unit, a Horovod operation, a communicator's call.

All with one rank and small tensors, so that what is timed is Python and the launches: the time
until a step is submitted, which a model must take longer for on the device. Of a step the same
without synchronisation is subtracted, and the rest is divided by the number of buckets or units.
Sums are checked before.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

from .program import Program, median, open_device, synchronize

PARTS = 32  # buckets, units, operations
ELEMENTS = 1024
ROUNDS = 15
WAYS = {  # what is counted, and what is subtracted
    "ddp": "alone", "hook": "alone", "hook, max_norm": "alone", "hook, int8 with error feedback": "alone",
    "hook, optimizer": "alone", "buckets": "alone", "buckets, overlap": "alone", "fsdp2": "alone",
    "fsdp2 with ours": "alone", "sharded": "alone", "sharded, kept": "alone", "horovod": "alone",
}  # fmt: skip


def host_seconds(call, device, rounds: int) -> float:
    """Return how long the host is busy with a call, the device idle before each."""
    call()
    found = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    synchronize(device)
    return statistics.median(found)


def steps(program, device, rounds: int, parts: int) -> None:
    """Time a step of each way: as many buckets, or units, as the model has blocks."""
    from .front_ends import Model, Way

    model = Model(parts, 32, 32, 8)  # a block has 8.25 KiB of gradients
    seconds = {}
    for name in ["alone", *WAYS]:
        way = program.attempt(name, Way, name, model, device, 0, 0.008)
        if way is None:
            continue
        for _ in range(3):
            way.step()
        seconds[name] = host_seconds(way.step, device, rounds)
        fields = {"step_us": round(seconds[name] * 1e6, 1), "parts": parts}
        if name in WAYS and WAYS[name] in seconds:
            fields["us_a_part"] = round((seconds[name] - seconds[WAYS[name]]) / parts * 1e6, 2)
        program.row(case=f"step: {name}", **fields)


def operations(program, device, rounds: int, parts: int) -> None:
    """Time operations of Horovod's interface and calls of the communicator, so many in a row."""
    import collectives
    import collectives.horovod as hvd

    comm = collectives.init(device=device)
    hvd.init()
    tensors = [torch.full((ELEMENTS,), float(number), device=device) for number in range(parts)]
    wanted = [each.clone() for each in tensors]
    names = [f"tensor {number}" for number in range(parts)]

    def asynchronous():
        handles = [hvd.allreduce_async_(each, op=hvd.Sum, name=name) for each, name in zip(tensors, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    def each_of(function):
        def call():
            for tensor in tensors:
                function(tensor)

        return call

    ways = {
        "hvd.allreduce_": each_of(lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum)),
        "hvd.allreduce_async_ and synchronize": asynchronous,
        "hvd.grouped_allreduce_": lambda: hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="group"),
        "comm.all_reduce": each_of(comm.all_reduce),
        "comm.all_reduce, async_op": lambda: [comm.all_reduce(t, async_op=True) for t in tensors][-1].wait(),
        "dist.all_reduce": each_of(dist.all_reduce),
    }
    for name, call in ways.items():
        call()
        synchronize(device)
        assert all(map(torch.equal, tensors, wanted)), f"{name}: a wrong sum"  # of one rank
        found = [host_seconds(call, device, rounds) / parts for _ in range(3)]
        program.row(case=name, us=median(found), elements=ELEMENTS, calls=parts)
    hvd.shutdown()


def main() -> int:
    program = Program(__doc__, "host_times")
    arguments = program.parse()
    device = open_device(arguments.device)
    from .front_ends import process_group

    rounds, parts = (2, 4) if arguments.dry else (ROUNDS, PARTS)
    with process_group(device):
        program.attempt("steps", steps, program, device, rounds, parts)
        program.attempt("operations", operations, program, device, rounds, parts)
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
