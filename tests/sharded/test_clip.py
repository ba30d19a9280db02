"""Norms of sharded gradients are those of the whole ones, by torch's functions and by ours."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as clip_of_torch

from collectives.errors import InvalidArgument, InvalidUsage
from collectives.sharded.clip import clip_grad_norm_
from tests.ddp.training import over_gloo, run
from tests.sharded.shards import mesh_of, params_of, set_grads, sharded, values, whole

ORDERS = [2, 2.0, 1, 3.0, math.inf]


def both(mesh, dtype=torch.float32):
    """Return plain and sharded parameters with the same gradients."""
    full, grads = values(0, dtype=dtype), values(1, dtype=dtype)
    found = params_of(full), [nn.Parameter(each) for each in sharded(full, mesh)]
    for params in found:
        set_grads(params, grads)
    return found


def bits(norm):
    return whole(norm).double().item()


@over_gloo
def clip(ctx, replicas):
    mesh = mesh_of(replicas, ctx.size // replicas) if replicas > 1 else mesh_of()
    norms = []
    for order in ORDERS:
        for dtype in (torch.float32, torch.bfloat16):
            of_order = set()
            for function in (clip_of_torch, clip_grad_norm_):
                for foreach in (None, True, False):
                    plain, shards = both(mesh, dtype)
                    norm = function(shards, 0.5, order, foreach=foreach)
                    wanted = clip_of_torch(plain, 0.5, order)
                    assert whole(norm).dtype == wanted.dtype and whole(norm).shape == wanted.shape
                    assert (type(norm) is torch.Tensor) == (function is clip_grad_norm_)
                    torch.testing.assert_close(whole(norm), wanted)
                    for a, b in zip(shards, plain, strict=True):
                        torch.testing.assert_close(whole(a.grad), b.grad)
                    of_order.add(bits(norm))
            assert len(of_order) == 1  # bits, by any function and with or without foreach
            norms.append(of_order.pop())
    return norms


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_norms_are_of_the_whole(ranks, replicas, tmp_path):
    first, *others = run(clip, ranks, tmp_path / "store", replicas)
    assert all(other == first for other in others)


@over_gloo
def mix(ctx):
    """Several meshes, plain parameters, gradients that aren't finite, and none at all."""
    meshes = mesh_of(), mesh_of(2, ctx.size // 2), DeviceMesh("cpu", torch.arange(ctx.size).flip(0))
    full, grads = values(0), values(1)
    shards = [nn.Parameter(sharded(full, meshes[index % 3])[index]) for index in range(len(full) - 1)]
    plain = params_of(full)
    set_grads(plain, grads)
    set_grads(shards, grads[:-1])
    ignored = nn.Parameter(full[-1].clone())
    ignored.grad = grads[-1] + ctx.rank  # rank 0's counts
    for order in (2, math.inf):
        norm = clip_grad_norm_([*shards, ignored], 0.5, order)
        torch.testing.assert_close(norm, clip_of_torch(plain, 0.5, order))
        for a, b in zip(shards, plain, strict=False):
            torch.testing.assert_close(whole(a.grad), b.grad)
    before = whole(shards[0].grad).clone()
    torch.testing.assert_close(clip_grad_norm_(iter([shards[0]]), 1e9), clip_of_torch([plain[0]], 1e9))
    torch.testing.assert_close(clip_grad_norm_(shards[1], 1e9), clip_of_torch([plain[1]], 1e9))
    assert torch.equal(whole(shards[0].grad), before)
    # One rank's part isn't finite: all ranks have it.
    rows = []
    if ctx.rank == ctx.size - 1:
        shards[3].grad.to_local().fill_(math.nan)
        assert shards[3].grad.to_local().numel()
    for order in (2, math.inf):
        rows.append(str(clip_grad_norm_(shards, 0.5, order, foreach=False).item()))
        for function in (clip_grad_norm_, clip_of_torch):
            own = shards if function is clip_grad_norm_ else [shards[0], shards[3]]  # of one mesh
            with pytest.raises(RuntimeError, match="is non-finite"):
                function(own, 1.0, order, error_if_nonfinite=True)
    for param in shards:
        param.grad = None
    rows += [clip_grad_norm_(shards, 1.0).item(), clip_grad_norm_([], 1.0).item()]
    with pytest.raises(InvalidArgument, match="above 0"):
        clip_grad_norm_(shards, 1.0, 0)
    replica, alone = nn.Parameter(distribute_tensor(full[0], meshes[0], [Replicate()])), nn.Parameter(full[0].clone())
    for param in (replica, alone):
        param.grad = param.detach().clone()
    clip_grad_norm_([replica, alone], 0.5)
    assert torch.equal(whole(replica.grad), alone.grad)
    torchs = nn.Parameter(distribute_tensor(full[0], meshes[0], [Shard(0)]))
    torchs.grad = torchs.detach().clone()
    with pytest.raises(InvalidUsage, match=r"Shard\(dim=0\)"):
        clip_grad_norm_(torchs, 1.0)
    empty = nn.Parameter(sharded([torch.empty(0, 3)], meshes[0])[0])
    empty.grad = torch.zeros_like(empty)
    rows += [clip_grad_norm_(empty, 1.0, order).item() for order in (2, math.inf)]
    return rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_meshes_and_plain_parameters(ranks, tmp_path):
    for rows in run(mix, ranks, tmp_path / "store"):
        assert rows == ["nan", "nan", 0.0, 0.0, 0.0, 0.0]
