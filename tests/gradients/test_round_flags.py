"""GradientBuckets where ranks don't wait for each other's flags, as on CUDA; the host engine plays its part."""

import contextlib

import pytest
import torch
from torch import nn

import collectives
from collectives.errors import InvalidArgument, InvalidUsage
from tests.ddp.training import make_model
from tests.gradients.test_gradient_buckets import SMALL, assert_bits, averages, backward
from tests.ranks import run_ranks


def made(comm, params, overlap):
    buckets = collectives.GradientBuckets(params, comm=comm, overlap=overlap, **SMALL)
    buckets.all_reduce()
    buckets._flags.is_async = True
    return buckets


def usual_and_unusual(ctx, overlap):
    comm, model = ctx.communicator(), make_model()
    params = list(model.parameters())
    buckets = made(comm, params, overlap)
    waits = []
    exchange = buckets._flags.exchange
    buckets._flags.exchange = lambda *args: waits.append(exchange(*args)) or waits[-1]

    def nothing():
        pass

    def unused_here():
        if ctx.rank == 1:
            params[0].grad = None

    def unused_everywhere():
        for param in params:
            param.grad = None

    def changed_everywhere():
        for param in params:
            param.grad.mul_(2)

    for change in (nothing, nothing, unused_here, changed_everywhere, unused_everywhere, nothing):
        model.zero_grad()
        with buckets.no_sync() if change is unused_here else contextlib.nullcontext():
            backward(model, 0, ctx.rank)
        change()
        unused = change is unused_everywhere
        wanted = None if unused else averages(comm, params)
        buckets.all_reduce()
        assert all(p.grad is None for p in params) if unused else assert_bits(params, wanted) is None
    quiet = [found is None for found in waits]
    buckets.close()
    assert quiet == [True, True, ctx.rank == 0, not overlap, False, True]  # only who has an unusual round waits


def wrong_on_one_rank(ctx, overlap):
    """Rank 1 has a sparse gradient: it raises at once, rank 0 in its next call."""
    comm = ctx.new_communicator()
    table, dense = nn.Embedding(10, 4), nn.Linear(4, 30)
    named = [*table.named_parameters("table"), *dense.named_parameters("dense")]
    buckets = made(comm, named, overlap)
    table.sparse = ctx.rank == 1
    dense(table(torch.tensor([1, ctx.rank]))).sum().backward()
    if ctx.rank == 1:
        with pytest.raises(InvalidArgument, match=r"the gradient of table.weight is sparse"):
            buckets.all_reduce()
    else:
        buckets.all_reduce()
        with pytest.raises(InvalidUsage, match=r"rank 1 has a gradient that can't be averaged in an earlier call"):
            buckets.all_reduce()
    ctx.barrier()
    comm.abort()


def changed_on_one_rank(ctx):
    comm, model = ctx.new_communicator(), make_model()
    params = list(model.parameters())
    buckets = made(comm, params, True)
    backward(model, 0, ctx.rank)
    if ctx.rank == 1:
        params[0].grad.mul_(2)
        with pytest.raises(InvalidUsage, match="after they had been sent, on some ranks and not on all.*no_sync"):
            buckets.all_reduce()
    else:
        buckets.all_reduce()
        with pytest.raises(InvalidUsage, match="changed after they had been sent in an earlier call"):
            buckets.all_reduce()
    ctx.barrier()
    comm.abort()


def unusual_rounds(ctx):
    for overlap in (False, True):
        usual_and_unusual(ctx, overlap)
        wrong_on_one_rank(ctx, overlap)
    changed_on_one_rank(ctx)


def test_ranks_that_do_not_wait_for_each_other():
    run_ranks(unusual_rounds, 2)
