"""Stop a training in the middle and go on with it, with an 8-bit wire and the optimizer in the hook.

    torchrun --nproc-per-node 2 examples/save_and_resume.py
    torchrun --nproc-per-node 2 examples/save_and_resume.py --resume    # later, in new processes

Also runs under mpirun, under srun, or alone. In the middle rank 0 writes the model, the optimizer's
full state (each rank has a part of it) and the schedule, and each rank its HookState, with the
error of its wire that is still to be fed back. Then the training is made to the end, and, from what
was written, once more from the middle in fresh objects: rank 0 reads, all others get from it what
it has read. The last line on stdout is one JSON object; the exit status is 1 if the ranks'
parameters differ, or if a loss is more than 1% from the uninterrupted training's. (A new DDP object
has other buckets in its first backward, in which the wire and the norm are rounded in other places.
With fp32 and without max_norm the parameters would be the same, bit for bit.) On another number of
ranks --resume goes on too, but then the batches are others, and the ranks must only be equal.
"""

import argparse
import io
import json
import os
import sys
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_digits import Batches, build_model, load_data, test_accuracy

import collectives
from collectives.optim import AdamW


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--resume", action="store_true", help="go on from what an earlier run has written to --folder")
    option("--folder", type=Path, default=Path("out/save_and_resume"), help="what is written (default: %(default)s)")
    option("--steps", type=count, default=80, help="(default: %(default)s)")
    option("--batch-size", type=count, default=64, help="images a step, all ranks together (default: %(default)s)")
    option("--hidden", type=count, default=256, help="width of the two hidden layers (default: %(default)s)")
    option("--wire", default="int8", help="what the gradients travel as, with error feedback (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the split, the parameters and the order (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/save_and_resume.png"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps 1 has no middle to stop in")
    if arguments.resume and not (arguments.folder / "end.json").exists():
        parser.error(f"--resume: there is no finished run in {arguments.folder}; make one without --resume first")
    return arguments


class Training:
    """All that goes on from step to step: the model, its optimizer and schedule, and the hook's
    state.

    `saved`: what rank 0 has read, on all ranks; `state`: this rank's HookState. Without them it
    begins.
    """

    def __init__(self, arguments, device, saved=None, state=None):
        torch.manual_seed(arguments.seed if saved is None else 0)  # what is loaded doesn't depend on it
        model = build_model(arguments.hidden).to(device)
        optimizer = AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
        if state is None:
            state = collectives.HookState(wire=arguments.wire, error_feedback=arguments.wire != "fp32", max_norm=1.0)
        state.optimizer = optimizer
        self.step, self.losses = 0, []
        if saved is not None:
            model.load_state_dict(saved["model"])
            state.load_optimizer_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            self.step, self.losses = saved["step"], list(saved["losses"])
        self.state, self.schedule = state, schedule
        self.ddp = DistributedDataParallel(model)
        self.ddp.register_comm_hook(state, collectives.fused_allreduce)

    def train(self, name, until, batches, comm):
        """Train until so many steps have been made."""
        with jobs.progress(comm, name, until - self.step) as bar:
            while self.step < until:
                images, labels = batches[self.step]
                loss = nn.functional.cross_entropy(self.ddp(images), labels)
                loss.backward()  # the optimizer has stepped when it returns
                self.ddp.zero_grad()
                self.schedule.step()
                self.step += 1
                loss = loss.detach().reshape(1)
                comm.all_reduce(loss, op="avg")
                self.losses.append(loss.item())
                bar.set_postfix(loss=f"{self.losses[-1]:.4f}")
                bar.update()
        jobs.say(comm, f"{name:>22}  step {self.step:4d}  loss {self.losses[-1]:.4f}")
        return self

    def save(self, folder, comm):
        """Write what `load` reads. All ranks call it: each has a part of the optimizer's state."""
        full = self.state.optimizer_state_dict()
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"hook_of_rank_{comm.rank}.pt", self.state)
        if comm.rank == 0:
            training = {
                "model": self.ddp.module.state_dict(),
                "optimizer": full,
                "schedule": self.schedule.state_dict(),
                "step": self.step,
                "losses": self.losses,
                "ranks": comm.size,
            }
            write(folder / "training.pt", training)
        dist.barrier()


def write(path, thing):
    """Save so that there is a whole file at any time: the old one or the new one."""
    part = path.with_suffix(".part")
    torch.save(thing, part)
    os.replace(part, path)


