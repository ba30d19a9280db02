"""Images or sequences a second under plain DDP, under DDP with our hook, and under
`collectives.auto`, in turn.

    torchrun --nproc-per-node 2 examples/ddp_benchmark.py                   # ResNet-50, pictures of 224 x 224
    mpirun -n 2 python examples/ddp_benchmark.py --model bert               # BERT-base, 128 tokens
    torchrun --nproc-per-node 2 examples/ddp_benchmark.py --tiny            # small models of both kinds: some seconds

Synthetic data and a step of SGD, as in the benchmarks of Horovod and others: what is measured is
computation and gradients, not the reading of data. Any launcher, CPU or GPUs (NCCL then). `hook` is
on our DistributedDataParallel, whose gradients are views of its buckets; `plain` and `auto` are
torch's, with its own defaults. Blocks of steps are made in turn in one run; a block's time is that
of the slowest rank; the median block counts, and the first steps of each way don't. After the
timing all ways are given the same parameters and the same batches, and their gradients compared.
The last line on stdout is one JSON object, which `--json FILE` also appends to a file; the exit
status is 1 if the ways' gradients or the ranks' parameters differ.
"""

import argparse
import copy
import json
import logging
import statistics
import sys
import time
from pathlib import Path

import jobs
import models
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives
import collectives.auto
from collectives.bench.provenance import where_and_when

WAYS = ("plain", "hook", "auto")
# Largest difference of two ways' gradients, by the norm of all. fp32: sums in another order, and
# the convolutions of a GPU, which add in no order. bf16: 2**-8 a rounding, of activations that such
# a difference has moved.
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    on_gpu = torch.cuda.is_available()
    option("--model", choices=("resnet50", "bert"), default="resnet50", help="(default: %(default)s)")
    option("--tiny", action="store_true", help="a small model of that kind, on small pictures or short sequences")
    size = 32 if on_gpu else 4
    option("--batch-size", type=count, default=size, help="of each rank (default here: %(default)s)")
    option("--image-size", type=count, help="pictures are so many pixels high and wide (default: 224, tiny: 32)")
    option("--length", type=count, help="tokens of a sequence (default: 128, tiny: 16)")
    option("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(default: all)")
    option("--blocks", type=count, default=5, help="turns of each way (default: %(default)s)")
    option("--steps", type=count, default=10 if on_gpu else 5, help="of one turn (default here: %(default)s)")
    option("--warm-up", type=count, default=3, help="steps of each way before the first turn (default: %(default)s)")
    option("--bf16", action="store_true", help="compute under autocast to bfloat16; gradients stay fp32")
    option("--seed", type=int, default=1, help="of parameters and data (default: %(default)s)")
    option("--json", type=Path, help="append the result to this file")
    option("--plot", type=Path, default=Path("out/ddp_benchmark.png"), help="(default: %(default)s)")
    arguments = parser.parse_args()
    arguments.ways = [way for way in WAYS if way in arguments.ways]
    arguments.image_size = arguments.image_size or (32 if arguments.tiny else 224)
    arguments.length = arguments.length or (16 if arguments.tiny else 128)
    if arguments.length > 512:
        parser.error("--length: this BERT has 512 positions")
    return arguments


# ---- What is trained.


class Pictures:
    """ResNet-50 and a batch of random pictures."""

    unit = "images"

    def __init__(self, arguments, device):
        tiny = {"blocks": (1, 1, 1, 1), "width": 16, "classes": 10} if arguments.tiny else {}
        self.model = models.ResNet(**tiny).to(device)
        self.expected = None if tiny else models.RESNET_50_PARAMETERS
        side, n = arguments.image_size, arguments.batch_size
        self.pictures = torch.randn(n, 3, side, side, device=device)
        self.labels = torch.randint(self.model.classify.out_features, (n,), device=device)

    def loss(self, model):
        return nn.functional.cross_entropy(model(self.pictures), self.labels)


