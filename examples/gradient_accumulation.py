"""Train with a batch too large for one forward: micro-batches under no_sync(), and one all-reduce
for all of them.

    torchrun --nproc-per-node 2 examples/gradient_accumulation.py

Also runs under mpirun, under srun, or alone. The learning rate is scaled with the batch, after a
warm-up (Goyal et al., Accurate, Large Minibatch SGD, 2017), and the hook clips the gradient of the
whole batch. In every step the gradient is compared with that of one backward over the whole batch;
and one step is made that synchronises after each of its k micro-batches, to count the bytes. The
last line on stdout is one JSON object; the exit status is 1 if the test accuracy is below the
threshold, if the parameters differ between ranks, if the gradients differ by more than rounding, or
if an accumulated step sends more than 1/k of the bytes.
"""

import argparse
import contextlib
import copy
import sys
from pathlib import Path

import jobs
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_digits import build_model, load_data, test_accuracy

import collectives

THRESHOLD = 0.95  # lowest test accuracy that counts as a success
BASE_RATE, BASE_BATCH = 0.02, 64  # learning rate, and the number of images a step, all ranks together, that it is for
MAX_NORM = 1.0
# By parts a gradient is summed in another order, which in fp32 changes some 1e-7 of what is summed:
# more of the sum itself towards the end, when the images' gradients nearly cancel.
TOLERANCE = 1e-5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--steps", type=count, default=40, help="optimizer steps (default: %(default)s)")
    option("--batch-size", type=count, default=512, help="images a step and rank (default: %(default)s)")
    option("--micro-batches", type=count, default=8, help="k: parts of it, one forward each (default: %(default)s)")
    option("--warm-up", type=count, default=5, help="steps until the full learning rate (default: %(default)s)")
    option("--hidden", type=count, default=256, help="width of the two hidden layers (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the split, the parameters and the order (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/gradient_accumulation.png"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.batch_size % arguments.micro_batches:
        parser.error(f"--batch-size {arguments.batch_size} can't be split into {arguments.micro_batches} equal parts")
    return arguments


class Accumulation:
    """One DDP model with its hook, whose gradient is that of `micro_batches` forwards and
    backwards.
    """

    def __init__(self, model, micro_batches):
        self.micro_batches = micro_batches
        self.state = collectives.HookState(max_norm=MAX_NORM)
        self.ddp = DistributedDataParallel(model)
        self.ddp.register_comm_hook(self.state, collectives.fused_allreduce)

    def backward(self, images, labels, sync="last"):
        """Leave the gradient of the whole batch, averaged over all ranks and clipped; return this
        rank's loss.

        `sync`: after the "last" micro-batch, or after "all", as DDP does with no no_sync().
        """
        self.ddp.zero_grad()
        total = torch.zeros((), device=images.device)
        parts = zip(images.chunk(self.micro_batches), labels.chunk(self.micro_batches), strict=True)
        for number, (some, their_labels) in enumerate(parts, 1):
            last = number == self.micro_batches
            with contextlib.nullcontext() if last or sync == "all" else self.ddp.no_sync():
                loss = nn.functional.cross_entropy(self.ddp(some), their_labels) / self.micro_batches
                loss.backward()
            total += loss.detach()
        return total

    def gradient(self):
        return torch.cat([parameter.grad.flatten() for parameter in self.ddp.parameters()])


def save_plot(path, losses, rates, sent, title):
    """Draw the loss and the learning rate of each step, and the bytes that it sends both ways."""
    figure, left, right = jobs.new_figure(title)
    left.plot(range(1, len(losses) + 1), losses, linewidth=1.2)
    left.set(xlabel="step", ylabel="loss (mean of the ranks)", yscale="log", title="Training loss")
    rate = left.twinx()
    rate.plot(range(1, len(rates) + 1), rates, ":", color="gray")
    rate.set(ylabel="learning rate (dotted)", ylim=(0, None))
    bars = right.bar(list(sent), [nbytes / 2**20 for nbytes in sent.values()])
    right.bar_label(bars, fmt="%.2f")
    right.set(ylabel="MiB sent by a rank in a step", title="Bytes on the wire")
    jobs.save(figure, path)


def train(arguments, comm):
    """Train, compare and count; return the result's dictionary, and whether it succeeded."""
    torch.manual_seed(arguments.seed)
    device = torch.device(comm.device)
    train_x, train_y, test_x, test_y = load_data(arguments.seed, device)
    micro_batches, per_rank = arguments.micro_batches, arguments.batch_size
    if per_rank > len(train_x):
        raise SystemExit(f"--batch-size {per_rank} is more than the {len(train_x)} training images")
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {device}: {arguments.steps} steps of {comm.size} x "
        f"{per_rank} images, in {micro_batches} micro-batches of {per_rank // micro_batches} a rank",
    )

    def batch(step):
        """The images and labels of this rank in a step, drawn anew for each."""
        mine = np.random.default_rng([arguments.seed, step, comm.rank]).choice(len(train_x), per_rank, replace=False)
        mine = torch.from_numpy(mine).to(device)
        return train_x[mine], train_y[mine]

    initial = build_model(arguments.hidden).to(device)
    ours, at_once = Accumulation(initial, micro_batches), Accumulation(copy.deepcopy(initial), 1)
    rate = BASE_RATE * per_rank * comm.size / BASE_BATCH
    optimizer = torch.optim.SGD(ours.ddp.parameters(), lr=rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / arguments.warm_up))
    losses, rates, clipped, difference = [], [], 0, 0.0
    with jobs.progress(comm, "training", arguments.steps) as bar:
        for step in range(arguments.steps):
            images, labels = batch(step)
            loss = ours.backward(images, labels).reshape(1)
            norm = ours.state.grad_norm  # of the whole batch, before it was clipped
            at_once.ddp.load_state_dict(ours.ddp.state_dict())
            at_once.backward(images, labels)
            whole = at_once.gradient()
            difference = max(difference, ((ours.gradient() - whole).norm() / whole.norm()).item())
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            comm.all_reduce(loss, op="avg")
            losses.append(loss.item())
            clipped += norm > MAX_NORM
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
            bar.update()
            if (step + 1) % 10 == 0 or step + 1 == arguments.steps:
                line = f"step {step + 1:3d}  loss {losses[-1]:.4f}  norm {norm:6.3f}  learning rate {rates[-1]:.3f}"
                jobs.say(comm, f"{line}  difference {difference:.1e}")

    sent = ours.state.bytes_on_wire
    before = ours.state.stats()["bytes_on_wire"]
    ours.backward(*batch(0), sync="all")
    sent_by_all = ours.state.stats()["bytes_on_wire"] - before
    accuracy = test_accuracy(ours.ddp.module, test_x, test_y, comm)
    identical = jobs.identical_on_all_ranks(ours.ddp.module)
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "images_a_step": per_rank * comm.size,
        "micro_batches": micro_batches,
        "learning_rate": rates[-1],
        "test_accuracy": round(accuracy, 4),
        "identical_parameters": identical,
        "gradient_difference": difference,
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "steps_clipped": clipped,
        "bytes_a_step": sent,
        "bytes_a_step_without_no_sync": sent_by_all,
    }
    if comm.rank == 0:
        save_plot(
            arguments.plot,
            losses,
            rates,
            {f"one sync for all {micro_batches}\n(no_sync)": sent, "a sync for each\nmicro-batch": sent_by_all},
            f"Digits, {per_rank * comm.size} images a step on {comm.size} ranks, test accuracy {accuracy:.3f}",
        )
    counted = sent_by_all == micro_batches * sent
    return result, identical and counted and difference <= TOLERANCE and accuracy >= THRESHOLD


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
