"""One user's training script in each way that it can be run on one node: seconds of an epoch.

    python benchmarks/which_way.py [--ranks 2] [--turns 3] [--rows]

The ways take turns, each in fresh processes. All train one model on the same samples with the same
global batch, so they must end at the same loss, which is checked. One more way sends nothing and shows
what the processes take without any communication. With more than one process each has an equal part
of the cores. ``--rows`` appends to benchmarks/results/which_way.jsonl, from which
performance_doc.py writes the table of docs/which-way.md.
"""

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time

# Width, hidden layers, samples, samples in a global batch: a step of less than 1 ms, of some ms, of some 100 ms.
MODELS = {"small": (128, 3, 16384, 64), "medium": (512, 4, 8192, 128), "large": (1024, 8, 2048, 256)}
ALONE = {"one process, one thread": 1, "one process, all cores": None}
RANKS = (
    "DDP over Gloo", "DDP over collectives", "DDP over Gloo, hook", "our DDP class", "fully_shard", "Horovod's API",
    "our DDP class, nothing sent",
)  # fmt: skip
NOTHING_SENT = RANKS[-1]
LR = 0.01


def make(way, net):
    """Return (module, optimizer) of a way."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import collectives

    if way == "Horovod's API":
        import collectives.horovod as hvd

        hvd.init()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        return net, hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    if way in RANKS:
        dist.init_process_group("collectives" if way in ("DDP over collectives", "fully_shard") else "gloo")
    if way == "fully_shard":
        from collectives.sharded import fully_shard

        for layer in net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(net)
    elif way in ("our DDP class", NOTHING_SENT):
        net = collectives.DistributedDataParallel(net)
    elif way in RANKS:
        net = DistributedDataParallel(net)
        if way.endswith("hook"):
            net.register_comm_hook(None, collectives.fused_allreduce)
    return net, torch.optim.SGD(net.parameters(), lr=LR)


def train(way, name):
    """Train for one epoch after a short one; print the seconds of the epoch and its last loss."""
    import torch
    import torch.distributed as dist
    from torch import nn

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    width, hidden, samples, batch = MODELS[name]
    torch.manual_seed(0)
    layers = [layer for _ in range(hidden) for layer in (nn.Linear(width, width), nn.ReLU())]
    module, optimizer = make(way, nn.Sequential(*layers, nn.Linear(width, 10)))
    inputs, targets = torch.randn(samples, width), torch.randint(10, (samples,))
    loss_of, part = nn.CrossEntropyLoss(), batch // size

    def epoch(steps):
        for step in range(steps):
            begin = step * batch + rank * part
            optimizer.zero_grad()
            loss = loss_of(module(inputs[begin : begin + part]), targets[begin : begin + part])
            loss.backward()
            optimizer.step()
        return loss.detach()

    epoch(10)
    if size > 1 and dist.is_initialized():
        dist.barrier()
    begun = time.perf_counter()
    with module.no_sync() if way == NOTHING_SENT else contextlib.nullcontext():
        loss = epoch(samples // batch)
    seconds = time.perf_counter() - begun
    losses = [loss.clone() for _ in range(size)]
    if way == "Horovod's API":
        import collectives.horovod as hvd

        losses = list(hvd.allgather(loss[None]))
    elif size > 1:
        dist.all_gather(losses, loss)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "loss": float(sum(losses) / size)}), flush=True)
    if size > 1 and dist.is_initialized():
        dist.barrier()
        os._exit(0)  # Gloo may abort in its destructor where a DDP object still holds it


def run(way, name, ranks):
    """Run a way in fresh processes; return what its rank 0 has printed."""
    count = ranks if way in RANKS else 1
    threads = ALONE.get(way, max(1, os.cpu_count() // ranks)) or os.cpu_count()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "OMP_NUM_THREADS": str(threads), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--way", way, "--model", name], text=True, stdout=subprocess.PIPE,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{way}, {name}: a process has failed")
    return json.loads(outputs[0].splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", action="store_true", help="append the results to benchmarks/results/which_way.jsonl")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    args = parser.parse_args()
    if args.way:
        return train(args.way, args.model)
    from rows import RESULTS, append_rows, provenance

    fields, rows = provenance(), []
    for name in [args.model] if args.model else MODELS:
        found = {way: [] for way in (*ALONE, *RANKS)}
        for _ in range(args.turns):
            for way, results in found.items():
                results.append(run(way, name, args.ranks))
        expected = found["one process, one thread"][0]["loss"]
        for way, results in found.items():
            if way != NOTHING_SENT and not all(math.isclose(each["loss"], expected, rel_tol=1e-3) for each in results):
                raise SystemExit(f"{way}, {name}: trained to a loss of {results[0]['loss']}, not {expected}")
            median = statistics.median(each["seconds"] for each in results)
            rows.append({"model": name, "way": way, "ranks": args.ranks if way in RANKS else 1, "seconds": median})
            print(f"{name:8} {way:26} {median:8.3f} s")
    if args.rows:
        append_rows([fields | row for row in rows], RESULTS / "which_way.jsonl")
    return None


if __name__ == "__main__":
    main()
