"""PyTorch's all_reduce tutorial, two spawned processes, with this project in place.

    python examples/spawned_all_reduce.py              # no launcher: the program starts its own ranks

Each rank all-reduces a tensor in three ways: by torch.distributed, as the tutorial does; by our
communicator, which finds torch.distributed's ranks by itself; and with no torch.distributed at all,
where RANK and WORLD_SIZE are set in the spawned process. An exception in a rank ends all of them,
and is shown with its traceback (`--fail-rank 1` tries that). The last line on stdout is one JSON
object; the exit status is 1 if a sum is wrong.
"""

import argparse
import json
import os
import sys

import jobs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import collectives
from collectives.launcher import detect_launcher

WAYS = ("torch.distributed", "communicator over its ranks", "collectives alone")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--ranks", type=jobs.at_least_1, default=2, help="processes to start (default: %(default)s)")
    option("--start-method", choices=mp.get_all_start_methods(), default="spawn", help="(default: %(default)s)")
    option("--fail-rank", type=int, help="a rank that raises before its first all-reduce")
    arguments = parser.parse_args()
    found = detect_launcher()
    if found.size > 1:
        parser.error(f"it starts its own ranks: run it with python alone, not under a launcher ({found.launcher})")
    return arguments


def by_torch(rank, size, port):
    """Run the tutorial's program; then let our communicator do the same for the ranks of the
    process group.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

    with collectives.init() as comm:  # torch.distributed knows the ranks, so no variable is needed
        ours = torch.tensor([rank + 1.0])
        comm.all_reduce(ours, op="sum")
    dist.destroy_process_group()
    return tensor.item(), ours.item()


def alone(rank, size):
    """Do it without torch.distributed: two variables say who this is; no address and no port are
    needed.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    with collectives.init() as comm:
        tensor = torch.tensor([rank + 1.0])
        comm.all_reduce(tensor)
        return tensor.item()


def init_process(rank, arguments, port, results):
    """Be one rank: torch.multiprocessing calls this in each process, with its number in front."""
    torch.set_num_threads(1)
    if rank == arguments.fail_rank:
        raise RuntimeError(f"rank {rank} was asked to fail")
    values = (*by_torch(rank, arguments.ranks, port), alone(rank, arguments.ranks))
    for way, value in zip(WAYS, values, strict=True):
        print(f"Rank {rank} has data {value}  ({way})\n", end="", flush=True)  # one write: ranks share the line
    results.put((rank, values))


def main():
    arguments = parse_arguments()
    # The ranks meet in this process's store, on a port that the system has chosen: nothing else can
    # have taken it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context(arguments.start_method).SimpleQueue()
    # Don't open a communicator here, before the ranks are started: with --start-method fork they
    # would inherit it, and it can't be used in a forked process.
    mp.start_processes(
        init_process, (arguments, store.port, results), nprocs=arguments.ranks, start_method=arguments.start_method
    )
    values = dict(results.get() for _ in range(arguments.ranks))
    expected = sum(range(1, arguments.ranks + 1))
    right = all(value == expected for of_rank in values.values() for value in of_rank)
    data = {way: [values[rank][place] for rank in range(arguments.ranks)] for place, way in enumerate(WAYS)}
    result = {"ranks": arguments.ranks, "start_method": arguments.start_method, "expected": expected, "right": right}
    print(json.dumps({**result, "data": data}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
