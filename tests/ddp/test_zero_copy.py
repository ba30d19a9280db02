"""DDP's buckets as memory that the ranks share, from their beginning."""

import copy
import gc
import re
import resource
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import collectives
from tests.backend.groups import over
from tests.ddp.training import over_gloo, run

WIDTH = 300
NBYTES = 4 * WIDTH * WIDTH  # of a weight


def make_ddp(kind, state, **options):
    """DDP of torch's class or of ours with the hook, or of torch's over our backend without one."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    options = {"bucket_cap_mb": NBYTES / 2**20, **options}
    if kind == "ours":
        ddp = collectives.DistributedDataParallel(model, **options)
        ddp.register_comm_hook(state, collectives.fused_allreduce)
        return ddp
    ddp = DistributedDataParallel(model, **options)
    if kind == "torch":
        ddp.register_comm_hook(state, collectives.fused_allreduce)
    return ddp


def steps(ddp, rank, count):
    found = []
    for step in range(count):
        ddp.zero_grad()
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()
        found += [param.grad.clone() for param in ddp.module.parameters()]
    return found


def are_shared(library, model):
    return [library.memory_shared(param.grad.data_ptr(), param.grad.nbytes) for param in model.parameters()]


def memory_when_released(library, want):
    """Return the memory in use, once it is `want` or after 30 s: the queue's thread may hold a bucket for a moment."""
    gc.collect()
    deadline = time.monotonic() + 30
    while library.memory_in_use() != want and time.monotonic() < deadline:
        time.sleep(0.001)
    return library.memory_in_use()


def trained(ctx, kind, zero_copy, options):
    library = ctx.communicator().engine.library
    gc.collect()
    before = library.memory_in_use()
    state = collectives.HookState(comm=ctx.communicator(), zero_copy=zero_copy)
    ddp = make_ddp(kind, state, **options)
    model = ddp.module
    found = steps(ddp, ctx.rank, 7)
    views = options["gradient_as_bucket_view"]
    assert are_shared(library, model) == [zero_copy and views] * 2
    if zero_copy:
        assert library.memory_in_use() - before >= 2 * NBYTES
    else:
        assert library.memory_in_use() == before
    if kind != "backend":
        assert re.search(r"zero_copy: ([12]) of \1 buckets shared" if zero_copy else "zero_copy: off", repr(state))
    # The gradients outlive DDP, and hold the bucket's memory where they lie in it.
    kept = [param.grad for param in model.parameters()]
    want = [grad.clone() for grad in kept]
    del ddp, model, state
    if not (zero_copy and views):
        assert memory_when_released(library, before) == before
    assert all(map(torch.equal, kept, want))
    kept[0] += 1
    assert (library.memory_in_use() > before) == (zero_copy and views)
    kept.clear()
    assert memory_when_released(library, before) == before
    return found


MODES = {
    "views": {"gradient_as_bucket_view": True},
    "copies": {"gradient_as_bucket_view": False},
    "static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "unused parameters": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
}


def built_again(ctx):
    """The buckets of a dead module are released, though its parameters live on."""
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    comm = ctx.communicator()
    before = comm.engine.library.memory_in_use()
    state = collectives.HookState(comm=comm)
    peak = 0
    for _ in range(3):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, collectives.fused_allreduce)
        steps(ddp, ctx.rank, 6)
        peak = max(peak, comm.engine.library.memory_in_use() - before)
        del ddp
        memory_when_released(comm.engine.library, before)
    assert NBYTES < peak < 2 * NBYTES
    assert comm.engine.library.memory_in_use() == before


def others_are_left_alone(ctx):
    """While DDP makes its buckets, tensors that are none are allocated as always."""
    library = ctx.communicator().engine.library
    ddp = make_ddp("ours", collectives.HookState(comm=ctx.communicator()))
    steps(ddp, ctx.rank, 3)
    before = library.memory_in_use()
    tensors = torch.empty(1 << 20), torch.zeros(1 << 20), torch.empty(1 << 20, dtype=torch.int32)
    assert not any(library.memory_shared(each.data_ptr(), each.nbytes) for each in tensors)
    assert library.memory_in_use() == before


def copied(ctx):
    """A copied DDP object has buckets of its own, which are shared, too; so are those of no_sync's first backwards."""
    library = ctx.communicator().engine.library
    ddp = make_ddp("backend", None, gradient_as_bucket_view=True)
    steps(ddp, ctx.rank, 3)
    other = copy.deepcopy(ddp)
    other.zero_grad()
    with other.no_sync():
        other(torch.ones(1, WIDTH)).sum().backward()
    want = steps(ddp, ctx.rank, 3)
    assert all(map(torch.equal, steps(other, ctx.rank, 3), want))
    assert are_shared(library, ddp.module) == are_shared(library, other.module) == [True] * 2


@over_gloo
def by_hooks(ctx):
    """Return the gradients that are reduced in ordinary memory, after comparing those of shared buckets with them."""
    staged = trained(ctx, "torch", False, MODES["copies"])
    for kind in ("torch", "ours"):
        for name, mode in MODES.items():
            # With find_unused_parameters torch's class keeps the buckets that it made before the hook was registered.
            if (kind, name) != ("torch", "unused parameters"):
                assert all(map(torch.equal, trained(ctx, kind, True, mode), staged)), (kind, name)
    built_again(ctx)
    others_are_left_alone(ctx)
    return staged


@over("collectives")
def by_backend(ctx):
    found = [trained(ctx, "backend", True, mode) for mode in MODES.values()]
    copied(ctx)
    return found


def test_buckets_are_shared(tmp_path):
    staged, _ = run(by_hooks, 2, tmp_path / "a")
    for found in run(by_backend, 2, tmp_path / "b"):
        for gradients in found:
            assert all(map(torch.equal, gradients, staged))


@over_gloo
def no_memory(ctx):
    """Where the system gives no more shared memory the buckets are staged, with a warning."""
    state = collectives.HookState(comm=ctx.communicator())
    ddp = make_ddp("torch", state, gradient_as_bucket_view=True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
    try:
        with pytest.warns(UserWarning, match=f"a gradient bucket of {NBYTES} bytes lies in ordinary memory"):
            found = steps(ddp, ctx.rank, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    found += steps(ddp, ctx.rank, 5)
    assert "zero_copy: 0 of 2 buckets shared" in repr(state)
    return found


def test_no_memory_to_share(tmp_path):
    staged = run(no_memory, 2, tmp_path / "a", fresh=True)  # whose file has no room that others have left
    assert all(map(torch.equal, *staged))
