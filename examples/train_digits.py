"""Train a small convnet on scikit-learn's handwritten digits, with our all-reduce inside torch's
DDP.

    torchrun --nproc-per-node 2 examples/train_digits.py

Also runs under mpirun, under srun, or alone. The same steps are then made on plain DDP over Gloo
from the same initial parameters, and the two are timed in turn. The last line on stdout says what
came out, and ``--json`` names the file of all numbers; the exit status is 1 if the test accuracy is
below the threshold or if the parameters differ between ranks.
"""

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import jobs
import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives

THRESHOLD = 0.95  # lowest test accuracy that counts as a success
# Timing: blocks of steps, ours and Gloo's in turn. The first steps of a block are not counted: DDP
# rebuilds its buckets after the first step of all, and caches still hold the other model.
BLOCK_STEPS, BLOCK_SKIP = 12, 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    count = jobs.at_least_1
    option("--epochs", type=count, default=12, help="passes over the training set (default: %(default)s)")
    option("--steps", type=count, help="stop after so many steps, whatever --epochs says")
    option("--batch-size", type=count, default=64, help="images a step, all ranks together (default: %(default)s)")
    option("--hidden", type=count, default=512, help="width of the two hidden layers (default: %(default)s)")
    option("--blocks", type=count, default=12, help="of 12 timed steps on each, in turn (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the split, the parameters and the order (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/train_digits.png"), help="the plot's file (default: %(default)s)")
    option("--json", type=Path, default=Path("out/train_digits.json"), help="the numbers' file (default: %(default)s)")
    return parser.parse_args()


def load_data(seed, device):
    """Return train images, train labels, test images, test labels: 1,797 pictures of 8 x 8, values
    0 to 1, 80:20.
    """
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None, :, :]
    parts = train_test_split(images, digits.target, test_size=0.2, random_state=seed, stratify=digits.target)
    train_x, test_x, train_y, test_y = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts)
    return train_x, train_y, test_x, test_y


def build_model(hidden):
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model.to(memory_format=torch.channels_last)  # the layout in which the convolutions hand over their gradients


class Batches:
    """The batches of every step: all ranks shuffle in the same order (seed, epoch), and each takes
    an equal share of each batch.
    """

    def __init__(self, images, labels, batch_size, rank, size, seed):
        self.share = min(batch_size, len(images)) // size
        if self.share == 0:
            raise SystemExit(f"--batch-size {batch_size} leaves no image for some of the {size} ranks")
        self.images, self.labels, self.rank, self.size, self.seed = images, labels, rank, size, seed
        self.steps_per_epoch = len(images) // (self.share * size)

    def __getitem__(self, step):
        epoch, index = divmod(step, self.steps_per_epoch)
        order = torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(len(self.images)))
        first = (index * self.size + self.rank) * self.share
        mine = order[first : first + self.share].to(self.images.device)
        return self.images[mine], self.labels[mine]


class Trainer:
    """One DDP model with its optimizer; the hook, if there is one, does the gradient all-reduce."""

    def __init__(self, name, model, hook=None):
        self.name = name
        self.ddp = DistributedDataParallel(model)
        if hook is not None:
            self.ddp.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02, momentum=0.9)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.ddp(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, batches, steps, comm):
        """Make ``steps`` steps; return the loss of each, averaged over the ranks."""
        losses = torch.empty(steps, dtype=torch.float64, device=comm.device)
        since = 0
        with jobs.progress(comm, self.name, steps) as bar:
            for step in range(steps):
                losses[step] = self.step(*batches[step])
                bar.update()
                if (step + 1) % batches.steps_per_epoch == 0 or step + 1 == steps:
                    mean = losses[since : step + 1].mean().reshape(1)
                    comm.all_reduce(mean, op="avg")
                    since = step + 1
                    epoch = step // batches.steps_per_epoch + 1
                    bar.set_postfix(loss=f"{mean.item():.4f}")
                    jobs.say(comm, f"{self.name:>11}  epoch {epoch:3d}  step {step + 1:5d}  loss {mean.item():.4f}")
        comm.all_reduce(losses, op="avg")
        return losses.tolist()


@torch.no_grad()
def test_accuracy(model, images, labels, comm):
    """Return the share of the test images that the model names right; each rank looks at its own
    part of them.
    """
    right = (model(images[comm.rank :: comm.size]).argmax(1) == labels[comm.rank :: comm.size]).sum().reshape(1)
    comm.all_reduce(right)
    return right.item() / len(images)


