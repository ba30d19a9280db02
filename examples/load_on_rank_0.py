"""Go on with DDP from a checkpoint that rank 0 alone can read: weights and Adam's state are sent to
all others.

    torchrun --nproc-per-node 2 examples/load_on_rank_0.py

Also runs under mpirun, under srun, or alone. First a training is made to its end, and in its middle
rank 0 writes a checkpoint. Then every rank builds its model and optimizer anew, from other random
numbers on each; rank 0 loads. The weights reach the others by DDP's constructor, which broadcasts
rank 0's; the optimizer's state by `broadcast_optimizer_state` below, since DDP doesn't know of
optimizers: forgotten, the ranks drift apart without a word, which is tried as well. At the end rank
0 saves. The last line on stdout is one JSON object; the exit status is 1 if the ranks' parameters
differ or aren't those of the training that was not interrupted, bit for bit. (Where the wire and
the optimizer's parts have state of their own: examples/save_and_resume.py.)
"""

import argparse
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


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--folder", type=Path, default=Path("out/load_on_rank_0"), help="what is written (default: %(default)s)")
    option("--steps", type=count, default=60, help="(default: %(default)s)")
    option("--batch-size", type=count, default=64, help="images a step, all ranks together (default: %(default)s)")
    option("--hidden", type=count, default=128, help="width of the two hidden layers (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the split, the parameters and the order (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/load_on_rank_0.png"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps 1 has no middle to save in")
    return arguments


def broadcast_optimizer_state(optimizer, comm):
    """Give all ranks the optimizer state of rank 0; the others' is replaced, and may be empty.

    Shapes, dtypes, options and single numbers (Adam's step count) travel as one Python object, then
    the tensors, one after the other, each into the memory where it stays. All ranks must call it.
    """
    full = optimizer.state_dict()
    outline = {}
    for number, entry in full["state"].items():
        outline[number] = {
            name: (value.shape, value.dtype) if torch.is_tensor(value) and value.dim() > 0 else value
            for name, value in entry.items()
        }
    received = [(outline, full["param_groups"])]
    dist.broadcast_object_list(received, src=0)
    outline, groups = received[0]
    state = {}
    for number, entry in outline.items():
        state[number] = {}
        for name, value in entry.items():
            if isinstance(value, tuple):
                shape, dtype = value
                if comm.rank == 0:
                    tensor = full["state"][number][name]
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=comm.device)
                value = tensor.contiguous()  # moments of channels_last weights aren't; to Adam their order is nothing
                comm.broadcast(value, root=0)
            state[number][name] = value
    if comm.rank > 0:
        optimizer.load_state_dict({"state": state, "param_groups": groups})


class Training:
    """A DDP model with our hook, its Adam, and what it has come to."""

    def __init__(self, arguments, comm, path=None, send_state=True):
        # Beginning, all ranks draw the same numbers. Going on, each draws others: what they have in
        # common was sent.
        torch.manual_seed(arguments.seed if path is None else 1000 + comm.rank)
        model = build_model(arguments.hidden).to(comm.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        self.step, self.losses, self.apart = 0, [], []
        if path is not None:
            if comm.rank == 0:
                # map_location: what was saved on a GPU would be loaded into that GPU's memory,
                # whoever loads it.
                saved = torch.load(path, map_location=comm.device)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                self.step = saved["step"]
            step = torch.tensor([self.step], device=comm.device)
            comm.broadcast(step, root=0)
            self.step = int(step)
            if send_state:
                broadcast_optimizer_state(optimizer, comm)
        self.ddp = DistributedDataParallel(model)  # rank 0's weights, on all ranks
        self.ddp.register_comm_hook(None, collectives.fused_allreduce)
        self.optimizer = optimizer

    def train(self, name, until, batches, comm):
        """Train until so many steps have been made; keep the mean loss, and how far the ranks'
        weights are apart.
        """
        with jobs.progress(comm, name, until - self.step) as bar:
            while self.step < until:
                images, labels = batches[self.step]
                loss = nn.functional.cross_entropy(self.ddp(images), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                loss = loss.detach().reshape(1)
                comm.all_reduce(loss, op="avg")
                self.losses.append(loss.item())
                self.apart.append(self.distance(comm))
                bar.update()
        jobs.say(comm, f"{name:>16}  step {self.step:4d}  loss {self.losses[-1]:.4f}")
        return self

    def distance(self, comm):
        """Return the largest difference of any weight from rank 0's, on any rank."""
        mine = torch.cat([parameter.detach().reshape(-1) for parameter in self.ddp.parameters()])
        first = mine.clone()
        comm.broadcast(first, root=0)
        most = (mine - first).abs().max().reshape(1)
        comm.all_reduce(most, op="max")
        return most.item()

    def save(self, path, comm):
        """Write the checkpoint, on rank 0: a whole file at any time, the old one or the new one."""
        if comm.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "step": self.step}, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)


def save_plot(path, trainings, middle, title):
    figure, left, right = jobs.new_figure(title)
    for (name, training), style in zip(trainings.items(), ("-", "--", ":"), strict=True):
        first = training.step - len(training.losses)
        steps = range(first + 1, training.step + 1)
        left.plot(steps, training.losses, style, label=name, linewidth=1.2)
        right.plot(steps, training.apart, style, label=name, linewidth=1.2)
    left.axvline(middle, color="gray", linewidth=0.8)
    left.set(xlabel="step", ylabel="loss (mean of the ranks)", yscale="log", title="Training loss")
    left.legend()
    right.set(xlabel="step", ylabel="largest difference from rank 0's weights", title="How far the ranks are apart")
    right.legend()
    jobs.save(figure, path)


def train(arguments, comm):
    """Train, save and load on rank 0, send, train on; return the result's dictionary, and whether
    it is a success.
    """
    device = torch.device(comm.device)
    train_x, train_y, test_x, test_y = load_data(arguments.seed, device)
    batches = Batches(train_x, train_y, arguments.batch_size, comm.rank, comm.size, arguments.seed)
    middle, end = arguments.folder / "middle.pt", arguments.folder / "end.pt"
    whole = Training(arguments, comm).train("first half", arguments.steps // 2, batches, comm)
    whole.save(middle, comm)
    whole.train("uninterrupted", arguments.steps, batches, comm)

    loaded = Training(arguments, comm, middle)
    at = loaded.step
    loaded.train("loaded", arguments.steps, batches, comm)
    loaded.save(end, comm)
    forgotten = Training(arguments, comm, middle, send_state=False)
    forgotten.train("state not sent", arguments.steps, batches, comm)

    identical = jobs.identical_on_all_ranks(loaded.ddp.module)
    bit_for_bit = jobs.fingerprint(loaded.ddp.module).digest() == jobs.fingerprint(whole.ddp.module).digest()
    accuracy = test_accuracy(loaded.ddp.module, test_x, test_y, comm)
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "loaded_at": at,
        "steps": loaded.step,
        "identical_parameters": identical,
        "bit_for_bit": bit_for_bit,
        "identical_without_sending": jobs.identical_on_all_ranks(forgotten.ddp.module),
        "loss_last": loaded.losses[-1],
        "test_accuracy": round(accuracy, 4),
    }
    trainings = {"uninterrupted": whole, "loaded on rank 0": loaded, "Adam's state not sent": forgotten}
    if comm.rank == 0:
        save_plot(arguments.plot, trainings, at, f"Loaded on rank 0 of {comm.size} at step {at}")
    return result, identical and bit_for_bit


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
