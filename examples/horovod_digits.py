"""Train on handwritten digits as a Horovod program does, step by step, through collectives.horovod.

    torchrun --nproc-per-node 2 examples/horovod_digits.py
    torchrun --nproc-per-node 2 examples/horovod_digits.py --epochs 8 --resume    # later, in new processes

Also runs under mpirun, under srun, or alone. The steps of Horovod's guide are numbered below: a
program that has them changes one line, ``import horovod.torch as hvd``. Rank 0 alone writes a
checkpoint after each epoch, and with --resume reads it; all others get from it what it has read.
Each training, resumed ones too, is made again from the beginning on DDP with our hook. The last
line on stdout is one JSON object; the exit status is 1 if the test accuracy is below the threshold,
if the ranks' parameters differ, or if on up to 2 ranks losses and parameters aren't DDP's, bit for
bit.
"""

import argparse
import copy
import os
import sys
import time
from pathlib import Path

import jobs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from train_digits import build_model, load_data

import collectives
import collectives.horovod as hvd

THRESHOLD = 0.9  # lowest test accuracy that counts as a success
OPTIMIZERS = {  # class, learning rate of one rank, options
    "sgd": (torch.optim.SGD, 0.01, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, 5e-4, {}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--epochs", type=count, default=6, help="passes over the training set (default: %(default)s)")
    option("--resume", action="store_true", help="go on from the checkpoints in --folder")
    option("--folder", type=Path, default=Path("out/horovod_digits"), help="checkpoints (default: %(default)s)")
    option("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="default: both")
    option("--batch-size", type=count, default=32, help="images a rank and step (default: %(default)s)")
    option("--hidden", type=count, default=256, help="width of the two hidden layers (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the split, the parameters and the order (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/horovod_digits.png"), help="(default: %(default)s)")
    return parser.parse_args()


def train_with_horovod(name, arguments, data, comm):
    """Make one training; return the model, the loss of each step here, the times of the steps in
    ms, the step at which it began, and whether as many ranks as now have made those before it.
    """
    # 1. Initialise. The communicator that the other examples use is open already: these are its
    # ranks.
    hvd.init()
    # 2. Pin a GPU, where there is one, by the rank on this node.
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device(comm.device)
    # 3. Scale the learning rate by the number of ranks, as so many more images make a step.
    kind, rate, options = OPTIMIZERS[name]
    torch.manual_seed(arguments.seed + hvd.rank())  # each rank begins elsewhere: see 5
    model = build_model(arguments.hidden).to(device)
    optimizer = kind(model.parameters(), lr=rate * hvd.size(), **options)
    # 4. Wrap the optimizer.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # 5. Give all ranks what rank 0 has: fresh parameters, or those of a checkpoint that it alone
    # has read.
    path = arguments.folder / f"{name}.pt"
    begun, ranks, losses = 0, hvd.size(), []
    if hvd.rank() == 0:
        torch.manual_seed(arguments.seed)
        model.load_state_dict(build_model(arguments.hidden).state_dict())
        if arguments.resume:
            saved = torch.load(path, map_location=device, weights_only=True)  # not to the GPU that it was saved from
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            begun, ranks = saved["epochs"], saved["ranks"]
    begun, ranks = hvd.broadcast(torch.tensor([begun, ranks]), root_rank=0, name="resumed").tolist()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # 6. Let each rank have its share of the data.
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=arguments.seed)
    loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler)
    times = []
    with jobs.progress(comm, f"hvd, {name}", (arguments.epochs - begun) * len(loader)) as bar:
        for epoch in range(begun, arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                start = time.perf_counter()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                times.append((time.perf_counter() - start) * 1e3)
                bar.update()
            mean = hvd.allreduce(torch.tensor(sum(losses[-len(loader) :]) / len(loader)), name="loss").item()
            jobs.say(comm, f"hvd, {name:>5}  epoch {epoch + 1:3d}  loss {mean:.4f}")
            # 7. Write checkpoints on rank 0 only, so that no other rank writes over them.
            if hvd.rank() == 0:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(path, {**states, "epochs": epoch + 1, "ranks": hvd.size()})
    hvd.shutdown()
    return model, losses, times, begun * len(loader), ranks == comm.size


def save(path, thing):
    """Write so that there is a whole file at any time: the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(thing, part)
    os.replace(part, path)


def train_with_ddp(name, arguments, data, comm):
    """Make the same training on DDP with our hook, never interrupted; return the model and the loss
    of each step.
    """
    torch.manual_seed(arguments.seed)
    ddp = collectives.DistributedDataParallel(build_model(arguments.hidden).to(comm.device))
    ddp.register_comm_hook(collectives.fused_allreduce)
    kind, rate, options = OPTIMIZERS[name]
    optimizer = kind(ddp.parameters(), lr=rate * comm.size, **options)
    sampler = DistributedSampler(data, num_replicas=comm.size, rank=comm.rank, seed=arguments.seed)
    loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler)
    losses = []
    with jobs.progress(comm, f"DDP, {name}", arguments.epochs * len(loader)) as bar:
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                bar.update()
    return copy.deepcopy(ddp.module), losses


@torch.no_grad()
def test_accuracy(model, images, labels, comm):
    """Return the share of the test images that the model names right; each rank looks at its own
    part of them.
    """
    right = (model(images[comm.rank :: comm.size]).argmax(1) == labels[comm.rank :: comm.size]).sum().reshape(1)
    comm.all_reduce(right)
    return right.item() / len(images)


def train(arguments, comm):
    """Train with each optimizer both ways; return the result, and whether it succeeded."""
    there = all((arguments.folder / f"{name}.pt").exists() for name in arguments.optimizers)
    there = torch.tensor([float(there)], device=comm.device)
    comm.broadcast(there, root=0)  # only rank 0 needs the files
    if arguments.resume and not there.item():
        raise SystemExit(f"--resume: there are no checkpoints in {arguments.folder}; train without --resume first")
    train_x, train_y, test_x, test_y = load_data(arguments.seed, torch.device(comm.device))
    data = TensorDataset(train_x, train_y)
    result = {"ranks": comm.size, "engine": comm.engine.name, "resumed_at_step": 0}
    for field in ("identical", "test_accuracy", "equal_to_ddp", "loss_first", "loss_last", "step_ms"):
        result[field] = {}
    curves, passed = {}, True
    for name in arguments.optimizers:
        model, losses, times, begun, as_many = train_with_horovod(name, arguments, data, comm)
        reference, whole = train_with_ddp(name, arguments, data, comm)
        same = jobs.fingerprint(model).digest() == jobs.fingerprint(reference).digest() and losses == whole[begun:]
        everywhere = torch.tensor([float(same)], device=comm.device)
        comm.all_reduce(everywhere, op="min")
        result["resumed_at_step"] = begun
        result["identical"][name] = jobs.identical_on_all_ranks(model)
        result["test_accuracy"][name] = round(test_accuracy(model, test_x, test_y, comm), 4)
        result["equal_to_ddp"][name] = bool(everywhere.item())
        result["loss_first"][name], result["loss_last"][name] = round(whole[0], 4), round(whole[-1], 4)
        result["step_ms"][name] = round(sorted(times)[len(times) // 2], 3) if times else None
        curves[name] = begun, losses, whole
        passed = passed and result["identical"][name] and result["test_accuracy"][name] >= THRESHOLD
        # The sums of more ranks have other orders, and another number of ranks made other batches.
        passed = passed and (result["equal_to_ddp"][name] or comm.size > 2 or not as_many)
    result["identical_parameters"] = all(result.pop("identical").values())
    if comm.rank == 0:
        save_plot(arguments.plot, curves, f"Handwritten digits through collectives.horovod, {comm.size} ranks")
    return result, passed


def save_plot(path, curves, title):
    """Draw rank 0's losses of both ways, and how far apart they are."""
    figure, left, right = jobs.new_figure(title)
    for name, (begun, losses, whole) in curves.items():
        left.plot(range(1, len(whole) + 1), whole, label=f"DDP with our hook, {name}", linewidth=2, alpha=0.5)
        steps = range(begun + 1, begun + len(losses) + 1)
        left.plot(steps, losses, "--", label=f"hvd, {name}", linewidth=1)
        right.plot(steps, [abs(a - b) for a, b in zip(losses, whole[begun:], strict=True)], label=name)
    left.set(xlabel="step", ylabel="loss (rank 0)", yscale="log", title="Training loss")
    right.set(xlabel="step", ylabel="difference of the losses", title="hvd against DDP")
    left.legend(fontsize="small")
    right.legend()
    jobs.save(figure, path)


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