class Sequences:
    """BERT-base and a batch of random tokens, of which about 15% are to be guessed."""

    unit = "sequences"

    def __init__(self, arguments, device):
        tiny = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 1000} if arguments.tiny else {}
        self.model = models.Bert(**tiny).to(device)
        self.expected = None if tiny else models.BERT_BASE_PARAMETERS
        words, n, length = self.model.words.num_embeddings, arguments.batch_size, arguments.length
        self.tokens = torch.randint(words, (n, length), device=device)
        places = torch.stack([torch.randperm(length, device=device) for _ in range(n)])
        self.asked = places[:, : max(1, length * 20 // 128)]
        self.guessed = self.tokens.gather(1, self.asked).flatten()
        self.follows = torch.randint(2, (n,), device=device)

    def loss(self, model):
        words, follows = model(self.tokens, self.asked)
        return nn.functional.cross_entropy(words.flatten(0, 1), self.guessed) + nn.functional.cross_entropy(
            follows, self.follows
        )


# ---- The ways.


class AutoLog(logging.Handler):
    """What `collectives.auto` has said on rank 0 of the model whose first forward was the last."""

    def __init__(self):
        super().__init__()
        self.text = None
        log = logging.getLogger("collectives.auto")
        log.addHandler(self)
        log.setLevel(logging.INFO)
        log.propagate = False

    def emit(self, record):
        self.text = record.getMessage().partition(": ")[2]


class Way:
    """The same model trained in one of the ways. `task`: what gives the loss; its model is
    copied.
    """

    def __init__(self, name, task, arguments, device):
        self.name, self.task, self.device = name, task, device
        self.bf16, self.batch, self.seconds = arguments.bf16, arguments.batch_size, []
        model = copy.deepcopy(task.model)
        ids = [device.index] if device.type == "cuda" else None
        if name == "hook":
            self.ddp = collectives.DistributedDataParallel(model, device_ids=ids)
            self.ddp.register_comm_hook(collectives.fused_allreduce)
        else:
            self.ddp = DistributedDataParallel(model, device_ids=ids)
        if name != "auto":
            collectives.auto.leave_alone(self.ddp)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)

    def backward(self):
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.task.loss(self.ddp)
        loss.backward()

    def steps(self, count):
        """Make steps; return the seconds that they took."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            self.backward()
            self.optimizer.step()
        self.wait()
        return time.perf_counter() - start

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gradients_from(self, parameters, seed):
        """Return the gradients of this batch at given parameters, as one tensor; `seed` is that of
        the dropout.
        """
        with torch.no_grad():
            for mine, value in zip(self.ddp.parameters(), parameters, strict=True):
                mine.copy_(value)
        torch.manual_seed(seed)
        self.backward()
        return torch.cat([parameter.grad.detach().reshape(-1) for parameter in self.ddp.parameters()])


def time_in_turn(ways, arguments, comm):
    """Fill each way's seconds a block, the slowest rank's."""
    with jobs.progress(comm, "warm-up", len(ways) * arguments.warm_up) as bar:
        for way in ways:
            for _ in range(arguments.warm_up):
                way.steps(1)
                bar.update()
    with jobs.progress(comm, "timed", arguments.blocks * len(ways) * arguments.steps) as bar:
        for block in range(arguments.blocks):
            for turn in range(len(ways)):
                way = ways[(turn + block) % len(ways)]  # who goes first changes from block to block
                way.steps(1)  # caches hold the way before
                dist.barrier()
                way.seconds.append(way.steps(arguments.steps))
                bar.update(arguments.steps)
    for way in ways:
        slowest = torch.tensor(way.seconds, dtype=torch.float64, device=comm.device)
        comm.all_reduce(slowest, op="max")
        way.seconds = slowest.tolist()
        way.rates = [way.batch * comm.size * arguments.steps / seconds for seconds in way.seconds]


def compare(ways, comm):
    """Return how far each way's gradients are from the first one's, by their norm, and those that
    aren't reduced.
    """
    parameters = [parameter.detach().clone() for parameter in ways[0].ddp.parameters()]
    seed = 1000 + comm.rank
    reference = ways[0].gradients_from(parameters, seed)
    apart = {}
    for way in ways[1:]:
        apart[way.name] = way.gradients_from(parameters, seed).sub_(reference).norm() / reference.norm()
    with ways[0].ddp.no_sync():
        own = ways[0].gradients_from(parameters, seed).sub_(reference).norm() / reference.norm()
    found = torch.stack([*apart.values(), own]).double()
    comm.all_reduce(found, op="max")
    *values, own = found.tolist()
    return dict(zip(apart, values, strict=True)), own


def save_plot(path, ways, unit, title):
    figure, left, right = jobs.new_figure(title)
    for way in ways:
        left.plot(range(1, len(way.rates) + 1), way.rates, "o-", label=way.name, linewidth=1.2)
    left.set(xlabel="block of steps", ylabel=f"{unit} a second, all ranks", title="Blocks, in turn", ylim=(0, None))
    left.legend()
    bars = right.bar([way.name for way in ways], [statistics.median(way.rates) for way in ways])
    right.bar_label(bars, fmt="%.4g")
    right.set(ylabel=f"{unit} a second, all ranks", title="Medians")
    jobs.save(figure, path)


def train(arguments, comm):
    """Time all ways in turn and compare them; return the result, and whether it succeeded."""
    device = torch.device(comm.device)
    torch.manual_seed(arguments.seed)
    log = AutoLog()
    kind = Pictures if arguments.model == "resnet50" else Sequences
    task = kind(arguments, device)
    torch.manual_seed(arguments.seed + 1 + comm.rank)  # the same model, and a batch of each rank's own
    model, task = task.model, kind(arguments, device)
    task.model = model
    parameters = models.count(model)
    if task.expected not in (None, parameters):
        raise SystemExit(f"{arguments.model} has {parameters:,} parameters here, and should have {task.expected:,}")
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {device}, {torch.get_num_threads()} threads a rank: "
        f"{arguments.model}{' (tiny)' * arguments.tiny} of {parameters:,} parameters, {comm.size} x "
        f"{arguments.batch_size} {task.unit} a step, {'bf16 autocast' if arguments.bf16 else 'fp32'}",
    )
    ways = [Way(name, task, arguments, device) for name in arguments.ways]
    time_in_turn(ways, arguments, comm)
    # Not the whole state: between two forwards the running statistics of BatchNorm are each rank's
    # own.
    identical = all(jobs.identical_on_all_ranks(nn.ParameterList(way.ddp.parameters())) for way in ways)
    apart, unreduced = compare(ways, comm)
    tolerance = TOLERANCE["bf16" if arguments.bf16 else "fp32"]
    agree = all(value <= tolerance for value in apart.values())

    medians = {way.name: statistics.median(way.rates) for way in ways}
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "identical_parameters": identical,
        "model": arguments.model + "-tiny" * arguments.tiny,
        "parameters": parameters,
        "batch_size": arguments.batch_size,
        "input": arguments.image_size if kind is Pictures else arguments.length,
        "compute": "bf16" if arguments.bf16 else "fp32",
        "threads": torch.get_num_threads(),
        "unit": f"{task.unit} a second, all ranks",
        "rates": {name: round(rate, 3) for name, rate in medians.items()},
        "spread": {way.name: [round(min(way.rates), 3), round(max(way.rates), 3)] for way in ways},
        "step_ms": {way.name: round(statistics.median(way.seconds) / arguments.steps * 1e3, 3) for way in ways},
        "blocks": arguments.blocks,
        "steps": arguments.steps,
        "agree": agree,
        "gradient_differences": apart,
        "difference_if_not_reduced": unreduced,
    }
    if "plain" in medians:
        result["by_plain"] = {name: round(rate / medians["plain"], 3) for name, rate in medians.items()}
    if comm.rank == 0:
        if "auto" in medians:
            result["auto"] = log.text or "one rank: nothing to reduce"
        if device.type == "cuda":
            result["gpu"] = torch.cuda.get_device_name(device)
        for way in ways:
            jobs.say(
                comm,
                f"{way.name:>8}  {medians[way.name]:10.2f} {task.unit}/s on {comm.size} ranks "
                f"({medians[way.name] / comm.size:.2f} a rank; blocks {min(way.rates):.2f} to {max(way.rates):.2f})",
            )
        save_plot(arguments.plot, ways, task.unit, f"{result['model']}, {comm.size} ranks, {result['compute']}")
        if arguments.json:
            row = {"benchmark": "examples/ddp_benchmark", **result, "torch": torch.__version__, **where_and_when()}
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    del ways
    return result, identical and agree


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments(), gpu_backend="nccl", repeatable=False))
