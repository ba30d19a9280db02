"""What the tests here share: batches on a rank's device, and a comparison with the host engine."""

from __future__ import annotations

import torch

from tests.ddp.training import batch, run

__all__ = ["batches_on", "compare", "loss_of", "nearly", "on_host"]


def batches_on(ctx, count):
    return [tuple(each.to(ctx.device) for each in batch(step, ctx.rank)) for step in range(count)]


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


def on_host(tensors):
    return [each.detach().cpu() for each in tensors]


def compare(program, tmp_path, *args, ranks=2, same=torch.equal):
    """Run a program on the simulated GPU and on the host, and compare what it gives; bit for bit by default."""
    there = run(program, ranks, tmp_path / "simulated", *args, device="simulated")
    here = run(program, ranks, tmp_path / "host", *args)
    for rank in range(ranks):
        for number, (one, other) in enumerate(zip(there[rank], here[rank], strict=True)):
            assert same(one, other), (rank, number, (one.double() - other.double()).abs().max())


def nearly(one, other):
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)