def time_in_turn(trainers, batches, blocks, device):
    """Return for each trainer the time in ms of every counted step; blocks of steps are made in
    turn.
    """
    times = [[] for _ in trainers]
    for block in range(blocks):
        for turn in range(len(trainers)):
            which = (turn + block) % len(trainers)  # who goes first changes from block to block
            dist.barrier()
            for index in range(BLOCK_STEPS):
                images, labels = batches[block * BLOCK_STEPS + index]
                start = time.perf_counter()
                trainers[which].step(images, labels)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if index >= BLOCK_SKIP:
                    times[which].append((time.perf_counter() - start) * 1e3)
    return times


def save_plot(path, losses, times, title):
    """Draw the loss of each step and the spread of the step times."""
    figure, left, right = jobs.new_figure(title)
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        left.plot(range(1, len(values) + 1), values, style, label=name, linewidth=1.2)
    left.set(xlabel="step", ylabel="loss (mean of the ranks)", yscale="log", title="Training loss")
    left.legend()
    for name, values in times.items():
        ordered = sorted(values)
        share = [(index + 1) / len(ordered) for index in range(len(ordered))]
        right.plot(ordered, share, label=f"{name}: median {statistics.median(values):.2f} ms")
    right.set(xlabel="time of one step (ms)", ylabel="share of steps that took no longer", title="Step times, in turn")
    right.legend()
    jobs.save(figure, path)


def train(arguments, comm):
    """Train both ways, time both; return the result's dictionary, and whether it succeeded."""
    torch.manual_seed(arguments.seed)
    device = torch.device(comm.device)
    train_x, train_y, test_x, test_y = load_data(arguments.seed, device)
    batches = Batches(train_x, train_y, arguments.batch_size, comm.rank, comm.size, arguments.seed)
    steps = arguments.steps or arguments.epochs * batches.steps_per_epoch
    initial = build_model(arguments.hidden).to(device)
    parameters = sum(parameter.numel() for parameter in initial.parameters())
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {device}: {len(train_x)} training and {len(test_x)} "
        f"test images, {parameters:,} parameters, {steps} steps of {comm.size} x {batches.share} images",
    )

    ours = Trainer("collectives", copy.deepcopy(initial), collectives.fused_allreduce)
    ours_losses = ours.train(batches, steps, comm)
    accuracy = test_accuracy(ours.ddp.module, test_x, test_y, comm)
    identical = jobs.identical_on_all_ranks(ours.ddp.module)
    fingerprint = jobs.fingerprint(ours.ddp.module).hexdigest()  # now: the timing goes on training

    gloo = Trainer("gloo", copy.deepcopy(initial))
    gloo_losses = gloo.train(batches, steps, comm)
    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(ours.ddp.module.parameters(), gloo.ddp.module.parameters(), strict=True)
    )

    ours_ms, gloo_ms = time_in_turn((ours, gloo), batches, arguments.blocks, device)
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "test_accuracy": round(accuracy, 4),
        "identical_parameters": identical,
        "step_ms_gloo": round(statistics.median(gloo_ms), 3),
        "step_ms_collectives": round(statistics.median(ours_ms), 3),
        "loss_first": round(ours_losses[0], 4),
        "loss_last": round(ours_losses[-1], 4),
        "max_difference_to_gloo": difference,
        "parameters_sha256": fingerprint,
    }
    if comm.rank == 0:
        save_plot(
            arguments.plot,
            {"collectives": ours_losses, "gloo": gloo_losses},
            {"collectives": ours_ms, "gloo": gloo_ms},
            f"Handwritten digits, {comm.size} ranks, engine {comm.engine.name}, test accuracy {accuracy:.3f}",
        )
    return result, identical and accuracy >= THRESHOLD


def describe(result):
    """Return what came out, in two sentences."""
    accuracy, same = result["test_accuracy"], result["identical_parameters"]
    learned = f"The test accuracy is {accuracy:.1%}" + ("" if accuracy >= THRESHOLD else f", below {THRESHOLD:.0%}")
    parameters = "the parameters are the same on all ranks" if same else "THE RANKS' PARAMETERS DIFFER"
    gloo, ours = result["step_ms_gloo"], result["step_ms_collectives"]
    times = f"{gloo:.1f} ms a step on Gloo, {ours:.1f} with collectives: {gloo / ours:.1f} times as fast"
    return f"{learned}, and {parameters}. {times}."


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments(), describe=describe))
