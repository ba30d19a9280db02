"""Fit z = a x^2 + b y^3 + c on two processes, data parallel, as in MindSpore's first distributed
tutorial.

    mpirun -n 2 python examples/fit_surface.py

Also runs under torchrun, mpiexec, srun, or alone, with no change. Each rank has its part of every
batch, DDP with our hook averages the gradients, and each rank writes a checkpoint of its own,
`rank_R.pt`, which it reads back. The same steps on the same whole batches are then made by one
process, and both are timed: a step of so small a problem takes less time than two processes need to
exchange their gradients, so don't expect two to be faster; with `--batch-size 400000 --points
400000` they are. The last line on stdout is one JSON object; the exit status is 1 if the ranks'
parameters differ, if a checkpoint isn't what was trained, or if a, b and c aren't found, or others
than by one.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives

TRUTH = {"a": 2.0, "b": 3.0, "c": 2.0}
NOISE = 0.03  # standard deviation of what is added to z
TOLERANCE = 0.02  # of a, b and c; what the noise leaves open is about NOISE / sqrt(points) / 0.3, here 0.001
WARM_UP = 5  # steps that aren't timed: the first opens the communicator


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--points", type=count, default=16384, help="in the data set (default: %(default)s)")
    option("--batch-size", type=count, default=2048, help="points a step, all ranks together (default: %(default)s)")
    option("--steps", type=count, default=300, help="(default: %(default)s)")
    option("--learning-rate", type=float, default=0.1, help="(default: %(default)s)")
    option("--seed", type=int, default=1, help="of the points and the parameters (default: %(default)s)")
    option("--folder", type=Path, default=Path("out/fit_surface"), help="of the checkpoints (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/fit_surface.png"), help="(default: %(default)s)")
    return parser.parse_args()


class Surface(nn.Module):
    """z = a x^2 + b y^3 + c, with a, b and c to be found."""

    def __init__(self):
        super().__init__()
        self.fit = nn.Linear(2, 1)

    def forward(self, points):
        return self.fit(torch.stack((points[:, 0] ** 2, points[:, 1] ** 3), dim=1)).squeeze(1)

    def coefficients(self):
        a, b = self.fit.weight[0].tolist()
        return {"a": a, "b": b, "c": self.fit.bias.item()}


def make_data(points, seed, device):
    """Return points (n, 2) in [-1, 1] and their noisy z; the same on all ranks."""
    source = torch.Generator().manual_seed(seed)
    where = 2 * torch.rand(points, 2, generator=source) - 1
    x, y = where.T
    z = TRUTH["a"] * x**2 + TRUTH["b"] * y**3 + TRUTH["c"] + NOISE * torch.randn(points, generator=source)
    return where.to(device), z.to(device)


class Fit:
    """A model that is trained on part `rank` of `size` of every batch."""

    def __init__(self, arguments, device, data, rank, size):
        self.where, self.z = data
        self.rank, self.share = rank, min(arguments.batch_size, len(self.z)) // size
        if self.share == 0:
            raise SystemExit(f"--batch-size {arguments.batch_size} leaves no point for some of the {size} ranks")
        self.batch = self.share * size
        torch.manual_seed(arguments.seed)
        self.surface = self.model = Surface().to(device)
        if size > 1:
            self.model = DistributedDataParallel(self.surface)
            self.model.register_comm_hook(None, collectives.fused_allreduce)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=arguments.learning_rate, momentum=0.9)
        self.losses, self.seconds, self.found = [], [], []

    def train(self, steps, progress):
        with progress as bar:
            for step in range(steps):
                # Batches follow one another through the data, round and round.
                first = step * self.batch % (len(self.z) - self.batch + 1) + self.rank * self.share
                mine = slice(first, first + self.share)
                start = time.perf_counter()
                loss = nn.functional.mse_loss(self.model(self.where[mine]), self.z[mine])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())  # waits for a GPU, too
                self.seconds.append(time.perf_counter() - start)
                self.found.append(self.surface.coefficients())
                bar.update()
        return self

    def step_ms(self):
        timed = self.seconds[WARM_UP:] or self.seconds
        return statistics.median(timed) * 1e3


def save_own(fit, folder, comm):
    """Write this rank's checkpoint and read it back; return whether it holds what was trained."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{comm.rank}.pt"
    state = {"model": fit.surface.state_dict(), "optimizer": fit.optimizer.state_dict()}
    torch.save({**state, "step": len(fit.losses), "rank": comm.rank, "ranks": comm.size}, path)
    # map_location: without it what was saved on a GPU is loaded into that GPU's memory, whoever
    # loads it.
    saved = torch.load(path, map_location=comm.device)
    again = Surface().to(comm.device)
    again.load_state_dict(saved["model"])
    return saved["rank"] == comm.rank and jobs.fingerprint(again).digest() == jobs.fingerprint(fit.surface).digest()


