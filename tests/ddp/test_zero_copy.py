"""DDP's own buckets as memory that the ranks share."""

import ctypes
import gc
import pickle

import pytest
import torch
from torch import nn

import collectives
from tests.ddp.training import over_gloo, run, wrap

WIDTH = 3000  # 36 MB in one bucket
M_MMAP_THRESHOLD = -3


def map_large_memory():
    """Have malloc give what is larger than 1 MiB a mapping of its own. Else what was freed before would decide."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1


def steps(ddp, rank, count):
    found = []
    for step in range(count):
        ddp.zero_grad()
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
        found.append(ddp.module.weight.grad[::500].clone())
    return found


@over_gloo
def trained(ctx, zero_copy, views):
    map_large_memory()
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    comm = ctx.communicator()
    before = comm.engine.library.memory_in_use()
    state = collectives.HookState(comm=comm, zero_copy=zero_copy)
    ddp = wrap(model, "torch", state, bucket_cap_mb=60, gradient_as_bucket_view=views)
    found = steps(ddp, ctx.rank, 4)
    shared = comm.engine.library.memory_in_use() - before
    if zero_copy:
        assert shared > 4 * WIDTH * WIDTH
        assert "zero_copy: 1 of 1 buckets shared" in repr(state)
        assert views == comm.engine.library.memory_shared(model.weight.grad.data_ptr(), 4 * WIDTH * WIDTH)
    else:
        assert shared == 0
    # The gradients outlive DDP and are the program's own again once the model is gone.
    kept = model.weight.grad
    want = kept.clone()
    del ddp, model
    gc.collect()
    assert comm.engine.library.memory_in_use() == before
    assert torch.equal(kept, want)
    kept += 1
    return found


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.sampled(one_in=3)
def test_buckets_are_shared_and_given_back(tmp_path, views):
    shared = run(trained, 2, tmp_path / "a", True, views, fresh=True)
    env = [{"COLLECTIVES_SHARE_AFTER": "0"}] * 2  # nor does the engine do it by itself
    staged = run(trained, 2, tmp_path / "b", False, views, fresh=True, env=env)
    for got, want in zip(shared, staged, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*shared, strict=True))


@over_gloo
def of_torchs_own_class(ctx):
    """DDP makes its final buckets outside of malloc's heap, also where malloc would put them there."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1
    held = [torch.empty(WIDTH * WIDTH) for _ in range(4)]
    del held  # so the heap has room
    state = collectives.HookState(comm=ctx.communicator())
    ddp = wrap(nn.Linear(WIDTH, WIDTH), "torch", state, bucket_cap_mb=60)
    steps(ddp, ctx.rank, 5)
    assert "zero_copy: 1 of 1 buckets shared" in repr(state)


def test_buckets_of_torchs_own_class(tmp_path):
    run(of_torchs_own_class, 2, tmp_path / "a", fresh=True)


@over_gloo
def built_again(ctx):
    """The buckets of a dead module are released, though its parameters live on."""
    map_large_memory()
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    comm = ctx.communicator()
    before = comm.engine.library.memory_in_use()
    state = collectives.HookState(comm=comm)
    peak = 0
    for _ in range(3):
        ddp = wrap(model, "torch", state, bucket_cap_mb=60)
        steps(ddp, ctx.rank, 6)
        del ddp
        gc.collect()
        peak = max(peak, comm.engine.library.memory_in_use() - before)
    assert 4 * WIDTH * WIDTH < peak < 8 * WIDTH * WIDTH


def test_built_again(tmp_path):
    run(built_again, 2, tmp_path / "a", fresh=True)


def test_the_state_takes_it_along():
    assert pickle.loads(pickle.dumps(collectives.HookState(zero_copy=False))).zero_copy is False
    assert collectives.HookState().zero_copy is True
    with pytest.raises(collectives.errors.InvalidArgument, match="zero_copy must be True or False"):
        collectives.HookState(zero_copy=1)
