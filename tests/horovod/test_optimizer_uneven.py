"""hvd.DistributedOptimizer on ranks that differ: in used and sparse parameters, in steps, in process sets."""

import copy
import pickle

import torch
from torch import nn

from collectives import horovod as hvd
from tests.ranks import run_ranks

from .optimizer_training import a_job, same_on_all


class Uneven(nn.Module):
    """`used`: which of its layers are, in which order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.table = nn.Embedding(6, 4, sparse=True)

    def forward(self, used, rows=None):
        x = torch.ones(1, 4) if rows is None else self.table(torch.tensor(rows)).sum(0, keepdim=True)
        for number in used:
            x = self.layers[number](x)
        return x.sum()


def mean_gradients(ctx, model, used, rows):
    """What one process finds: the mean over all ranks of each one's gradient, None where none has one."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for rank in range(ctx.size):
        (alone(used[rank], rows[rank]) / ctx.size).backward()
    return [None if param.grad is None else param.grad.to_dense() for param in alone.parameters()]


def unused_and_sparse(ctx, options):
    none = [None] * ctx.size
    given = dict(options)
    overlaps = given.pop("overlaps", False)
    model = Uneven()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **given)
    params = list(model.parameters())
    for used, rows in (
        ([[0], [0, 1], [1]], none),  # the others are unused everywhere
        ([[0], [0, 1], [1]], none),
        ([[1, 0], [0, 1], [0, 1]], none),  # in another order
        ([[2, 3, 0, 1], [0, 3], [3]], none),  # new ones
        ([[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], [[1, 2, 1], None, [5]]),  # and a sparse one
        ([[0], [0], [0]], [None, [0, 3], None]),
        ([[0], [0], [0]], none),
    ):
        wrapped._reducer._overlaps = overlaps
        wrapped.zero_grad()
        right = mean_gradients(ctx, model, used, rows)
        model(used[ctx.rank], rows[ctx.rank]).backward()
        wrapped.synchronize()
        for (name, param), wanted in zip(model.named_parameters(), right, strict=True):
            assert (param.grad is None) == (wanted is None), (options, used, name)
            if wanted is not None:
                torch.testing.assert_close(param.grad.to_dense(), wanted)
                assert param.grad.is_sparse == (name == "table.weight"), (options, used)
        with wrapped.skip_synchronize():
            wrapped.step()
    assert same_on_all(ctx, model)
    assert len(wrapped._reducer._filler.handles) == len(params)


def sparse_adam(ctx):
    """SparseAdam, which takes sparse gradients alone, trains as one process on the mean of the ranks' gradients."""
    for options in ({"sparse_as_dense": True}, {}):
        torch.manual_seed(5)
        table = nn.Embedding(6, 4, sparse=True)
        alone = copy.deepcopy(table)
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(table.parameters(), lr=0.1), table.named_parameters(), **options
        )
        plain = torch.optim.SparseAdam(alone.parameters(), lr=0.1)
        for step in range(4):
            # In the second step one rank has no gradient at all.
            rows = [None if step == 1 and rank == 1 else torch.tensor([rank, 5, step]) for rank in range(ctx.size)]
            for optimizer in (wrapped, plain):
                optimizer.zero_grad(set_to_none=step != 2)
            for mine in (each for each in rows if each is not None):
                (alone(mine).square().sum() / ctx.size).backward()
            if rows[ctx.rank] is not None:
                table(rows[ctx.rank]).square().sum().backward()
            wrapped.step()
            plain.step()
            torch.testing.assert_close(table.weight, alone.weight)


def frozen_unfrozen_added(ctx):
    none = [None] * ctx.size
    model = Uneven()
    model.layers[1].requires_grad_(False)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.layers[:2].parameters(), lr=0.1))
    for step in range(5):
        if step == 1:
            model.layers[1].requires_grad_(True)
        if step == 2:
            wrapped.add_param_group({"params": list(model.layers[2:].parameters()), "lr": 0.2})
        if step == 3:
            model.layers[0].requires_grad_(False)
        wrapped.zero_grad()
        right = mean_gradients(ctx, model, [[0, 1, 2, 3]] * ctx.size, none)
        model([0, 1, 2, 3]).backward()
        wrapped.synchronize()
        inside = {id(param) for group in wrapped.param_groups for param in group["params"]}
        for param, wanted in zip(model.parameters(), right, strict=True):
            if id(param) in inside and wanted is not None:
                torch.testing.assert_close(param.grad, wanted)
        with wrapped.skip_synchronize():
            wrapped.step()
    assert same_on_all(ctx, model) and len(wrapped._reducer._buckets[-1].params) >= 2


def uneven_numbers_of_steps(ctx):
    """Ranks that have joined give zeros, and their parameters agree later."""
    model = Uneven()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.layers.parameters(), lr=0.1))
    for steps in ((0, 2, 3), (3, 1, 2), (2, 2, 2)):
        for _ in range(steps[ctx.rank]):
            wrapped.zero_grad()
            model([0, 1, 2, 3]).backward()
            wrapped.step()
        hvd.join()
        hvd.synchronize(hvd.allreduce_async(torch.zeros(1)))
        for param in model.parameters():
            hvd.broadcast_(param.data, 2 if steps[2] == 3 else 0)
    assert wrapped._reducer._buckets and same_on_all(ctx, model)


def in_a_process_set(ctx):
    """The ranks outside of the set step on their own."""
    few = hvd.add_process_set([0, 2])
    model = Uneven()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=few)
    for _ in range(3):
        wrapped.zero_grad()
        (model([0, 1]) * (ctx.rank + 1)).backward()
        wrapped.synchronize()
        factor = model.layers[0].weight.grad / (ctx.rank + 1)
        wrapped.zero_grad()
        (model([0, 1]) * (ctx.rank + 1)).backward()
        local = model.layers[0].weight.grad / (ctx.rank + 1)
        torch.testing.assert_close(factor, local if ctx.rank == 1 else local * 2 / (ctx.rank + 1))
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            wrapped.step()
    prints = ctx.exchange(pickle.dumps([param.tolist() for param in model.parameters()]))
    assert prints[0] == prints[2] != prints[1]


def uneven(ctx):
    with a_job(ctx):
        for options in ({}, {"sparse_as_dense": True}, {"gradient_as_bucket_view": False}, {"overlaps": True}):
            unused_and_sparse(ctx, options)
        sparse_adam(ctx)
        frozen_unfrozen_added(ctx)
        uneven_numbers_of_steps(ctx)
        in_a_process_set(ctx)
    return True


def test_ranks_that_differ():
    assert run_ranks(uneven, 3, timeout=60) == [True, True, True]
