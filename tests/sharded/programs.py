"""What the tests of sharded modules train, and the comparison with one process that has all ranks' batches."""

import copy

import torch
from torch import nn

from collectives.sharded import fully_shard


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two layers."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard_blocks(net, **options):
    """Make each block a unit, and the rest."""
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def batch(rank, step):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model, rank, step):
    return model(batch(rank, step)).float().square().mean()


def full_grads(model):
    """Return the whole gradients by name; None where there is none."""
    return {
        name: None if param.grad is None else _whole(param.grad).clone() for name, param in model.named_parameters()
    }


def full_params(model):
    """Return the whole parameters by name."""
    return {name: _whole(param.detach()).clone() for name, param in model.named_parameters()}


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(ours, theirs, rtol=1e-4, atol=1e-6):
    """Return the names that differ, and by how much."""
    wrong = [f"{name} is missing" for name in theirs.keys() ^ ours.keys()]
    for name in theirs.keys() & ours.keys():
        got, want = ours[name], theirs[name]
        if got is None or want is None:
            if got is not want:
                wrong.append(f"{name}: {'None' if got is None else 'a gradient'}")
        elif got.shape != want.shape:
            wrong.append(f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
        elif not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
            wrong.append(f"{name}: by {(got.double() - want.double()).abs().max().item():.2e}")
    return wrong


def averaged(ctx, reference, backward):
    """Return the gradients of one process: the average of `backward(model, rank)` over the ranks."""
    total = {name: None for name, _ in reference.named_parameters()}
    for rank in range(ctx.size):
        reference.zero_grad()
        backward(reference, rank)
        for name, param in reference.named_parameters():
            if param.grad is not None:
                total[name] = param.grad / ctx.size + (0 if total[name] is None else total[name])
    return total


def train_both(ctx, make, shard, loss=loss_of, *, steps=3, tolerance=(1e-4, 1e-6), clip=None):
    """Train a sharded model, and an unsharded one on all ranks' batches; return what differs.

    `loss(model, rank, step)`: the loss of a rank's batch. Gradients are compared in each step, which of
    them are None, too.
    """
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    shard(model)
    ours, theirs = (
        torch.optim.SGD([param for param in each.parameters() if param.requires_grad], 0.05, momentum=0.9)
        for each in (model, reference)
    )
    wrong = []
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        loss(model, ctx.rank, step).backward()
        for rank in range(ctx.size):
            (loss(reference, rank, step) / ctx.size).backward()
        wrong += [f"step {step}, gradient of {each}" for each in differences(
            full_grads(model), full_grads(reference), *tolerance
        )]  # fmt: skip
        if clip is not None:
            for each in (model, reference):
                nn.utils.clip_grad_norm_(each.parameters(), clip)
        ours.step()
        theirs.step()
    return wrong + differences(full_params(model), full_params(reference), *tolerance)
