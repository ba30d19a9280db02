"""DDP's hooks in C++ on the backend: the bits of Gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.backend.groups import over
from tests.ranks import run_ranks


def train(group, hook, ctx):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)  # several buckets
    ddp._register_builtin_comm_hook(hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    generator = torch.Generator().manual_seed(ctx.rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="only be called once"):
        ddp._register_builtin_comm_hook(hook)
    return [p.detach().clone() for p in ddp.parameters()] + [p.grad for p in ddp.parameters()]


@over("gloo")
def both(ctx):
    ours = dist.new_group(backend="collectives")
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        found = [train(group, hook, ctx) for group in (dist.group.WORLD, ours)]
        for gloo, other in zip(*found, strict=True):
            assert torch.equal(gloo, other), hook
    return True


def test_bits_of_gloo(tmp_path):
    assert all(run_ranks(both, 2, str(tmp_path / "store")))
