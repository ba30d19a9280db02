"""Train the small GPT by Muon over shards: each matrix is stepped whole, on one rank.

    torchrun --nproc-per-node 2 examples/sharded_muon.py

Also runs under mpirun, under srun, or alone. Muon makes each matrix's update orthogonal, which needs
the whole matrix: `collectives.sharded.Muon` puts it together on the rank that owns it. Embeddings, head,
norms and biases are stepped by AdamW, as is usual. The same steps are made three times from the same
parameters: by AdamW alone in shards, by Muon and AdamW with DDP, where each rank steps all matrices,
and by Muon and AdamW in shards. The last line on stdout is one JSON object; the exit status is 1 if
the parameters of the last two differ in one bit, or between ranks, or if Muon's loss is not below
AdamW's at the end.
"""

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import jobs
import torch
from char_gpt import GPT, Texts, loss_of
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.sharded import Muon, fully_shard

ADAMW, MUON_DDP, MUON = "AdamW", "Muon, DDP", "Muon"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--steps", type=count, default=150, help="(default: %(default)s)")
    option("--batch-size", type=count, default=8, help="texts a step and rank (default: %(default)s)")
    option("--context", type=count, default=64, help="characters of a text (default: %(default)s)")
    option("--layers", type=count, default=2, help="(default: %(default)s)")
    option("--width", type=count, default=128, help="a multiple of 32, the width of a head (default: %(default)s)")
    option("--learning-rate", type=float, default=4e-3, help="AdamW's, the highest (default: %(default)s)")
    option("--muon-learning-rate", type=float, default=0.02, help="Muon's, the highest (default: %(default)s)")
    option("--limit", type=count, default=1 << 20, help="bytes of text to read (default: %(default)s)")
    option("--held-out", type=count, default=128, help="held-out texts to find the loss of (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the parameters and the texts (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/sharded_muon.png"), help="the plot's file (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.width % 32:
        parser.error(f"--width must be a multiple of 32, not {arguments.width}")
    return arguments


def make_optimizers(way, model, arguments):
    """Return the optimizers of a way, Muon's first; the matrices of the blocks are Muon's."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if "blocks." in name and param.dim() == 2]  # shards keep dim()
    if way == ADAMW:
        matrices = []
    others = [param for _, param in named if all(param is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    options = {"lr": arguments.muon_learning_rate, "weight_decay": 0.1}
    if way == MUON_DDP:
        return [torch.optim.Muon(matrices, **options), adamw]
    if way == MUON:
        return [Muon(matrices, **options), adamw]
    return [adamw]


def train_on(way, initial, texts, arguments, comm):
    """Make all steps in one way; return the losses (mean of the ranks), and what else is reported."""
    model = copy.deepcopy(initial)
    if way == MUON_DDP:
        trained = DistributedDataParallel(model)
        trained.register_comm_hook(None, collectives.fused_allreduce)
    else:
        for block in model.blocks:
            fully_shard(block)
        trained = fully_shard(model)
    optimizers = make_optimizers(way, trained, arguments)
    rates = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, 10 * (1 - step / arguments.steps)))
        for each in optimizers
    ]
    losses, times = torch.empty(arguments.steps, device=comm.device), []
    with jobs.progress(comm, way, arguments.steps) as bar:
        for step in range(arguments.steps):
            loss = loss_of(trained, *texts.of_step(step))
            loss.backward()
            start = time.perf_counter()
            for each in optimizers:
                each.step()
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            times.append((time.perf_counter() - start) * 1e3)
            for rate, each in zip(rates, optimizers, strict=True):
                rate.step()
                each.zero_grad()
            losses[step] = loss.detach()
            bar.update()
    comm.all_reduce(losses, op="avg")
    kept = sum(
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for each in optimizers
        for entries in each.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    )
    found = {
        "loss": texts.validation_loss(model),
        "optimizer_ms": round(statistics.median(times), 2),
        "state_bytes": kept,
        "identical": jobs.identical_on_all_ranks(model),
        "print": jobs.fingerprint(model).hexdigest(),
    }
    jobs.say(
        comm,
        f"{way:>9}  loss {losses[-1].item():.4f}  held out {found['loss']:.4f}  optimizers "
        f"{found['optimizer_ms']:.1f} ms a step  {kept:,} bytes of state on rank 0",
    )
    return losses.tolist(), found


def save_plot(path, losses, results, title):
    """Draw the losses, smoothed, and the time of the optimizers' steps."""
    figure, left, right = jobs.new_figure(title)
    for way, values in losses.items():
        width = max(1, len(values) // 20)
        smooth = torch.tensor(values).unfold(0, width, 1).mean(1).tolist()
        left.plot(range(width, len(values) + 1), smooth, label=way, linewidth=1.2)
    left.set(xlabel="step", ylabel="loss (nats a character)", title=f"Training loss, mean of {width} steps")
    left.legend()
    bars = right.bar(list(results), [one["optimizer_ms"] for one in results.values()])
    right.bar_label(bars, fmt="%.1f")
    right.set(ylabel="ms", title="Optimizers' part of a step (median)")
    jobs.save(figure, path)


def train(arguments, comm):
    """Train in each way in turn; return the result's dictionary, and whether it is a success."""
    torch.manual_seed(arguments.seed)
    texts = Texts(arguments, comm)
    initial = GPT(arguments.layers, arguments.width, arguments.context).to(comm.device)
    parameters = sum(parameter.numel() for parameter in initial.parameters())
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {comm.device}: {parameters:,} parameters, "
        f"{arguments.steps} steps of {comm.size} x {arguments.batch_size} texts of {arguments.context} characters",
    )
    losses, results = {}, {}
    for way in (ADAMW, MUON_DDP, MUON):
        losses[way], results[way] = train_on(way, initial, texts, arguments, comm)
    identical = all(found["identical"] for found in results.values())
    same = results[MUON]["print"] == results[MUON_DDP]["print"]
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "parameters": parameters,
        "identical_parameters": identical,
        "equal_to_ddp": same,
        "loss_first": round(losses[MUON][0], 4),
        "losses": {way: round(found["loss"], 5) for way, found in results.items()},
        "optimizer_ms": {way: found["optimizer_ms"] for way, found in results.items()},
        "state_bytes": {way: found["state_bytes"] for way, found in results.items()},
    }
    if comm.rank == 0:
        save_plot(arguments.plot, losses, results, f"Muon on a GPT of {parameters:,} parameters, {comm.size} ranks")
    return result, identical and same and results[MUON]["loss"] < results[ADAMW]["loss"]


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
