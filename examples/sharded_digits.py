"""Train the convnet of PyTorch's FSDP tutorial on the handwritten digits: DDP, and sharded in three ways, side by side.

    torchrun --nproc-per-node 2 examples/sharded_digits.py

Also runs under mpirun, under srun, or alone. Sharded as one unit, by the tutorial's wrap policy, and
with CPU offload; the same steps from the same parameters as DDP with our hook. Prints the step time
of each and its memory above that of an idle rank; the plot compares this with the bytes of
parameters, gradients and Adam's two moments alone. The last line on stdout is one JSON object; the
exit status is 1 if a test accuracy is below the threshold, if the parameters differ between ranks,
or from DDP's in one bit. Offloaded from a GPU they may differ from DDP's: Adam rounds in another way
on the host.
"""

import argparse
import copy
import ctypes
import functools
import gc
import statistics
import sys
import time
import warnings
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from train_digits import Batches, load_data, test_accuracy

import collectives
from collectives.sharded import CPUOffload, ShardedDataParallel
from collectives.sharded.wrap import size_based_auto_wrap_policy

THRESHOLD = 0.9  # lowest test accuracy that counts as a success
LEAST = 20_000  # elements of a unit, as in the tutorial


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--epochs", type=count, default=4, help="passes over the training set (default: %(default)s)")
    option("--batch-size", type=count, default=64, help="images a step, all ranks together (default: %(default)s)")
    option("--hidden", type=count, default=1024, help="width of the hidden layers (default: %(default)s)")
    option("--layers", type=count, default=4, help="hidden layers (default: %(default)s)")
    option("--learning-rate", type=float, default=1e-3, help="(default: %(default)s)")
    option("--seed", type=int, default=1, help="of the split, the parameters and the order (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/sharded_digits.png"), help="the plot's file (default: %(default)s)")
    return parser.parse_args()


class Net(nn.Module):
    """The tutorial's net for pictures of 8 x 8, with as many hidden layers as one likes."""

    def __init__(self, hidden, layers):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        widths = [64 * 2 * 2] + layers * [hidden]
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, widths[1:], strict=False))
        for layer in self.hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.out = nn.Linear(hidden, 10)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = torch.flatten(self.dropout1(functional.max_pool2d(x, 2)), 1)
        for layer in self.hidden:
            x = functional.relu(layer(x))
        return self.out(self.dropout2(x))


def in_ddp(model, comm):
    # Of the first convolution: with one channel its gradient's layout has another name for the same places.
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    ddp = collectives.DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.register_comm_hook(collectives.HookState(comm), collectives.fused_allreduce)
    return ddp


BY_SIZE = functools.partial(size_based_auto_wrap_policy, min_num_params=LEAST)
WAYS = {
    "DDP": in_ddp,
    "one unit": ShardedDataParallel,
    "wrap policy": functools.partial(ShardedDataParallel, auto_wrap_policy=BY_SIZE),
    "CPU offload": functools.partial(
        ShardedDataParallel, auto_wrap_policy=BY_SIZE, cpu_offload=CPUOffload(offload_params=True)
    ),
}


# ---- What a rank's memory is.