def save_plot(path, fits, title):
    figure, left, right = jobs.new_figure(title)
    for (name, fit), style in zip(fits.items(), ("-", "--"), strict=False):
        left.plot(range(1, len(fit.losses) + 1), fit.losses, style, linewidth=1.2, label=name)
        for letter, color in zip(TRUTH, ("C0", "C1", "C2"), strict=True):
            values = [found[letter] for found in fit.found]
            right.plot(range(1, len(values) + 1), values, style, color=color, linewidth=1.2, label=f"{letter}, {name}")
    for value in TRUTH.values():
        right.axhline(value, color="gray", linewidth=0.6)
    left.set(xlabel="step", ylabel="loss of rank 0's part", yscale="log", title="Training loss")
    left.legend()
    right.set(xlabel="step", title="What is found (gray: the truth)")
    right.legend(fontsize="small")
    jobs.save(figure, path)


def train(arguments, comm):
    """Fit on all ranks, then on one; return the result, and whether it succeeded."""
    device = torch.device(comm.device)
    data = make_data(arguments.points, arguments.seed, device)
    ours = Fit(arguments, device, data, comm.rank, comm.size)
    jobs.say(comm, f"{comm.size} ranks, engine {comm.engine.name}: {arguments.steps} steps of {ours.batch} points")
    ours.train(arguments.steps, jobs.progress(comm, f"{comm.size} ranks", arguments.steps))
    identical = jobs.identical_on_all_ranks(ours.surface)
    saved = torch.tensor([float(save_own(ours, arguments.folder, comm))], device=device)
    comm.all_reduce(saved, op="min")
    step_ms = torch.tensor([ours.step_ms()], device=device)
    comm.all_reduce(step_ms, op="max")

    # Rank 0 makes the same steps alone, with the whole of every batch, while the others wait and
    # compute nothing.
    fits = {f"{comm.size} ranks": ours}
    if comm.rank == 0:
        arguments.batch_size = ours.batch
        alone = Fit(arguments, device, data, 0, 1).train(arguments.steps, jobs.progress(comm, "alone", arguments.steps))
        fits["one process"] = alone
    dist.barrier()

    found = ours.surface.coefficients()
    close = all(abs(found[letter] - true) < TOLERANCE for letter, true in TRUTH.items())
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "identical_parameters": identical,
        "checkpoints_read_back": bool(saved.item()),
        "found": {letter: round(value, 4) for letter, value in found.items()},
        "truth": TRUTH,
        "loss_last": ours.losses[-1],
    }
    if comm.rank == 0:
        result["step_ms"], result["step_ms_one_process"] = round(step_ms.item(), 4), round(alone.step_ms(), 4)
        result["times_as_fast"] = round(result["step_ms_one_process"] / result["step_ms"], 3)
        result["faster"] = result["times_as_fast"] > 1
        other = alone.surface.coefficients()
        result["difference_to_one_process"] = max(abs(found[letter] - other[letter]) for letter in TRUTH)
        jobs.say(
            comm,
            f"a step: {result['step_ms']} ms on {comm.size} rank(s), {result['step_ms_one_process']} ms in one process "
            f"without DDP: {result['times_as_fast']} times as fast",
        )
        fitted = ", ".join(f"{letter} = {value:.3f}" for letter, value in found.items())
        save_plot(arguments.plot, fits, f"z = a x^2 + b y^3 + c on {comm.size} ranks: {fitted}")
        close = close and result["difference_to_one_process"] < 1e-4  # the order in which the squares are summed
    del ours
    return result, identical and close and bool(saved.item())


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
