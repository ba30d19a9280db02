"""What all examples do around their training: join the job, show progress, compare the ranks, draw,
and leave.

An example's main is ``jobs.run(train, arguments)``. Its last line on stdout is one JSON object, by
rank 0, or a sentence, with the JSON in a file.
"""

import argparse
import gc
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm

import collectives


def run(train, arguments, gpu_backend="gloo", repeatable=True, describe=None):
    """Call ``train(arguments, comm)`` as a rank of this job; return the exit status: 0 if all went
    well.

    `train` returns (result, passed), the same on all ranks; rank 0 prints the result as JSON. The
    ranks are started by torchrun, mpirun or srun, or there is one alone. `arguments.plot` is where
    `train` leaves its plot. `gpu_backend`: what torch.distributed takes GPU tensors over; NCCL
    wants a GPU for each rank. `repeatable`: a GPU computes the same bits each time, as most examples
    compare them; some operations take longer then. `describe`: returns the sentence that is printed
    in place of the JSON, which goes into the file `arguments.json`.
    """
    if repeatable and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first matrix product
        torch.use_deterministic_algorithms(True, warn_only=True)
    comm = collectives.init()
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it; under mpirun the ranks would fight for the cores
        torch.set_num_threads(max(1, min(len(os.sched_getaffinity(0)), os.cpu_count() // comm.local_size)))
    join_process_group(comm, gpu_backend)
    result, passed = train(arguments, comm)
    if comm.rank == 0:  # before the others leave: a launcher ends all ranks once one has failed
        print(f"plot: {arguments.plot}")
        if describe is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result) + "\n")
            print(f"numbers: {arguments.json}")
        print(json.dumps(result) if describe is None else describe(result), flush=True)
    # Gloo may abort the process at its exit while a DDP object is alive: train() has dropped its
    # own, now end in order.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    comm.close()
    return 0 if passed else 1


def join_process_group(comm, gpu_backend="gloo"):
    """Start torch.distributed for the ranks of ``comm``; under mpirun, with no MASTER_ADDR, too."""
    backend = "gloo"
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
        backend = "gloo" if gpu_backend == "gloo" else f"cpu:gloo,cuda:{gpu_backend}"
    collectives.init_process_group(backend, comm=comm)


def at_least_1(text):
    """Read an option that is a count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


# ---- Progress: of rank 0; the bar on a terminal alone.


def progress(comm, name, steps):
    """Return a tqdm bar of so many steps; in a pipe, and on ranks other than 0, it shows
    nothing.
    """
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return tqdm(total=steps, desc=name, unit="step", disable=comm.rank > 0 or not on_terminal, leave=False)


def say(comm, text):
    """Print a line once, above the bar if there is one."""
    if comm.rank == 0:
        tqdm.write(text, file=sys.stdout)


# ---- What the ranks have.


def fingerprint(model):
    """Return the SHA-256 of a model's parameters and buffers, with their names. Of shards a collective."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest


def identical_on_all_ranks(model):
    """Return whether parameters and buffers are equal bit for bit on all ranks, by SHA-256 gathered
    over Gloo.
    """
    mine = torch.tensor(list(fingerprint(model).digest()), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(one, everyone[0]) for one in everyone)


# ---- The plot, with no display.


def new_figure(title):
    """Return a figure and its two axes, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, *figure.subplots(1, 2)


def save(figure, path):
    """Write a figure into a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
