"""torch's own DDP communication hooks on the backend "collectives"."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from tests.ddp.training import loss_of, run, wrap

STEPS = 6


def make_model():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(12, 64), *(torch.nn.Linear(64, 64) for _ in range(3)), torch.nn.Linear(64, 5)]
    return torch.nn.Sequential(*layers)


def bf16_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, which DDP refuses on the CPU by its name."""
    return default_hooks.bf16_compress_hook(state, bucket)


def bucket_by_bucket(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's powerSGD_hook for Gloo, which aborts the process where two buckets' calls come in other orders."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def trained(hook, state=None, averager=None):
    """Train by one of torch's hooks, on several buckets, and return the parameters and the model's DDP object."""
    ddp = wrap(make_model(), "plain", bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if averager is not None:
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, number, dist.get_rank()).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def by_all_hooks(ctx, path, backend):
    dist.init_process_group(backend, init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    power = bucket_by_bucket if backend == "gloo" else powerSGD_hook.powerSGD_hook
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    found = {}
    for name, hook in (
        ("allreduce", default_hooks.allreduce_hook), ("fp16", default_hooks.fp16_compress_hook), ("bf16", bf16_hook),
        ("wrapped", wrapped),
    ):  # fmt: skip
        found[name] = trained(hook)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    found["powerSGD"] = trained(power, state)
    for name, own_gradients in (("local", True), ("local, in subgroups", False)):
        subgroup, _ = dist.new_subgroups(group_size=1)
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, 2, post_local_gradient_allreduce=not own_gradients)
        averager = PeriodicModelAverager(period=2, warmup_steps=2)
        found[name] = trained(post_localSGD_hook.post_localSGD_hook, state, averager)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchs_hooks_train_as_on_gloo(tmp_path, ranks):
    ours = run(by_all_hooks, ranks, str(tmp_path / "ours"), "collectives")
    gloos = run(by_all_hooks, ranks, str(tmp_path / "gloo"), "gloo")
    assert len(ours[0]) == 7
    for name, expected in gloos[0].items():
        if ranks == 2:  # each sum has one order
            assert torch.equal(ours[0][name], expected), name
        else:  # of 16-bit values Gloo rounds each addition
            rtol = 1e-2 if name in ("fp16", "bf16", "wrapped") else 1e-4
            torch.testing.assert_close(ours[0][name], expected, rtol=rtol, atol=rtol / 10, msg=name)
        if "local" not in name:
            assert all(torch.equal(each[name], ours[0][name]) for each in ours), name
