"""The hook on NCCL: a world of one, and two ranks on one GPU where the library allows that.

DDP's own traffic (the first broadcast, the map of unused parameters) goes over Gloo here, which takes CUDA tensors too.
"""

import pytest
import torch
from torch import nn

import collectives
from tests.ddp.training import buckets_of, gradients, make_model, over_gloo, run, wrap
from tests.unit.test_communicator_gpu import FIRST_TOGETHER, TOGETHER

pytestmark = pytest.mark.gpu

RANKS = pytest.mark.parametrize("ranks", [1, 2])


def on_gpu(function, ranks, *args):
    from collectives.engine import get_engine

    if ranks > 1 and get_engine("nccl").library.version < FIRST_TOGETHER:
        pytest.skip("several ranks on one GPU need NCCL 2.30")
    env = TOGETHER if ranks > 1 else {}
    return run(function, ranks, *args, engine="nccl", timeout=120, env=env, fresh=True)


@over_gloo
def trained(ctx, hook, options, dtype):
    model = make_model(getattr(torch, dtype)).cuda()
    module = wrap(model, hook, device_ids=[0], **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * step + ctx.rank)
        x = torch.randn(8, 12, generator=generator).cuda().to(getattr(torch, dtype))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x).float(), torch.zeros(8, 5).cuda()).backward()
        optimizer.step()
    assert buckets_of(module) > 1
    result = [p.detach().cpu() for p in model.parameters()], [g.cpu() for g in gradients(model)]
    torch.cuda.synchronize()
    return result


@RANKS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_gradients_are_those_of_plain_ddp(tmp_path, ranks, options):
    ours = on_gpu(trained, ranks, tmp_path / "ours", "torch", options, "float32")
    plain = on_gpu(trained, ranks, tmp_path / "plain", "plain", options, "float32")
    for kind in range(2):
        for first, second in zip(ours[0][kind], ours[-1][kind], strict=True):
            assert torch.equal(first, second)
        for a, b in zip(ours[0][kind], plain[0][kind], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@RANKS
def test_two_runs_are_equal_bit_for_bit(tmp_path, ranks):
    first, second = (on_gpu(trained, ranks, tmp_path / name, "alone", {}, "bfloat16") for name in "ab")
    for kind in range(2):
        for a, b in zip(first[0][kind], second[0][kind], strict=True):
            assert torch.equal(a, b)


@over_gloo
def both_devices(ctx):
    """State None opens one communicator for the CPU's buckets and one for the GPU's."""
    grads = []
    for device in ("cpu", "cuda"):
        model = nn.Linear(12, 5).to(device)
        module = wrap(model, "torch")
        module(torch.full((1, 12), ctx.rank + 1.0, device=device)).sum().backward()
        grads.append(model.weight.grad.unique().tolist())
    engines = [comm.engine.name for _, comm in collectives.ddp._opened.values()]
    torch.cuda.synchronize()
    return grads, engines


@RANKS
def test_the_hook_takes_the_buckets_device(tmp_path, ranks):
    for grads, engines in on_gpu(both_devices, ranks, tmp_path / "store"):
        assert grads == [[(ranks + 1) / 2]] * 2 and engines == ["host", "nccl"]