def load(folder, comm):
    """Return what rank 0 has read, on all ranks, and this rank's HookState, or None where there was
    no such rank.
    """
    count = torch.zeros(1, dtype=torch.int64, device=comm.device)
    if comm.rank == 0:
        read = torch.frombuffer(bytearray((folder / "training.pt").read_bytes()), dtype=torch.uint8).to(comm.device)
        count[0] = len(read)
    comm.broadcast(count, root=0)
    if comm.rank > 0:
        read = torch.empty(int(count), dtype=torch.uint8, device=comm.device)
    comm.broadcast(read, root=0)
    saved = torch.load(io.BytesIO(read.cpu().numpy().tobytes()), map_location=comm.device)
    own = folder / f"hook_of_rank_{comm.rank}.pt"
    # A pickle can run any program: read none that others may have written.
    return saved, torch.load(own, weights_only=False) if comm.rank < saved["ranks"] else None


def save_plot(path, losses, step, title):
    """Draw the losses, and the distance of the resumed trainings' from the uninterrupted one's."""
    figure, left, right = jobs.new_figure(title)
    whole = losses["uninterrupted"]
    for (name, values), style in zip(losses.items(), ("-", "--", ":"), strict=False):
        first = 0 if values is whole else step
        left.plot(range(first + 1, len(values) + 1), values[first:], style, label=name, linewidth=1.2)
        if values is not whole:
            apart = [abs(a - b) for a, b in zip(values[first:], whole[first:], strict=True)]
            right.plot(range(first + 1, len(values) + 1), apart, style, label=name, linewidth=1.2)
    left.axvline(step, color="gray", linewidth=0.8)
    left.set(xlabel="step", ylabel="loss (mean of the ranks)", yscale="log", title="Training loss")
    left.legend()
    right.set(xlabel="step", ylabel="difference of the losses", title="Distance to the uninterrupted training")
    right.legend()
    jobs.save(figure, path)


def train(arguments, comm):
    """Train, save, resume and compare; return the result, and whether it succeeded."""
    device, folder = torch.device(comm.device), arguments.folder
    train_x, train_y, test_x, test_y = load_data(arguments.seed, device)
    batches = Batches(train_x, train_y, arguments.batch_size, comm.rank, comm.size, arguments.seed)
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {device}, wire {arguments.wire}: {arguments.steps} "
        f"steps of {comm.size} x {batches.share} images",
    )
    end = folder / "end.json"
    if not arguments.resume:
        whole = Training(arguments, device).train("first half", arguments.steps // 2, batches, comm)
        whole.save(folder, comm)
        whole.train("uninterrupted", arguments.steps, batches, comm)
        if comm.rank == 0:
            end.write_text(json.dumps({"losses": whole.losses}))
        dist.barrier()
        del whole
    expected = json.loads(end.read_text())

    saved, state = load(folder, comm)
    at, losses = saved["step"], {"uninterrupted": expected["losses"]}
    resumed = Training(arguments, device, saved, state).train("resumed", len(expected["losses"]), batches, comm)
    losses["resumed"] = resumed.losses
    identical = jobs.identical_on_all_ranks(resumed.ddp.module)
    apart = max(abs(a - b) / b for a, b in zip(resumed.losses, expected["losses"], strict=True))
    accuracy = test_accuracy(resumed.ddp.module, test_x, test_y, comm)
    del resumed
    if not arguments.resume:
        # What the ranks' own states are for: without them the errors of the wire are forgotten.
        without = Training(arguments, device, saved).train("without hook states", arguments.steps, batches, comm)
        losses["without the ranks' states"] = without.losses
        del without

    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "wire": arguments.wire,
        "resumed_at": at,
        "steps": len(expected["losses"]),
        "identical_parameters": identical,
        "losses_apart": apart,
        "loss_last": losses["resumed"][-1],
        "test_accuracy": round(accuracy, 4),
    }
    if "without the ranks' states" in losses:
        result["losses_equal_without_hook_states"] = losses["without the ranks' states"] == losses["resumed"]
    if comm.rank == 0:
        save_plot(arguments.plot, losses, at, f"Stopped at step {at} and resumed, {comm.size} ranks, {arguments.wire}")
    return result, identical and (apart <= 0.01 or comm.size != saved["ranks"])


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