class Memory:
    """Peak bytes since `start`: of tensors on a GPU, else of this process, with its part of shared memory.

    What an idle rank has when this is made is taken off: the interpreter and libraries. Each way of training has a
    communicator of its own, so that its buffers go with it.
    """

    def __init__(self, device):
        self.device = device
        self.idle = 0
        self.start()
        self.idle = self.peak()

    def start(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what malloc holds and nobody uses goes back to the system
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts from VmRSS again

    def peak(self):
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.idle
        peak, resident = self._read("status", "VmHWM"), self._read("status", "VmRSS")
        return peak - resident + self._read("smaps_rollup", "Pss") - self.idle

    @staticmethod
    def _read(file, name):
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise SystemExit(f"/proc/self/{file} has no {name}")


# ---- Training.


def train_in(way, initial, data, steps, memory, arguments, comm):
    """Train in one of the ways, on a communicator that ends with it; return what is reported."""
    with comm.split(0) as own:
        found = train_on(own, way, copy.deepcopy(initial), data, steps, memory, arguments)
        gc.collect()  # a DDP object is in a cycle of references
    return found


def train_on(comm, way, model, data, steps, memory, arguments):
    batches, test_x, test_y = data
    model = WAYS[way](model, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    torch.manual_seed(arguments.seed + comm.rank)  # of the dropout
    times, losses = [], torch.empty(steps, device=comm.device)
    dist.barrier()
    memory.start()
    with jobs.progress(comm, way, steps) as bar:
        for step in range(steps):
            images, labels = batches[step]
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
            if memory.device.type == "cuda":
                torch.cuda.synchronize(memory.device)
            times.append((time.perf_counter() - start) * 1e3)
            bar.update()
    most = torch.tensor([memory.peak()], dtype=torch.float64, device=comm.device)
    comm.all_reduce(most, op="max")
    comm.all_reduce(losses, op="avg")
    model.eval()
    accuracy = test_accuracy(model, test_x, test_y, comm)
    whole = model.module if way == "DDP" else model
    return {
        "losses": losses.tolist(),
        "step_ms": round(statistics.median(times), 2),
        "peak_mib": round(most.item() / 2**20, 1),
        "test_accuracy": round(accuracy, 4),
        "identical": jobs.identical_on_all_ranks(whole),
        "print": jobs.fingerprint(whole).hexdigest(),
    }


def save_plot(path, found, bare, title):
    """Draw the peak memory of each way, and the step times."""
    figure, left, right = jobs.new_figure(title)
    bars = left.bar(list(found), [one["peak_mib"] for one in found.values()])
    left.bar_label(bars, fmt="%.1f")
    for name, mib, style in bare:
        left.axhline(mib, color="gray", linestyle=style, label=f"{name}: {mib:.1f}")
    left.set(ylabel="MiB on top of an idle rank's", title="Peak memory of a rank")
    left.legend(title="parameters, gradients, moments", fontsize="small")
    bars = right.bar(list(found), [one["step_ms"] for one in found.values()], color="tab:orange")
    right.bar_label(bars, fmt="%.1f")
    right.set(ylabel="ms", title="One step (median)")
    jobs.save(figure, path)


def train(arguments, comm):
    """Train in each way in turn; return the result's dictionary, and whether it is a success."""
    torch.manual_seed(arguments.seed)
    device = torch.device(comm.device)
    train_x, train_y, test_x, test_y = load_data(arguments.seed, device)
    batches = Batches(train_x, train_y, arguments.batch_size, comm.rank, comm.size, arguments.seed)
    initial = Net(arguments.hidden, arguments.layers).to(device)
    parameters = sum(parameter.numel() for parameter in initial.parameters())
    kept = 16 * parameters / 2**20  # parameter, gradient, two moments: fp32
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {device}: {parameters:,} parameters, "
        f"{arguments.epochs} epochs of {batches.steps_per_epoch} steps of {comm.size} x {batches.share} images",
    )
    data = batches, test_x, test_y
    tiny, steps = Net(8, 1).to(device), arguments.epochs * batches.steps_per_epoch
    for way in WAYS:  # what each way loads and starts is an idle rank's
        train_in(way, tiny, data, 2, Memory(device), arguments, comm)
    memory = Memory(device)
    found, passed = {}, True
    for way in WAYS:
        one = found[way] = train_in(way, initial, data, steps, memory, arguments, comm)
        same = one["equal_to_ddp"] = one["print"] == found["DDP"]["print"]
        may_differ = device.type == "cuda" and way == "CPU offload"
        passed = passed and one["identical"] and (same or may_differ) and one["test_accuracy"] >= THRESHOLD
        jobs.say(
            comm,
            f"{way:>11}  loss {one['losses'][-1]:.4f}  test accuracy {one['test_accuracy']:.4f}  step "
            f"{one['step_ms']:7.2f} ms  peak {one['peak_mib']:7.1f} MiB  {'' if same else 'NOT '}equal to DDP",
        )
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "parameters": parameters,
        "identical_parameters": all(one["identical"] for one in found.values()),
        "equal_to_ddp": {way: one["equal_to_ddp"] for way, one in found.items()},
        "test_accuracy": {way: one["test_accuracy"] for way, one in found.items()},
        "loss_first": round(found["DDP"]["losses"][0], 4),
        "loss_last": {way: round(one["losses"][-1], 4) for way, one in found.items()},
        "step_ms": {way: one["step_ms"] for way, one in found.items()},
        "peak_mib": {way: one["peak_mib"] for way, one in found.items()},
    }
    if comm.rank == 0:
        bare = [("on each rank", kept, "--"), (f"in {comm.size} shards", kept / comm.size, ":")]
        save_plot(arguments.plot, found, bare, f"Digits, {parameters:,} parameters, {comm.size} ranks")
    return result, passed


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))
