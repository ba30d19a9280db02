"""Train a deep GPT whose blocks keep only their inputs, with the optimizer's step inside of the
backward.

    torchrun --nproc-per-node 2 examples/activation_checkpointing.py
    torchrun --nproc-per-node 2 examples/activation_checkpointing.py --only plain   # and checkpointed: the peak memory

Also runs under mpirun, under srun, or alone. Each block goes through torch.utils.checkpoint: its
activations are dropped after the forward, and computed again when the backward comes to it.
Meanwhile the hook steps the optimizer for the blocks after it, each rank its part of the
parameters. The same steps are made with all activations kept, from the same initial parameters;
gradients and parameters must be equal bit for bit. The bytes that autograd saves in a forward are
counted; with --only one of the two is trained, and the growth of the process's memory at its peak
is reported (glibc's malloc keeps much of what is freed, but not with MALLOC_MMAP_THRESHOLD_=65536).
The last line on stdout is one JSON object; the exit status is 1 if the two trainings or the ranks'
parameters differ, or if no memory is saved.
"""

import argparse
import contextlib
import copy
import importlib
import resource
import sys
import time
from pathlib import Path

import jobs
import torch
from char_gpt import loss_of, prepare
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import collectives
from collectives.optim import AdamW

WAYS = ("checkpointed", "plain")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--only", choices=WAYS, help="train one way alone, for its peak memory")
    option("--steps", type=count, default=20, help="(default: %(default)s)")
    option("--batch-size", type=count, default=8, help="texts a step and rank (default: %(default)s)")
    option("--context", type=count, default=64, help="characters of a text (default: %(default)s)")
    option("--layers", type=count, default=8, help="(default: %(default)s)")
    option("--width", type=count, default=128, help="a multiple of 32, the width of a head (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the parameters and the texts (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/activation_checkpointing.png"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.width % 32:
        parser.error(f"--width must be a multiple of 32, not {arguments.width}")
    arguments.limit, arguments.held_out = 1 << 18, 32  # bytes of text to read, and held-out texts
    return arguments


class Checkpointed(nn.Module):
    """A block of which the backward has only the input, and computes the rest again."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Saved:
    """Counts what autograd saves in a forward: the bytes of each memory once, those of the
    parameters left out.
    """

    def __init__(self, model):
        self.known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.found = {}

    def counting(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.found[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def nbytes(self):
        return sum(self.found.values())


def train_by(way, initial, texts, arguments, comm):
    """Make all steps one way; return the model, its first gradient's norm, losses, bytes saved and
    seconds.
    """
    model = copy.deepcopy(initial)
    if way == "checkpointed":
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    # Steps each bucket's parameters as soon as it is reduced: no optimizer.step() is to be called.
    state = collectives.HookState(optimizer=AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(state, collectives.fused_allreduce)
    saved = Saved(model)
    losses, seconds = torch.empty(arguments.steps, device=comm.device), 0.0
    with jobs.progress(comm, way, arguments.steps) as bar:
        for step in range(arguments.steps):
            start = time.perf_counter()
            with saved.counting() if step == 0 else contextlib.nullcontext():
                loss = loss_of(ddp, *texts.of_step(step))
            loss.backward()
            ddp.zero_grad()
            losses[step] = loss.detach()
            if step > 0:  # the first builds much
                seconds += time.perf_counter() - start
            bar.set_postfix(loss=f"{loss.item():.3f}")
            bar.update()
    comm.all_reduce(losses, op="avg")
    found = {
        "loss_last": round(losses[-1].item(), 4),
        "saved_bytes": saved.nbytes,
        "step_ms": round(seconds / max(1, arguments.steps - 1) * 1e3, 2),
        # AdamW keeps two numbers for each parameter; a rank, in the hook, those of its part alone.
        "optimizer_share": round(
            sum(values[key].numel() for values in state.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
            / sum(2 * parameter.numel() for parameter in model.parameters()),
            4,
        ),
    }
    mib = found["saved_bytes"] / 2**20
    jobs.say(comm, f"{way:>12}  loss {found['loss_last']:.4f}  {mib:.2f} MiB saved  {found['step_ms']:.1f} ms a step")
    return model, losses.tolist(), found


def gradients(initial, way, texts):
    """Return the gradients of this rank's first texts, with no DDP."""
    model = copy.deepcopy(initial)
    if way == "checkpointed":
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    loss_of(model, *texts.of_step(0)).backward()
    return [parameter.grad for parameter in model.parameters()]


def save_plot(path, losses, results, title):
    """Draw the losses, and what is kept for the backward."""
    figure, left, right = jobs.new_figure(title)
    for (way, values), style in zip(losses.items(), ("-", "--"), strict=False):
        left.plot(range(1, len(values) + 1), values, style, label=way, linewidth=1.2)
    left.set(xlabel="step", ylabel="loss (mean of the ranks)", title="Training loss")
    left.legend()
    names = [f"{way}\n{found['step_ms']:.0f} ms a step" for way, found in results.items()]
    bars = right.bar(names, [found["saved_bytes"] / 2**20 for found in results.values()])
    right.bar_label(bars, fmt="%.2f")
    right.set(ylabel="MiB saved for the backward", title="Activations")
    jobs.save(figure, path)


def train(arguments, comm):
    """Train both ways, or one; return the result's dictionary, and whether it succeeded."""
    texts, initial, parameters = prepare(arguments, comm)
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {comm.device}: {arguments.layers} layers, "
        f"{parameters:,} parameters, {arguments.steps} steps of {comm.size} x {arguments.batch_size} texts of "
        f"{arguments.context} characters",
    )
    if arguments.only:
        importlib.import_module("torch._dynamo")  # some 100 MiB, which come with the first checkpoint or optimizer
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    models, losses, results = {}, {}, {}
    for way in [arguments.only] if arguments.only else WAYS:
        models[way], losses[way], results[way] = train_by(way, initial, texts, arguments, comm)
    identical = all([jobs.identical_on_all_ranks(model) for model in models.values()])
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "parameters": parameters,
        "identical_parameters": identical,
        "loss_first": round(losses[arguments.only or "plain"][0], 4),
        **{key: {way: found[key] for way, found in results.items()} for key in results[arguments.only or "plain"]},
    }
    passed = identical
    if arguments.only:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result["peak_growth_mib"] = round((peak - resident) / 2**20, 1)
    else:
        both = [gradients(initial, way, texts) for way in WAYS]
        result["equal_gradients"] = all(torch.equal(a, b) for a, b in zip(*both, strict=True))
        both = [models[way].parameters() for way in WAYS]
        result["equal_parameters"] = all(torch.equal(a, b) for a, b in zip(*both, strict=True))
        result["saved_ratio"] = round(results["checkpointed"]["saved_bytes"] / results["plain"]["saved_bytes"], 4)
        passed = passed and result["equal_gradients"] and result["equal_parameters"] and result["saved_ratio"] < 1
    if comm.rank == 0:
        save_plot(arguments.plot, losses, results, f"{arguments.layers} layers, {parameters:,} parameters")
    return result, passed


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
