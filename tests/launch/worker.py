"""One rank of the launch tests: does what its arguments say, one after the other, and prints one line of JSON.

``init`` open and sum over the ranks; ``twice`` init again; ``reopen`` close and init again; ``group`` a process group
of torch.distributed, its sum, and its end; ``group-first`` the same, left open; ``ours`` as group, by
``collectives.init_process_group``; ``control`` a communicator on host memory over a subgroup; ``restart`` fail in the
first life of rank 1. The first argument is the time limit of ``init()`` in seconds. What ``init()`` raises becomes the
result. ``BEGUN`` is printed once all is imported.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import collectives
from collectives.errors import CollectivesError
from collectives.rendezvous.control import bootstrap_on_host
from collectives.rendezvous.join import identify_process


def sum_of_ranks(comm) -> float:
    """What all_reduce makes of rank + 1."""
    tensor = torch.full((1000,), float(comm.rank + 1))
    comm.all_reduce(tensor)
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


def open_group(ours: bool = False) -> float:
    """Open torch's default group, by TEST_GROUP ("tcp://... rank size"), by us or the environment; sum the ranks."""
    if ours:
        collectives.init_process_group("gloo")
    elif "TEST_GROUP" in os.environ:
        url, rank, size = os.environ["TEST_GROUP"].split()
        dist.init_process_group("gloo", init_method=url, rank=int(rank), world_size=int(size))
    else:
        dist.init_process_group("gloo")
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def run(timeout: float, steps: list[str], result: dict) -> None:
    """Take the steps."""
    comm = None
    for step in steps:
        if step == "restart":
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and comm.rank == 1:
                os._exit(7)
        elif step in ("group", "ours"):
            result.setdefault("groups", []).append(open_group(step == "ours"))
            dist.destroy_process_group()
        elif step == "group-first":
            result.setdefault("groups", []).append(open_group())
        elif step == "control":
            # The last rank is the first of the subgroup: what it serves isn't on MASTER_ADDR's machine.
            part = comm.split(0, -comm.rank)
            control = bootstrap_on_host(part, timeout / 2)
            result["control"] = sum_of_ranks(control)
            control.close()
            part.close()
        elif step == "twice":
            result["same"] = collectives.init() is comm
        else:
            if step == "reopen":
                comm.close()
            comm = collectives.init(timeout=timeout)
            result.setdefault("sums", []).append(sum_of_ranks(comm))
    result.update(rank=comm.rank, size=comm.size, local_rank=comm.local_rank, local_size=comm.local_size)
    comm.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> int:
    """Do as the arguments say; 1 where an error was the result."""
    faulthandler.register(signal.SIGUSR1)
    result: dict = {}
    began = time.monotonic()
    sys.stdout.write("BEGUN\n")
    sys.stdout.flush()
    try:
        result["launcher"] = identify_process().launcher
        result["address"] = [os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")]
        run(float(sys.argv[1]), sys.argv[2:], result)
    except (CollectivesError, KeyboardInterrupt) as error:
        result.update(error=type(error).__name__, text=str(error), peers=list(getattr(error, "peers", ())))
    result["seconds"] = time.monotonic() - began
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    sys.stdout.flush()
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
