"""What the tests of the hooks train: small models on made-up data that is the same wherever it is made."""

import contextlib
import functools
import gc
import pickle
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives
from tests.ranks import run_ranks

# Small enough that the models have several buckets.
BUCKET_MB = 0.004


def run(function, ranks, *args, **options):
    """`run_ranks` for results that hold tensors, which go by value."""
    return [pickle.loads(result) for result in run_ranks(_packed, ranks, function, *args, **options)]


def _packed(ctx, function, *args):
    return pickle.dumps(function(ctx, *args))


def over_gloo(function):
    """Run a function of (ctx, ...) as (ctx, path, ...), inside a default process group over Gloo."""

    @functools.wraps(function)
    def inside(ctx, path, *args, **options):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
        try:
            result = function(ctx, *args, **options)
            # Gloo may hang or crash in its destructor while a DDP object still holds it or a peer still talks to it.
            gc.collect()
            dist.barrier()
            return result
        finally:
            dist.destroy_process_group()

    return inside


def make_model(dtype=torch.float32):
    torch.manual_seed(11)
    layers = [
        nn.Linear(12, 40),
        nn.Tanh(),
        nn.Linear(40, 30),
        nn.Tanh(),
        nn.Linear(30, 30),
        nn.Tanh(),
        nn.Linear(30, 5),
    ]
    return nn.Sequential(*layers).to(dtype)


class Branches(nn.Module):
    """Uses only one of its branches in each forward, so that the other's parameters get no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.trunk = nn.Linear(12, 100)
        self.branches = nn.ModuleList(nn.Linear(100, 5) for _ in range(2))
        self.step = 0

    def forward(self, x):
        branch = self.branches[self.step % 2]
        self.step += 1
        return branch(torch.tanh(self.trunk(x)))


def batch(step, rank, rows=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 12, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def loss_of(model, step, rank, dtype=torch.float32):
    x, y = (each.to(next(model.parameters()).device) for each in batch(step, rank))
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def wrap(model, hook, state=None, **options):
    """DDP with our hook, or plain; by torch's class or by ours with the hook alone."""
    options = {"bucket_cap_mb": BUCKET_MB, **options}
    # The first bucket has a cap of its own, 1 MiB, which these models would not fill.
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(options["bucket_cap_mb"] * 2**20)):
        return _wrap(model, hook, state, options)


def _wrap(model, hook, state, options):
    if hook == "plain":
        return DistributedDataParallel(model, **options)
    if hook == "alone":
        ddp = collectives.DistributedDataParallel(model, **options)
        ddp.register_comm_hook(collectives.fused_allreduce)
        return ddp
    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(state, collectives.fused_allreduce)
    return ddp


def buckets_of(ddp):
    """The number of buckets that the gradients are in now."""
    return len(ddp.reducer._get_zeros_like_grad_buckets())


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(ddp, steps, rank, lr=0.1, accumulate=1, dtype=torch.float32):
    """Run SGD; give the gradients of each step and the parameters at the end."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            context = ddp.no_sync() if part < accumulate - 1 else contextlib.nullcontext()
            with context:
                (loss_of(ddp, step * accumulate + part, rank, dtype) / accumulate).backward()
        seen.append(gradients(ddp))
        optimizer.step()
    return seen, [p.detach().clone() for p in ddp.parameters()]


class Fails(torch.autograd.Function):
    """Passes through, and fails in backward when `on` is set."""

    on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.on:
            raise ArithmeticError("backward was to fail")
        return grad


class FailsMidway(nn.Module):
    """The model of `make_model` with `Fails` in its middle."""

    def __init__(self):
        super().__init__()
        layers = list(make_model().children())
        self.first, self.second = nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])

    def forward(self, x):
        return self.second(Fails.apply(self.first(x)))
