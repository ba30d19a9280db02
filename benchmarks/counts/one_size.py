"""Counts of all ways at one number of ranks, as JSON; `benchmarks.counts` starts a process for each."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys

from .recorder import Recorder

WARM = 6  # steps before the counted one


def counted(recorder: Recorder, way, ranks: int):
    """Return the counts of a way's step, and the bytes of its gradients."""
    recorder.all_reduce_ranks = way.all_reduce_ranks(ranks)
    step = way.make()
    for _ in range(WARM):
        step.region()
        step.rest()
    found = recorder.record(step.region)
    gc.collect()
    return found


def row_of(way, own, base, nbytes: int, ranks: int) -> dict:
    """Return a way's counts less those of the same step without communication."""
    return {
        "way": way.name,
        "ours": way.ours,
        "torch_by_name": dict(sorted((own.torch - base.torch).items())),
        "torch": sum(own.torch.values()) - sum(base.torch.values()),
        "kernels": sum(own.kernels.values()),
        "kernels_by_name": dict(sorted(own.kernels.items())),
        "nccl": sum(own.nccl.values()),
        "nccl_by_name": dict(sorted(own.nccl.items())),
        "passes": round((own.moved - base.moved) / nbytes, 3),
        "wire": round(float(own.wire / nbytes / (ranks - 1) * ranks), 3),
        "host_waits": own.host_waits,
        "waits": own.waits,
        "allocations": own.allocated - base.allocated,
        "nccl_memory": dict(own.nccl_memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--ways", nargs="+", default=[])
    arguments = parser.parse_args()
    # Buckets are not fused again, as those of 25 MB aren't, and no background thread fuses what it finds.
    os.environ.update(HOROVOD_FUSION_THRESHOLD="40000", HOROVOD_CYCLE_TIME="600000")
    recorder = Recorder()
    recorder.start(arguments.ranks)
    import torch

    from . import ways as all_ways
    from .ways import PARTS, WAYS, make_model

    all_ways.recorder = recorder

    torch.set_num_threads(1)
    gc.disable()
    torch.autograd.set_multithreading_enabled(False)
    model, _ = make_model()
    nbytes = sum(param.nbytes for param in model.parameters())
    ways = [way for way in WAYS if way.least_ranks <= arguments.ranks]
    needed = {way.base for way in ways} | set(arguments.ways or [way.name for way in ways])
    found, rows = {}, []
    for way in ways:
        if way.name in needed:
            print(way.name, file=sys.stderr, flush=True)
            found[way.name] = counted(recorder, way, arguments.ranks)
            if not way.name.startswith("alone"):
                rows.append(row_of(way, found[way.name], found[way.base], nbytes, arguments.ranks))
    found = {"ranks": arguments.ranks, "parts": PARTS, "gradient_bytes": nbytes, "rows": rows}
    print(json.dumps(found), flush=True)
    os._exit(0)  # Gloo and Horovod's threads may not outlive what they use


if __name__ == "__main__":
    main()
